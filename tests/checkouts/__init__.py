"""Real checkouts of Megatron-LM under the chain, on CPUs.

`MEGATRON_LM_DIR` names one, `MEGATRON_CHECKOUTS=A:B` several. A test asks for a dialect; where no checkout of it is
named, the test says so and is skipped. Checkouts are run as they are: Megatron-LM itself builds its C++ helper in them.
"""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.megatron_lm_log import MegatronDialect, megatron_dialect_of
from relayrun.places import CODE_ROOT
from relayrun.tokens.shards.shard import ShardWriter
from tests.workspace import steps

HERE = Path(__file__).resolve().parent
VOCABULARY = 250

ENVIRONMENT = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}",  # make asks python3 for pybind11
    "CUDA_HOME": str(HERE / "cuda"),
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # common.pt holds objects of Megatron's own
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(HERE / "site"),
}
"""Variables of the ranks."""

ON_CPUS = """
    --distributed-backend gloo --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-persist-layer-norm --no-rope-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --attention-backend unfused
"""

TINY = """
    --num-layers 2 --hidden-size 32 --ffn-hidden-size 64 --num-attention-heads 4 --group-query-attention
    --num-query-groups 2 --max-position-embeddings 64 --seq-length 64 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-warmup-iters 2
    --attention-dropout 0 --hidden-dropout 0 --seed 28 --eval-iters 0 --eval-interval 1000 --split 100,0,0
    --tokenizer-type NullTokenizer --ckpt-format torch_dist --exit-signal-handler --log-interval 1 --log-throughput
"""
"""A model of a few thousand weights, without dropout: under stand-ins for CUDA its random numbers are the CPU's."""


def checkout_of(dialect: MegatronDialect) -> Path:
    """The first checkout named in the environment that speaks this dialect, ready to run; skips where there is none."""
    names = [os.environ.get("MEGATRON_LM_DIR", ""), *os.environ.get("MEGATRON_CHECKOUTS", "").split(":")]
    for name in filter(None, names):
        if megatron_dialect_of(Path(name)) is dialect:
            _build(Path(name))
            return Path(name).resolve()
    pytest.skip(
        f"it needs a checkout of Megatron-LM in the dialect {dialect.value}: set MEGATRON_LM_DIR to one, "
        "or MEGATRON_CHECKOUTS to several, with : between"
    )


@cache
def _build(checkout: Path) -> None:
    """Have the helper made once: programs that start side by side would write it at the same time."""
    folder = checkout / "megatron" / "core" / "datasets"
    with open(Path(tempfile.gettempdir()) / f"relayrun-checkout-{os.geteuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        subprocess.run(
            ["make", "-C", str(folder)], env=os.environ | ENVIRONMENT, check=True, capture_output=True, timeout=600
        )


def make_shard(folder: Path, *, seed: int = 1) -> Path:
    """A shard of random documents; returns its prefix."""
    folder.mkdir(exist_ok=True)
    generator = np.random.default_rng(seed)
    lengths = generator.integers(20, 200, 400)
    with_end = generator.integers(0, VOCABULARY, lengths.sum())
    writer = ShardWriter(folder / "toy", np.uint16)
    writer.add(with_end, lengths)
    writer.finish()
    return folder / "toy"


def command(checkout: Path, *flags: str, data: Path, steps: int, interval: int) -> list[str]:
    """What a rank executes: the checkout's own pretrain_gpt.py, without the folders that an attempt decides."""
    words = [sys.executable, str(HERE / "on_cpu.py"), str(checkout / "pretrain_gpt.py")]
    words += [*ON_CPUS.split(), *TINY.split(), "--vocab-size", str(VOCABULARY + 5)]
    words += ["--data-path", str(data), "--data-cache-path", str(data.parent / "cache")]
    words += ["--train-iters", str(steps), "--save-interval", str(interval)]
    if megatron_dialect_of(checkout) is MegatronDialect.NVIDIA:
        words += ["--exit-signal", "SIGUSR2"]
    return [*words, *flags]


