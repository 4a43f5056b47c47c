"""Export and import without ranks: the same tensors back, bounded memory, and one error for each wrong input."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from relayrun.cli import main
from relayrun.errors import InputError
from relayrun.train.checkpoint import checksums
from relayrun.train.export.huggingface import write_tokenizer as write_tokenizer_folder
from relayrun.train.export.original import Original
from relayrun.train.export.torch_dist import CheckpointReader, new_folder
from tests import warm
from tests.export.models import LLAMA3, Imported, make_hf, make_run, write_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Imported:
    folder = tmp_path_factory.mktemp("imported")
    return make_run(folder / "run", make_hf(folder / "hf"))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(one: Path, other: Path) -> None:
    first, second = tensors(one), tensors(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        assert torch.equal(value, second[name]), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tie_word_embeddings": True, "rope_scaling": LLAMA3}, id="tied-scaled"),
        pytest.param({"num_key_value_heads": 8}, id="multi-head"),
        pytest.param({"num_key_value_heads": 1, "dtype": torch.bfloat16}, id="one-key-value-head-bf16"),
    ],
)
def test_what_is_imported_is_exported_again_bit_by_bit(tmp_path: Path, changes: dict[str, Any]) -> None:
    hf = make_hf(tmp_path / "hf", **changes)
    run = make_run(tmp_path / "run", hf).run
    assert main(["export", "hf", str(run.path), "--output", str(tmp_path / "out")]) == 0
    assert_same(hf, tmp_path / "out")
    again = make_run(tmp_path / "run again", tmp_path / "out").run
    assert main(["export", "hf", str(again.path), "--output", str(tmp_path / "again")]) == 0
    assert_same(hf, tmp_path / "again")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "again" / name).read_bytes(), name


@pytest.mark.slow
def test_two_exports_of_one_process_number_do_not_share_a_folder(tmp_path: Path) -> None:
    """Two containers number their processes alike, and one deleted what the other had written so far."""
    with new_folder(tmp_path / "out") as one:
        (one / "weights").touch()
        with pytest.raises(InputError, match="another process makes this"), new_folder(tmp_path / "out") as other:
            (other / "other weights").touch()
        assert (one / "weights").exists()
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "weights"]


def test_transformers_opens_it_and_computes_what_the_original_does(tmp_path: Path, imported: Imported) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    output = tmp_path / "it's out"
    assert main(["export", "hf", str(imported.run.path), "--iteration", "7", "--output", str(output)]) == 0
    tokens = torch.randint(300, (2, 64), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours, theirs = (AutoModelForCausalLM.from_pretrained(path)(tokens).logits for path in (output, imported.hf))
    assert torch.equal(ours, theirs)
    tokenizer = AutoTokenizer.from_pretrained(output)
    assert tokenizer("w3 w4")["input_ids"] == [3, 4]
    assert tokenizer.eos_token == "</s>"
    assert {path.stat().st_mode & 0o777 for path in output.iterdir()} == {output.stat().st_mode & 0o666}


def test_weights_in_several_files_have_an_index(tmp_path: Path, imported: Imported) -> None:
    command = ["export", "hf", str(imported.run.path), "--output", str(tmp_path / "out"), "--max-shard-size", "100KB"]
    assert main(command) == 0
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3
    assert files[-1] == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in tensors(imported.hf).values())
    assert all(name in load_file(tmp_path / "out" / file) for name, file in index["weight_map"].items())
    assert_same(imported.hf, tmp_path / "out")
    for file in files:
        assert sum(v.nbytes for v in load_file(tmp_path / "out" / file).values()) <= 100_000


def test_another_type_is_the_rounded_one(tmp_path: Path, imported: Imported) -> None:
    assert main(["export", "hf", str(imported.run.path), "--output", str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    expected = {name: value.bfloat16() for name, value in tensors(imported.hf).items()}
    found = tensors(tmp_path / "out")
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert json.loads((tmp_path / "out/config.json").read_text())["torch_dtype"] == "bfloat16"


PEAK = """
import json, resource, sys
from pathlib import Path
import torch, safetensors.torch
from relayrun.cli import main
from relayrun.cli.model import convert
from relayrun.train.export import huggingface
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM, LlamaForCausalLM
def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024
before = peak()
assert main(sys.argv[1:]) == 0
print("\\n" + json.dumps(peak() - before))
"""


def peak_memory(*arguments: str | Path) -> int:
    """Bytes of a command above what its imports take."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PEAK, *map(str, arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    peak: int = json.loads(done.stdout.splitlines()[-1])
    return peak


