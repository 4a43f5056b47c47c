"""An export keeps what the folder said that its model was imported from, or names each difference."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from relayrun.cli import main
from relayrun.config.sections.job import EvaluationJob, EvaluationSection
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.files import append_line, file_sizes, read_json
from relayrun.train.export import compare_logits, huggingface, original, scores
from relayrun.train.export.source_and_target import find_checkpoint
from relayrun.train.export.torch_dist import CheckpointReader, TorchDistSavePlan, new_folder
from tests import warm
from tests.export.models import LLAMA3, Imported, make_hf, make_run, write_tokenizer
from tests.export.test_megatron import changed
from tests.export.trained import make_trained

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::FutureWarning")]

CODE = """from transformers import PreTrainedTokenizerFast
from .words import LIST
class Own(PreTrainedTokenizerFast): ...
"""


def rich_folder(folder: Path, **changes: Any) -> Path:
    """A published model: more rows than tokens, several ends, settings of sampling, templates, code."""
    ids: dict[str, Any] = {"eos_token_id": [0, 5, 7], "bos_token_id": 200, "pad_token_id": 201}
    hf = make_hf(folder, vocabulary=384, max_position_embeddings=4096, **ids | changes)
    write_tokenizer(hf / "tokenizer.json", 300)
    config: dict[str, Any] = {
        "eos_token": "</s>",
        "bos_token": "w200",
        "pad_token": "w201",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    config |= {"auto_map": {"AutoTokenizer": [None, "own_tokens.Own"]}, "model_max_length": 512, "rules": "rules.txt"}
    (hf / "tokenizer_config.json").write_text(json.dumps(config))
    generation = {**ids, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (hf / "generation_config.json").write_text(json.dumps(generation))
    (hf / "own_tokens.py").write_text(CODE)
    (hf / "words.py").write_text("LIST = open('words.txt')\n")
    (hf / "words.txt").write_text("w1\n")
    (hf / "rules.txt").write_text("none\n")
    (hf / "chat_template.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    (hf / "additional_chat_templates").mkdir()
    (hf / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    (hf / "README.md").write_text("of the original\n")
    return hf


CARRIED = [
    "additional_chat_templates/tools.jinja",
    *("chat_template.jinja", "own_tokens.py", "rules.txt"),
    *("tokenizer.json", "tokenizer_config.json", "words.py", "words.txt"),
]


def began_with(folder: Path, hf: Path, **sections: Any) -> Imported:
    """A run that began with an import of the folder, which is gone since, as the import is."""
    start = folder / "start"
    divisible = huggingface.import_huggingface(hf, start).model.make_vocab_size_divisible_by
    made = make_run(folder / "run", hf, divisible_by=divisible, **sections)
    original.keep_original_of(str(start), made.run)
    shutil.rmtree(start)
    return made


def exported(run: Run, folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """Export a run; return the notes."""
    words = ["export", "hf", str(run.path), "--output", str(folder), *options]
    if "--test-logits" in options:  # once per process
        done = warm.run([sys.executable, "-m", "relayrun", *words])
        assert done.returncode == 0, done.stderr
        said = done.stdout
    else:
        assert main(words) == 0
        said = capsys.readouterr().out
    return [line.removeprefix("note: ") for line in said.splitlines() if line.startswith("note: ")]


def test_files_of_a_tokenizer_are_those_that_it_names(tmp_path: Path) -> None:
    assert original.carried_files(rich_folder(tmp_path / "hf")) == CARRIED


def test_what_the_original_said_is_in_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf, out = rich_folder(tmp_path / "hf"), tmp_path / "out"
    made = began_with(tmp_path, hf)
    assert exported(made.run, out, capsys) == []
    was, now = read_json(hf / "config.json"), read_json(out / "config.json")
    for name in was.keys() - {"transformers_version", "dtype", "rope_parameters"}:
        assert now[name] == was[name], name
    assert now["vocab_size"] == 384
    assert now["max_position_embeddings"] == 4096
    assert read_json(out / "generation_config.json") == read_json(hf / "generation_config.json")
    for name in CARRIED:
        assert (out / name).read_bytes() == (hf / name).read_bytes(), name
    assert not (out / "README.md").exists()
    there, here = huggingface.HuggingFaceWeights(hf), huggingface.HuggingFaceWeights(out)
    assert here.shapes == there.shapes
    assert all(here.read(name).equal(there.read(name)) for name in here.shapes)


@pytest.mark.parametrize("tokenizer", [True, False])
def test_the_context_and_the_ids_are_those_of_the_original(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tokenizer: bool
) -> None:
    """Llama 3.2 has half of the context that its scaling allows; a folder may have no tokenizer."""
    rope = LLAMA3 | {"rope_theta": 500000.0}
    hf = make_hf(tmp_path / "hf", max_position_embeddings=131072, rope_parameters=rope, pad_token_id=3, eos_token_id=0)
    made = make_run(tmp_path / "run", hf)
    start = tmp_path / "start"
    shutil.copytree(made.checkpoint, start)
    if not tokenizer:
        (start / "original" / "tokenizer.json").unlink()
    original.keep_original_of(str(start), made.run)
    assert exported(made.run, tmp_path / "out", capsys) == []
    config = read_json(tmp_path / "out" / "config.json")
    assert (config["max_position_embeddings"], config["pad_token_id"]) == (131072, 3)


def test_the_files_come_back_where_the_tokenizer_of_the_run_is_one_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf, alone = rich_folder(tmp_path / "hf"), write_tokenizer(tmp_path / "alone" / "words.json", 300)
    made = began_with(tmp_path, hf)
    revise(made, tokenizer=str(alone))
    assert exported(made.run, tmp_path / "out", capsys) == []
    assert original.carried_files(tmp_path / "out") == CARRIED


def test_another_end_of_document_joins_the_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = began_with(tmp_path, rich_folder(tmp_path / "hf", eos_token_id=[5, 7]))
    notes = exported(made.run, tmp_path / "out", capsys)
    assert notes == ["config.json: eos_token_id is [0, 5, 7], not [5, 7]"]


def test_a_difference_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = rich_folder(tmp_path / "hf")
    made = began_with(tmp_path, hf)
    other = write_tokenizer(tmp_path / "other" / "tokenizer.json", 290)
    revise(made, tokenizer=str(other), vocabulary=290)
    notes = exported(made.run, tmp_path / "out", capsys)
    assert "config.json: pad_token_id is None, not 201" in notes
    assert any(line.startswith("the tokenizer is another one, not as in the original: ") for line in notes)
    assert read_json(tmp_path / "out" / "generation_config.json")["temperature"] == 0.6


def test_an_original_can_be_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = rich_folder(tmp_path / "hf")
    made = began_with(tmp_path, hf)
    shutil.rmtree(made.run.path / "original")
    exported(made.run, tmp_path / "without", capsys)
    assert read_json(tmp_path / "without" / "config.json")["vocab_size"] == 300
    exported(made.run, tmp_path / "out", capsys, "--original", str(hf))
    assert read_json(tmp_path / "out" / "config.json")["vocab_size"] == 384


def test_rows_that_the_tokenizer_does_not_use_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf(tmp_path / "hf", vocabulary=700)
    write_tokenizer(hf / "tokenizer.json", 300)
    made = began_with(tmp_path, hf)
    exported(made.run, tmp_path / "out", capsys, "--test-logits")
    there, here = huggingface.HuggingFaceWeights(hf), huggingface.HuggingFaceWeights(tmp_path / "out")
    assert here.read("lm_head.weight").equal(there.read("lm_head.weight"))


def test_a_checkpoint_of_megatron_lm_has_the_original_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = rich_folder(tmp_path / "hf")
    run = make_trained(tmp_path / "run", hf).run
    assert main(["export", "megatron", str(run.path), "--output", str(tmp_path / "megatron")]) == 0
    folder = changed(tmp_path / "megatron", tmp_path / "changed", max_position_embeddings=256)
    words = ["export", "hf", str(folder), "--tokenizer", str(hf), "--output"]
    assert main([*words, str(tmp_path / "without")]) == 0
    assert read_json(tmp_path / "without" / "config.json")["max_position_embeddings"] == 256
    assert main([*words, str(tmp_path / "out"), "--original", str(hf)]) == 0
    now, was = (read_json(each / "config.json") for each in (tmp_path / "out", hf))
    for name in ("vocab_size", "eos_token_id", "pad_token_id", "max_position_embeddings"):
        assert now[name] == was[name], name
    assert original.carried_files(tmp_path / "out") == CARRIED
    assert main([*words, str(tmp_path / "other"), "--original", str(make_hf(tmp_path / "qwen", "Qwen3"))]) == 0
    assert "note: nothing of the original is kept: its model_type is 'qwen3', not 'llama'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("config.json", {"pad_token_id": 900}, "cannot be opened"),
        ("config.json", {"num_hidden_layers": 4}, "other weights: model.layers.3"),
        ("config.json", {"model_type": "no-such"}, "cannot be opened"),
    ],
)
def test_what_transformers_does_not_open_is_no_export(
    tmp_path: Path, name: str, values: dict[str, Any], says: str
) -> None:
    source = find_checkpoint(began_with(tmp_path, rich_folder(tmp_path / "hf")).run)
    with new_folder(tmp_path / "out") as folder:
        huggingface.write_huggingface(source, folder, dtype="auto", max_shard_size=10**9)
    assert compare_logits.check_opens(source, tmp_path / "out") == []
    path = tmp_path / "out" / name
    path.write_text(json.dumps(read_json(path) | values))
    with pytest.raises(InputError, match=says):
        compare_logits.check_opens(source, tmp_path / "out")


def test_a_tokenizer_that_transformers_reads_otherwise_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf = make_hf(tmp_path / "hf")
    (hf / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer", "eos_token": "</s>"}')
    notes = exported(make_run(tmp_path / "run", hf).run, tmp_path / "out", capsys)
    assert "transformers opens the tokenizer as LlamaTokenizer, which gives other ids than the run's tokenizer" in notes


def revise(made: Imported, *, tokenizer: str, vocabulary: int = 300) -> None:
    """Let the run have another tokenizer."""
    path = made.run.config_revision(1)
    old = str(made.hf / "tokenizer.json")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, tokenizer))
    manifest = read_json(made.run.manifest)
    changed = manifest | {"tokenizer": tokenizer, "vocabulary_size": vocabulary, "tokenizer_fingerprint": ""}
    made.run.manifest.write_text(json.dumps(changed))


def test_the_code_of_another_users_run_is_not_reached_through_links(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    folder = tmp_path / "original"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"a": "b.txt", "up": "../secret", "whole": "/etc/hostname"}')
    (folder / "b.txt").symlink_to(tmp_path / "secret")
    assert original.carried_files(folder) == ["b.txt", "tokenizer_config.json"]
    assert original.carried_files(folder, links=False) == ["tokenizer_config.json"]


def test_the_source_of_a_checkpoint_knows_its_original(tmp_path: Path) -> None:
    made = began_with(tmp_path, rich_folder(tmp_path / "hf"))
    source = find_checkpoint(made.run)
    assert source.original == made.run.path / "original"
    with new_folder(tmp_path / "out") as folder:
        huggingface.write_huggingface(source, folder, dtype="auto", max_shard_size=10**9)


@pytest.mark.parametrize("form", ["plain", "distributed", "flat"])
def test_float32_takes_the_weights_of_the_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], form: str
) -> None:
    made = make_trained(tmp_path / "run", make_hf(tmp_path / "hf"), distributed=form == "distributed", precision="bf16")
    if form == "flat":
        flatten(made)
    assert exported(made.run, tmp_path / "out", capsys, "--dtype", "float32", "--test-logits") == []
    there, here = (huggingface.HuggingFaceWeights(folder) for folder in (made.hf, tmp_path / "out"))
    for name in here.shapes:
        assert here.read(name).dtype == torch.float32
        assert here.read(name).equal(there.read(name)), name
    assert main(["export", "torch", str(made.run.path), "--output", str(tmp_path / "pt"), "--dtype", "float32"]) == 0
    plain = torch.load(next((tmp_path / "pt").rglob("*.pt")), weights_only=False)["model"]
    assert plain["decoder.final_layernorm.weight"].equal(there.read("model.norm.weight"))


def test_float32_says_where_there_are_no_such_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = make_run(tmp_path / "run", make_hf(tmp_path / "hf", dtype=torch.bfloat16))
    notes = exported(made.run, tmp_path / "out", capsys, "--dtype", "float32")
    assert notes == ["float32 holds no more than bfloat16 here: the checkpoint has no fp32 weights of an optimizer"]


def test_an_import_says_what_it_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = make_hf(tmp_path / "hf", dtype=torch.bfloat16)
    tensors = load_file(hf / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].float()
    save_file(tensors, hf / "model.safetensors", metadata={"format": "pt"})
    assert main(["import", "hf", str(hf), "--output", str(tmp_path / "start")]) == 0
    assert "note: 1 of 30 tensors are float32 there: rounded; --dtype float32 keeps them" in capsys.readouterr().out


def flatten(made: Imported) -> None:
    """Write the fp32 weights as megatron-core before 0.14 does: flat parts of each half of the rows."""
    reader, contents = CheckpointReader(made.checkpoint), TorchDistSavePlan()
    prefix = "optimizer.state.fp32_param."
    for key in reader.tensors:
        if not key.startswith(prefix):
            contents.copy_tensor(reader, key, key)
            continue
        size = reader.size(key)
        whole = reader.read(key, start=[0] * len(size), shape=size, dtype=torch.float32)
        inner = key.startswith(f"{prefix}decoder.layers.")
        grid = (size[0] if inner else 2, *(2 if at == 0 and inner else 1 for at in range(len(size) - 1)))
        part = [a // b for a, b in zip(size, grid, strict=True)]
        flat = whole.new_empty(*grid, math.prod(part))
        for cell in itertools.product(*map(range, grid)):
            flat[cell] = whole[tuple(slice(a * n, (a + 1) * n) for a, n in zip(cell, part, strict=True))].flatten()
        contents.add_tensor(
            key, size=flat.shape, start=[0] * flat.dim(), part=flat.shape, dtype=flat.dtype, make=partial(flat.clone)
        )
    new = made.checkpoint.with_name("new")
    new.mkdir()
    contents.write(new, reader.common()).add_checksums(7)
    shutil.rmtree(made.checkpoint)
    new.rename(made.checkpoint)
    (commit,) = made.run.attempt(1).read_commits()
    made.run.attempt(1).commits.unlink()
    append_line(made.run.attempt(1).commits, asdict(commit) | {"files": file_sizes(made.checkpoint)})


def begin_with_bos(made: Imported, bos: int | None) -> None:
    """Let every document of the run's only shard begin with a token, or none."""
    prefix = made.run.path / "data" / "shard"
    lengths = np.full(50, 300)
    ids = 1 + np.arange(lengths.sum()) % 100
    if bos is not None:
        ids[::300] = bos
    prefix.with_suffix(".bin").write_bytes(ids.astype(np.uint16).tobytes())