def plan(
    checkout: Path,
    folder: Path,
    *flags: str,
    steps: int,
    interval: int = 1000,
    slow: str = "",
    environment: dict[str, str] | None = None,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """What `make_run` takes for a run of this checkout on two ranks.

    `slow`: as MEGATRON_ON_CPU_SLOW. `settings`: further ones of the trainer.
    """
    data = folder / "data" / "toy"
    if not data.with_suffix(".bin").exists():
        make_shard(data.parent)
    words = command(checkout, *flags, data=data, steps=steps, interval=interval)
    trainer_settings = {
        "run": words,
        "dialect": megatron_dialect_of(checkout).value,
        "total_steps": steps,
        "dir": str(checkout),
        **(settings or {}),
    }
    variables = ENVIRONMENT | ({"MEGATRON_ON_CPU_SLOW": slow} if slow else {}) | (environment or {})
    values = {"total_steps": steps, "environment": variables, "time_limit": 1200, "grace_period": 60.0}
    return values | {"trainer": "megatron-lm", "trainer_settings": trainer_settings} | changes


def config(folder: Path, checkout: Path, *, arrays: str = "", **sections: dict[str, Any]) -> Path:
    """Write a run config of this checkout on two ranks, its run directory `folder/run`; return its path.

    `arrays`: Bash text with further flags. `sections`: changes of the config's.
    """
    make_shard(folder / "data")
    python = folder / "python"  # the stand-ins for CUDA stand before the program
    exports = "".join(f"export {name}='{value}'\n" for name, value in ENVIRONMENT.items() if name != "PYTHONPATH")
    path = f'export PYTHONPATH="$PYTHONPATH:{ENVIRONMENT["PYTHONPATH"]}"\n'
    with_stand_ins = f'case "$1" in *.py) set -- {HERE}/on_cpu.py "$@" ;; esac\n'
    python.write_text(f'#!/bin/sh\n{exports}{path}{with_stand_ins}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (folder / "launcher.sh").write_text(f"ON_CPUS_ARGS=({ON_CPUS})\n{arrays}\nexit 1\n")
    values: dict[str, Any] = {
        "project": "tests",
        "name": "megatron",
        "run_dir": str(folder / "run"),
        "trainer": "megatron-lm",
        "megatron_lm": {
            "dir": str(checkout),
            "args_file": str(folder / "launcher.sh"),
            "args": {"tokenizer-type": "NullTokenizer", "tokenizer-model": False, "vocab-size": VOCABULARY + 5},
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
        },
        "data": {"tokenizer": "none", "datasets": [str(folder / "data")]},
        "training": {"steps": 8, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64},
        "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 2},
        "checkpoint": {"interval": 2, "keep_last": 2, "async_save": False},
        "job": {"time": "30", "ntasks_per_node": 2},
        "cluster": {"name": "local", "scheduler": "local", "python": str(python)},
    }
    for name, changes in sections.items():
        values[name] = values.get(name, {}) | changes
    written = folder / "run.yaml"
    written.write_text(yaml_file.dump_yaml(values))
    return written


def evaluated(folder: Path) -> dict[str, Any]:
    """The section `evaluation` of docs/how-to/export.md for checkpoints of Megatron-LM, on a task with own data."""
    from tests.export.models import write_task, write_tokenizer  # which import torch

    page = (CODE_ROOT / "docs/how-to/export.md").read_text(encoding="utf-8")
    (found,) = (text for text in re.findall(r"^```yaml\n(.*?)^```$", page, re.M | re.S) if "convert:" in text)
    section: dict[str, Any] = yaml.safe_load(found)["evaluation"]
    tokenizer = str(write_tokenizer(folder / "tokenizer" / "tokenizer.json", VOCABULARY))
    section["convert"] = [tokenizer if word == "/data/tokenizer" else word for word in section["convert"]]
    tasks = write_task(folder / "tasks", documents=12)
    return section | {"tasks": ["tiny_choice"], "include_path": str(tasks)}


def as_one_attempt(run: Run, whole: Run) -> dict[int, tuple[str, str]]:
    """Loss and gradient norm of every iteration of `run`, to be compared with those of the uncut run.

    NVIDIA's second line of an attempt has the mean loss of its first two iterations. Where it is that of the uncut
    run's two, to the last printed digit but one, the uncut run's loss stands there.
    """
    found, uncut = steps(run), steps(whole)
    for number in run.attempt_numbers():
        begin = run.attempt(number).read_begin()
        second = 2 if begin is None else begin.base_iteration + 2
        if {second, second - 1} <= uncut.keys() and second in found and second > 2:
            mean = (float.fromhex(uncut[second - 1][0]) + float.fromhex(uncut[second][0])) / 2
            if abs(float.fromhex(found[second][0]) - mean) < 2e-6:
                found[second] = (uncut[second][0], found[second][1])
    return found