@pytest.mark.long
@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_file(tmp_path: Path) -> None:
    """A model of 320 MB in files of 25 MB: twice a file, and less than a third of the 500 MB that may come on top."""
    hf = make_hf(
        tmp_path / "hf",
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=6,
        num_attention_heads=8,
        vocab_size=4096,
        vocabulary=4096,
    )
    assert sum(path.stat().st_size for path in hf.glob("*.safetensors")) > 300_000_000
    assert peak_memory("import", "hf", hf, "--output", tmp_path / "checkpoint") < 200_000_000
    shutil.rmtree(tmp_path / "checkpoint")
    run = make_run(tmp_path / "run", hf).run
    peak = peak_memory("export", "hf", run.path, "--output", tmp_path / "out", "--max-shard-size", "25MB")
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 9
    assert peak < 2 * 25_000_000 + 150_000_000
    for folder in ("hf", "run", "out"):
        shutil.rmtree(tmp_path / folder)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> str:
    """The one message of a command that must fail without leaving anything."""
    output = Path(arguments[arguments.index("--output") + 1])
    before = sorted(output.parent.iterdir())
    assert main([str(argument) for argument in arguments]) == 1
    assert sorted(output.parent.iterdir()) == before
    message = capsys.readouterr().err
    lines = [line for line in message.splitlines() if not line.startswith("  ")]
    assert [line[:7] for line in lines if "was saved without checksums" not in line] == ["error: "]
    assert "Traceback" not in message
    return message


def edited(imported: Imported, folder: Path) -> Imported:
    """A copy of the run to be damaged."""
    shutil.copytree(imported.run.path, folder / "run")
    run = type(imported.run)(folder / "run")
    commits = run.attempt(1).commits
    commits.write_text(commits.read_text().replace(str(imported.run.path), str(run.path)))
    return Imported(run, imported.hf, run.checkpoint(7))


