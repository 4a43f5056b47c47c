"""A training that moves between checkouts of Megatron-LM and relayrun's own trainer goes on as if it had stayed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_srun import free_port
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.files import read_json_lines
from tests.checkouts import ENVIRONMENT, HERE, ON_CPUS, checkout_of, command, make_shard
from tests.export.models import write_tokenizer
from tests.export.trained import tensors

pytestmark = [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = 1e-5
ORDER = "tests.training.megatron_order:MegatronOrder"
"""Megatron-LM's samples, so that losses are of the same ones."""
_LINE = re.compile(r"iteration +(\d+)/.*lm loss: (\S+)")


def run(words: list[str], environment: dict[str, str], folder: Path) -> str:
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=3000)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def megatron(
    dialect: MegatronDialect, folder: Path, *flags: str, data: Path, steps: int, load: Path
) -> dict[int, float]:
    """Losses by iteration as one rank prints them; checkpoints in `folder`."""
    checkout = checkout_of(dialect)
    folder.mkdir()
    words = command(checkout, *flags, data=data, steps=steps, interval=10)
    words += ["--save", str(folder), "--load", str(load), "--lr-decay-iters", "40", "--override-opt_param-scheduler"]
    words += trigger_path(dialect, folder)
    losses = {int(number): float(loss) for number, loss in _LINE.findall(run(words, ranks(checkout), checkout))}
    if dialect is MegatronDialect.NVIDIA:  # its second line of a start is the mean of two iterations
        first = min(losses)
        losses[first + 1] = 2 * losses[first + 1] - losses[first]
    return losses


def ranks(checkout: Path) -> dict[str, str]:
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    alone |= {"MASTER_PORT": str(free_port()), "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    return os.environ | ENVIRONMENT | alone | {"PYTHONPATH": f"{checkout}:{HERE / 'site'}"}


def native(folder: Path, load: str, *, data: Path, tokenizer: Path, steps: int = 20) -> Run:
    """A run of relayrun's own trainer that begins with `load` and has ended."""
    folder.mkdir()
    values = {
        "project": "tests",
        "name": "border",
        "run_dir": str(folder / "run"),
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
            "rotary_base": 10000,
        },
        "data": {"tokenizer": str(tokenizer), "datasets": [str(data.parent)], "order": ORDER},
        "training": {
            "steps": steps,
            "micro_batch_size": 2,
            "global_batch_size": 4,
            "seq_length": 64,
            "seed": 28,
            "threads": 1,
            "precision": "fp32",
        },
        "optimizer": {
            "lr": 1e-3,
            "min_lr": 1e-4,
            "lr_warmup_steps": 2,
            "lr_decay_steps": 40,
            "weight_decay": 0.01,
            "adam_beta2": 0.999,
        },
        "checkpoint": {"interval": 10, "load": load},
        "job": {"time": "30", "ntasks_per_node": 1},
        "cluster": {"name": "local", "scheduler": "local", "environment": {"PYTHONPATH": str(ROOT)}},
    }
    (folder / "run.yaml").write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    run([sys.executable, "launchers/submit.py", str(folder / "run.yaml")], dict(os.environ), ROOT)
    return Run(folder / "run")


def relayrun(*words: str | Path) -> str:
    return run([sys.executable, "-m", "relayrun.cli", *map(str, words)], dict(os.environ), ROOT)


def within(reference: dict[int, float], losses: dict[int, float], iterations: range) -> None:
    assert [*losses] == [*iterations]
    for iteration in iterations:
        assert abs(losses[iteration] - reference[iteration]) < TOLERANCE, iteration


@pytest.mark.parametrize(
    ("first", "then"),
    [(MegatronDialect.SWISS_AI, MegatronDialect.NVIDIA), (MegatronDialect.NVIDIA, MegatronDialect.SWISS_AI)],
    ids=["swiss-ai-to-nvidia", "nvidia-to-swiss-ai"],
)
def test_a_training_moves_from_one_fork_to_relayrun_and_to_the_other(
    tmp_path: Path, first: MegatronDialect, then: MegatronDialect
) -> None:
    """The first way with `--load` of the folder as it lies, the other with a copy."""
    checkout_of(then)
    data, tokenizer = make_shard(tmp_path / "data"), write_tokenizer(tmp_path / "tokenizer.json", 256)
    stayed = megatron(first, tmp_path / "stayed", data=data, steps=30, load=tmp_path / "stayed")
    load = f"{tmp_path / 'stayed'}:10"
    if first is MegatronDialect.NVIDIA:
        said = relayrun("import", "megatron", load, "--output", tmp_path / "copy")
        assert "iteration 10, 40 samples, weights and optimizer" in said
        load = str(tmp_path / "copy")
    here = native(tmp_path / "native", load, data=data, tokenizer=tokenizer)
    losses = {line["iteration"]: line["loss"] for line in read_json_lines(here.metrics_view) if "loss" in line}
    within(stayed, losses, range(11, 21))
    relayrun("export", "megatron", f"{here.path}:20", "--output", tmp_path / "out")
    moved = megatron(then, tmp_path / "moved", data=data, steps=30, load=tmp_path / "out")
    within(stayed, moved, range(21, 31))
    ends = [tensors(tmp_path / name / "iter_0000030") for name in ("stayed", "moved")]
    assert ends[0].keys() == ends[1].keys()
    assert sum(key.startswith("optimizer.state.exp_avg") for key in ends[0]) == 18
    for key, tensor in ends[0].items():
        assert torch.allclose(tensor, ends[1][key], rtol=1e-3, atol=1e-5), key