def test_texts_begin_as_documents_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = began_with(tmp_path, rich_folder(tmp_path / "hf"))
    begin_with_bos(made, 200)
    exported(made.run, tmp_path / "out", capsys)
    assert read_json(tmp_path / "out" / "tokenizer_config.json")["add_bos_token"] is True
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert opened.encode("w5 w6") == [200, 5, 6]
    assert opened.encode("w5 w6", add_special_tokens=False) == [5, 6]
    assert scores.model_arguments(tmp_path / "out", find_checkpoint(made.run), gpus=0)["add_bos_token"] is True


def test_a_tokenizer_that_begins_texts_otherwise_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hf = rich_folder(tmp_path / "hf")
    made = began_with(tmp_path, hf)
    begin_with_bos(made, 200)
    exported(made.run, tmp_path / "first", capsys)
    shutil.copy(tmp_path / "first" / "tokenizer.json", hf / "tokenizer.json")
    revise(made, tokenizer=str(hf / "tokenizer.json"))
    begin_with_bos(made, None)
    notes = exported(made.run, tmp_path / "out", capsys)
    assert "the tokenizer begins a text with w200; no document of the run begins so" in notes
    assert scores.model_arguments(tmp_path / "out", find_checkpoint(made.run), gpus=0)["add_bos_token"] is False