@pytest.mark.slow
def test_each_wrong_input_is_one_clear_error(
    tmp_path: Path, imported: Imported, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    output = outputs / "out"
    own = edited(imported, tmp_path)
    export = ("export", "hf", own.run.path, "--output", output)
    assert "no run directory" in refused(capsys, "export", "hf", tmp_path, "--output", output)
    assert "no checkpoint of iteration 8" in refused(capsys, *export, "--iteration", "8")
    assert "'5 horses' is no size" in refused(capsys, *export, "--max-shard-size", "5 horses")
    output.mkdir()
    assert "this exists already" in refused(capsys, *export)
    output.rmdir()

    shard = next(own.checkpoint.glob("*.distcp"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    assert "no checkpoint of this run is whole" in refused(capsys, *export)
    assert f"torn: {shard.name} has" in refused(capsys, *export, "--iteration", "7")
    own.checkpoint.rename(tmp_path / "aside")  # as keep_last does before an evaluation's job has begun
    assert "was removed: raise checkpoint.keep_last, or evaluation.hold" in refused(capsys, *export, "--iteration", "7")
    (tmp_path / "aside").rename(own.checkpoint)
    commits = own.run.attempt(1).commits
    recorded = commits.read_text()
    commits.write_text(re.sub(r'"files": {.*?}', '"files": {}', recorded))  # the records know of no sizes
    for hashes in (True, False):  # those of an earlier version have none
        for path in [] if hashes else own.checkpoint.glob("*checksums.json*"):
            path.unlink()
        shard.write_bytes(whole[:-1])
        assert f"damaged: {shard.name} has {len(whole) - 1} bytes" in refused(capsys, *export)
        shard.unlink()
        assert f"damaged: {shard.name} is missing" in refused(capsys, *export)
        shard.write_bytes(bytes(len(whole)))
        words = "are not those that were saved" if hashes else f"damaged: {shard.name} holds zeros at byte"
        assert words in refused(capsys, *export)
        shard.write_bytes(whole)
        (own.checkpoint / ".metadata").rename(tmp_path / "metadata")
        words = "damaged: .metadata is missing" if hashes else "no torch_dist checkpoint"
        assert words in refused(capsys, *export)
        (own.checkpoint / ".metadata").write_bytes((tmp_path / "metadata").read_bytes()[:100])
        words = "damaged: .metadata has 100 bytes" if hashes else "its .metadata cannot be read"
        assert words in refused(capsys, *export)
        shutil.copy(tmp_path / "metadata", own.checkpoint / ".metadata")

    revision = own.run.config_revision(1)
    config = revision.read_text()
    revision.write_text(config.replace("num_layers: 3", "num_layers: 4"))
    message = refused(capsys, *export)
    assert "is not the model of its run's config: decoder.layers." in message
    assert "more differences" in message
    revision.write_text(
        config.replace("untie_embeddings_and_output_weights: true", "untie_embeddings_and_output_weights: false")
    )
    assert "output_layer.weight is no weight of a Llama" in refused(capsys, *export)
    revision.write_text(config)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 299)
    revision.write_text(config.replace(str(own.hf / "tokenizer.json"), str(tokenizer)))
    assert "not the tokenizer that the run began with" in refused(capsys, *export)
    revision.write_text(config)
    assert main([str(argument) for argument in export]) == 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; only 'llama', 'qwen3', 'mixtral', 'apertus' can be imported"),
        ({"attention_bias": True}, "attention_bias is True; only False"),
        ({"head_dim": 16}, "self_attn.q_proj.weight has the shape (64, 64), not (128, 64)"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 10000.0}}, "is 'yarn'; only 'llama3'"),
        ({"rope_parameters": LLAMA3 | {"low_freq_factor": 2.0, "rope_theta": 1e4}}, "low_freq_factor is 2.0; only 1"),
        ({"num_hidden_layers": 4}, "model.layers.3.input_layernorm.weight has the shape None"),
        ({"num_hidden_layers": 2}, "model.layers.2.input_layernorm.weight is no weight of a Llama"),
        ({"vocab_size": 299}, "its tokenizer has 300 entries, its embeddings 299"),
        ({"hidden_size": "64"}, "does not describe a Llama"),
    ],
)
def test_another_architecture_is_not_imported(
    tmp_path: Path, imported: Imported, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(imported.hf, hf)
    config = json.loads((hf / "config.json").read_text())
    (hf / "config.json").write_text(json.dumps(config | changes))
    assert message in refused(capsys, "import", "hf", hf, "--output", tmp_path / "out")


def test_a_damaged_folder_is_not_imported(
    tmp_path: Path, imported: Imported, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = tmp_path / "hf"
    shutil.copytree(imported.hf, hf)
    command = ("import", "hf", hf, "--output", tmp_path / "out")
    weights = (hf / "model.safetensors").read_bytes()
    (hf / "model.safetensors").write_bytes(weights[:-8])
    assert "its weights cannot be read" in refused(capsys, *command)
    (hf / "model.safetensors").unlink()
    assert "has no weights in safetensors: No such file or directory: " in refused(capsys, *command)
    (hf / "config.json").write_text("{")
    assert "is no JSON" in refused(capsys, *command)
    (hf / "config.json").unlink()
    assert "has no config.json" in refused(capsys, *command)


def test_a_missing_tokenizer_is_named_and_not_the_output(
    tmp_path: Path, imported: Imported, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(imported.run.path, run)
    for config in run.glob("config/*.yaml"):
        config.write_text(re.sub(r"tokenizer: \S+", f"tokenizer: {tmp_path}/gone", config.read_text()))
    said = refused(capsys, "export", "hf", run, "--output", tmp_path / "out")
    assert str(tmp_path / "gone") in said
    assert "cannot be written" not in said


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param("hf", marks=pytest.mark.long), "torch", "import"])
def test_without_room_nothing_is_left(tmp_path: Path, imported: Imported, what: str) -> None:
    outputs = tmp_path / "outputs"
    outputs.mkdir()
    command = ["import", "hf", imported.hf] if what == "import" else ["export", what, imported.run.path]
    done = warm.run(
        [sys.executable, "-m", "relayrun.cli", *map(str, command), "--output", str(outputs / "out")],
        limits={resource.RLIMIT_FSIZE: (100_000, 100_000)},
    )
    assert done.returncode == 1, done.stderr
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: ", "  -> se"]
    assert f"{outputs / 'out'}: cannot be written: " in done.stderr
    assert "File too large" in done.stderr or "a limit of file sizes" in done.stderr
    assert list(outputs.iterdir()) == []


def test_the_torch_format_holds_the_model_of_one_rank(tmp_path: Path, imported: Imported) -> None:
    for impl in ("transformer_engine", "local"):
        output = tmp_path / impl
        assert (
            main(["export", "torch", str(imported.run.path), "--output", str(output), "--transformer-impl", impl]) == 0
        )
        assert (output / "latest_checkpointed_iteration.txt").read_text() == "7\n"
        state = torch.load(output / "iter_0000007/mp_rank_00/model_optim_rng.pt", weights_only=False)
        assert state["iteration"] == 7
        assert (state["args"].num_layers, state["args"].padded_vocab_size) == (3, 384)
        norm = {"local": "input_layernorm.weight"}.get(impl, "self_attention.linear_qkv.layer_norm_weight")
        original = tensors(imported.hf)
        assert torch.equal(
            state["model"][f"decoder.layers.2.{norm}"], original["model.layers.2.input_layernorm.weight"]
        )
        assert torch.equal(state["model"]["output_layer.weight"][:300], original["lm_head.weight"])
        assert not state["model"]["output_layer.weight"][300:].any()


def test_a_checkpoint_without_hashes_is_exported_with_a_warning(
    tmp_path: Path, imported: Imported, caplog: pytest.LogCaptureFixture
) -> None:
    (folder,) = imported.run.checkpoints.glob("iter_*")
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy)
    CheckpointReader(copy)
    assert caplog.messages == []
    (copy / checksums.CHECKSUM_INDEX).unlink()
    CheckpointReader(copy)
    assert caplog.messages == [f"{copy} was saved without checksums: its bytes are taken as they are"]


@pytest.mark.parametrize("name", ["tokenizer.json", "."])
def test_a_tokenizer_leaves_without_the_dropout_that_training_did_without(tmp_path: Path, name: str) -> None:
    """Who evaluates the model would get other ids each time, which training never saw."""
    file = write_tokenizer(tmp_path / "tokenizer.json")
    definition = json.loads(file.read_text())
    definition["model"]["dropout"] = 0.5
    file.write_text(json.dumps(definition))
    data, output = SimpleNamespace(tokenizer=str(tmp_path / name), cut_by_document={}), tmp_path / "out"
    output.mkdir()
    source: Any = SimpleNamespace(config=SimpleNamespace(data=data), tokenizer=None, manifest=SimpleNamespace(eod=None))
    write_tokenizer_folder(source, output, Original())
    definition["model"]["dropout"] = None
    assert json.loads((output / "tokenizer.json").read_text()) == definition