def test_the_plain_torch_format_is_that_of_the_forks_own_script(tmp_path: Path) -> None:
    """The weights; and with the optimizer the fork goes on as if nothing had happened."""
    checkout = checkout_of(MegatronDialect.SWISS_AI)
    data, tokenizer = make_shard(tmp_path / "data"), write_tokenizer(tmp_path / "tokenizer.json", 256)
    stayed = megatron(MegatronDialect.SWISS_AI, tmp_path / "stayed", data=data, steps=30, load=tmp_path / "stayed")
    here = native(tmp_path / "native", f"{tmp_path / 'stayed'}:10", data=data, tokenizer=tokenizer)
    relayrun("export", "megatron", here.path, "--output", tmp_path / "out")
    words = [sys.executable, str(HERE / "on_cpu.py"), str(checkout / "scripts/conversion/torchdist_2_torch.py")]
    words += [*ON_CPUS.split(), "--tokenizer-type", "NullTokenizer", "--vocab-size", "255", "--use-checkpoint-args"]
    words += ["--load", str(tmp_path / "out"), "--ckpt-convert-save", str(tmp_path / "theirs")]
    run(words, ranks(checkout), checkout)
    relayrun("export", "torch", here.path, "--optimizer", "--transformer-impl", "local", "--output", tmp_path / "ours")
    models = []
    for folder in (tmp_path / "theirs/torch", tmp_path / "ours"):
        state = read_plain(folder / "iter_0000020/mp_rank_00/model_optim_rng.pt", checkout)
        models.append({name: tensor for name, tensor in state["model"].items() if isinstance(tensor, torch.Tensor)})
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[0].items():
        assert tensor.dtype == models[1][name].dtype, name
        assert torch.equal(tensor, models[1][name]), name
    moved = megatron(
        MegatronDialect.SWISS_AI,
        tmp_path / "moved",
        "--ckpt-format",
        "torch",
        "--no-load-rng",
        data=data,
        steps=30,
        load=tmp_path / "ours",
    )
    within(stayed, moved, range(21, 31))


def read_plain(path: Path, checkout: Path) -> dict[str, dict[str, torch.Tensor]]:
    """The weights of a file in the plain format. The fork's holds its own enumerations, so that it reads the file."""
    script = (
        "import sys, torch; found = torch.load(sys.argv[1], map_location='cpu', weights_only=False)['model']; "
        "torch.save({'model': {k: v for k, v in found.items() if isinstance(v, torch.Tensor)}}, sys.argv[2])"
    )
    target = path.with_suffix(".tensors")
    run([sys.executable, "-c", script, str(path), str(target)], ranks(checkout), checkout)
    found: dict[str, dict[str, torch.Tensor]] = torch.load(target, weights_only=True)
    return found


KINDS = {
    "Llama": "",
    "Qwen3": "--qk-layernorm --kv-channels 16",
    "Mixtral": "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.01",
    "Apertus": "--qk-layernorm --xielu --bf16",  # whose two weights are bf16 in any case
}
"""Flags of a class of transformers besides those of a Llama."""
CASES = [(MegatronDialect.SWISS_AI, kind) for kind in KINDS]
CASES.append((MegatronDialect.NVIDIA, "Qwen3"))  # its router needs TransformerEngine


@pytest.mark.parametrize(("dialect", "kind"), CASES, ids=[f"{dialect.value}-{kind}" for dialect, kind in CASES])
def test_transformers_computes_what_the_checkout_computes(tmp_path: Path, dialect: MegatronDialect, kind: str) -> None:
    """From a checkpoint that the checkout has trained; the same as relayrun's own model, too (`--test-logits`), which
    has no local layers with experts."""
    checkout = checkout_of(dialect)
    data, tokenizer = make_shard(tmp_path / "data"), write_tokenizer(tmp_path / "tokenizer.json", 256)
    words = command(checkout, *KINDS[kind].split(), data=data, steps=4, interval=4)
    words = [word for word in words if not (kind == "Apertus" and word == "--swiglu")]
    words += ["--save", str(tmp_path / "saved"), "--load", str(tmp_path / "saved")]
    run([*words, *trigger_path(dialect, tmp_path)], ranks(checkout), checkout)
    out = ["--output", tmp_path / "out", *([] if kind == "Mixtral" else ["--test-logits"])]
    said = relayrun("export", "hf", tmp_path / "saved", "--tokenizer", tokenizer, *out)
    assert ("logits of megatron-core and transformers on" in said) == (kind != "Mixtral")
    words = [word for word in words if word != "--bf16"]
    words[1:3] = [str(HERE / "on_cpu.py"), str(HERE / "logits.py")]
    run(words, ranks(checkout) | {"LOGITS": str(tmp_path / "logits.pt")}, checkout)
    theirs = torch.load(tmp_path / "logits.pt")
    with torch.no_grad():
        ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)(theirs["tokens"]).logits
    assert ours.shape == theirs["logits"].shape
    assert float((ours - theirs["logits"]).abs().max()) <= TOLERANCE * max(1.0, float(ours.abs().max()))
    assert float(ours.abs().max()) > 0.01


def trigger_path(dialect: MegatronDialect, folder: Path) -> list[str]:
    return ["--trigger-path", str(folder)] if dialect is MegatronDialect.SWISS_AI else []