def test_a_large_model_is_spread_over_the_gpus_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_run(tmp_path / "run", make_hf(tmp_path / "hf", dtype=torch.bfloat16))
    source, out = find_checkpoint(made.run), tmp_path / "out"
    scores.export_model(source, out)
    folder = {"pretrained": str(out), "tokenizer": str(out)}
    assert scores.model_arguments(out, source, gpus=1) == {**folder, "dtype": "auto", "parallelize": False}
    assert scores.model_arguments(out, None, gpus=4)["parallelize"] is True
    some = EvaluationSection(interval=7)
    assert scores.visible_gpus(some, 0) == 0
    four = some.model_copy(update={"job": EvaluationJob(gpus_per_node=4)})
    for settings, of_run, words in ((some, 8, "asks for 1 GPUs"), (four, 0, "asks for 4 GPUs")):
        with pytest.raises(InputError, match=words):
            scores.visible_gpus(settings, of_run)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert scores.visible_gpus(four, 0) == 4


@pytest.mark.parametrize("gpus", [0, 2])
def test_the_held_out_loss_is_computed_in_the_type_of_the_weights_on_gpus(tmp_path: Path, gpus: int) -> None:
    """`device_map` takes the CPU where there is no GPU."""
    made = make_run(tmp_path / "run", make_hf(tmp_path / "hf", dtype=torch.bfloat16))
    manifest = read_json(made.run.manifest)
    made.run.manifest.write_text(json.dumps(manifest | {"validation": {"held-out": manifest["datasets"]["train"]}}))
    source, out = find_checkpoint(made.run), tmp_path / "out"
    scores.export_model(source, out)
    found, said = scores.held_out_loss(source, out, EvaluationSection(interval=7, limit=2), gpus=gpus)
    assert (said["dtype"], said["gpus"]) == ("bfloat16" if gpus else "float32", gpus)
    assert found["held-out"]["loss"] == pytest.approx(5.9, abs=0.5)


def test_no_private_file_is_reached_through_a_folder_that_is_a_link(tmp_path: Path) -> None:
    private, folder = tmp_path / "private", tmp_path / "checkpoint" / "original"
    private.mkdir()
    folder.mkdir(parents=True)
    (private / "key.json").write_text("{}")
    (private / "tokenizer.json").write_text("{}")
    (folder / "keys").symlink_to(private)
    (folder / "config.json").write_text('{"a": "keys/key.json"}')
    assert original.carried_files(folder, links=False) == []
    original.keep_original(folder, tmp_path / "kept", links=False)
    assert [path.name for path in (tmp_path / "kept").iterdir()] == ["config.json"]
    (tmp_path / "checkpoint" / "link").symlink_to(private)
    assert original.carried_files(tmp_path / "checkpoint" / "link", links=False) == []
    original.keep_original(tmp_path / "checkpoint" / "link", tmp_path / "nothing", links=False)
    assert not (tmp_path / "nothing").exists()
