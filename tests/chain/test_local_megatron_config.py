"""A run config of trainer megatron-lm, from `relayrun submit` to the last iteration, with a real checkout on CPUs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.config import yamlfile
from relayrun.files import read_lines
from relayrun.rundir.lineage import durable
from relayrun.rundir.plan import Plan
from relayrun.rundir.run import Run
from relayrun.trainers.megatron_lm import checkpoints
from relayrun.trainers.megatron_lm.program import Dialect
from tests.checkouts import ENVIRONMENT, HERE, ON_CPUS, VOCABULARY, checkout_of, make_shard

pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("dialect", list(Dialect), ids=lambda dialect: dialect.value)
def test_settings_and_arrays_and_args_train_a_checkout(
    dialect: Dialect, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkout = checkout_of(dialect)
    make_shard(tmp_path / "data")
    python = tmp_path / "python"  # the stand-ins for CUDA stand before the program
    exports = "".join(f"export {name}='{value}'\n" for name, value in ENVIRONMENT.items() if name != "PYTHONPATH")
    path = f'export PYTHONPATH="$PYTHONPATH:{ENVIRONMENT["PYTHONPATH"]}"\n'
    with_stand_ins = f'case "$1" in *.py) set -- {HERE}/on_cpu.py "$@" ;; esac\n'
    python.write_text(f'#!/bin/sh\n{exports}{path}{with_stand_ins}exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    arrays = tmp_path / "launcher.sh"
    arrays.write_text(f"exit 1\nON_CPUS_ARGS=({ON_CPUS})\nMORE_ARGS=( --lr 2e-3 --save $CKPT_DIR --load $CKPT_DIR )\n")
    values = {
        "project": "tests",
        "name": "megatron",
        "run_dir": str(tmp_path / "run"),
        "trainer": "megatron-lm",
        "megatron_lm": {
            "dir": str(checkout),
            "args_file": str(arrays),
            "args": {"tokenizer-type": "NullTokenizer", "tokenizer-model": False, "vocab-size": VOCABULARY + 5},
        },
        "model": {
            "num_layers": 2,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_attention_heads": 4,
            "num_query_groups": 2,
        },
        "data": {"tokenizer": "none", "datasets": [str(tmp_path / "data")]},
        "training": {"steps": 8, "micro_batch_size": 2, "global_batch_size": 4, "seq_length": 64},
        "optimizer": {"lr": 1e-3, "min_lr": 1e-4, "lr_warmup_steps": 2},
        "checkpoint": {"interval": 2, "keep_last": 2, "async_save": False},
        "job": {"time": "30", "ntasks_per_node": 2},
        "cluster": {"name": "local", "scheduler": "local", "python": str(python)},
    }
    config = tmp_path / "run.yaml"
    config.write_text(yamlfile.dump(values))
    assert main(["submit", str(config)]) == 0, capsys.readouterr().err
    run = Run(tmp_path / "run")
    words = Plan.load(run).trainer_settings["run"]
    assert words[words.index("--lr") + 1] == "2e-3"
    assert durable(run).iteration == 8
    assert [line["iteration"] for line in read_lines(run.attempt(1).metrics)] == list(range(1, 9))
    assert [iteration for iteration, _ in checkpoints.every(run.checkpoints)] == [6, 8]
    assert (run.path / "data_cache").is_dir()
    # raised on a resume: the schedule is the settings', whatever the checkpoint says
    assert main(["resume", str(run.path), "--set", "training.steps=10"]) == 0, capsys.readouterr().err
    assert durable(run).iteration == 10
