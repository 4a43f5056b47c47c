"""`training.deterministic`: what the environment must hold, before the submit, in the job and in the ranks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.config.compose import determinism
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.errors import ConfigError
from relayrun.submit import run_plan
from relayrun.submit.check.report import check_config
from tests import warm


def config(*, environment: dict[str, str] | None = None, gpus: int = 0, **training: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "project": "tests",
            "name": "deterministic",
            "run_dir": "/nowhere",
            "model": {
                "num_layers": 1,
                "hidden_size": 8,
                "ffn_hidden_size": 8,
                "num_attention_heads": 1,
                "num_query_groups": 1,
            },
            "data": {"tokenizer": "none", "datasets": ["none"]},
            "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 1, "seq_length": 8} | training,
            "optimizer": {"lr": 1e-3},
            "checkpoint": {"interval": 5},
            "job": {"time": "10", "gpus_per_node": gpus},
            "cluster": {"name": "here", "scheduler": "local", "environment": environment or {}},
        }
    )


@pytest.mark.parametrize(
    ("name", "value", "say"),
    [
        ("NCCL_ALGO", "Tree", "Ring"),
        ("NCCL_ALGO", "Ring,Tree", "Ring"),
        ("NCCL_ALGO", "^NVLS", "Ring"),
        ("CUBLAS_WORKSPACE_CONFIG", ":0:0", ":4096:8 or :16:8"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1", "0"),
        ("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "", "0"),
    ],
)
def test_a_site_that_takes_determinism_away_is_refused_before_the_submit(name: str, value: str, say: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config(environment={name: value}, deterministic=True)).raise_errors()
    assert f"{name}={value} makes results differ" in caught.value.message
    assert caught.value.where == "cluster.environment of 'here'"
    assert caught.value.hint == f"leave it out, set it to {say}, or set training.deterministic=false"
    check_config(config(environment={name: value})).raise_errors()


def test_what_a_site_may_set_and_other_variables_are_let_pass() -> None:
    environment = {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "NCCL_ALGO": "ring", "NCCL_NET": "Socket"}
    chosen = config(environment=environment, deterministic=True)
    check_config(chosen).raise_errors()
    plan = run_plan.make_plan(chosen, Run(Path("/nowhere")), Path("/code"), revision=1)
    assert plan.environment == {**environment, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}


def test_the_variables_are_in_the_environment_of_every_job() -> None:
    def environment(**training: Any) -> dict[str, str]:
        return run_plan.make_plan(config(**training), Run(Path("/nowhere")), Path("/code"), revision=1).environment

    assert environment() == {}
    assert environment(deterministic=True) == {
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "NCCL_ALGO": "Ring",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    }


def test_on_gpus_the_precision_must_be_said() -> None:
    with pytest.raises(ConfigError) as caught:
        check_config(config(gpus=4)).raise_errors()
    assert caught.value.where == "training.precision"
    assert "this run has GPUs, and its precision is not set" in caught.value.message
    for precision in ("fp32", "bf16"):
        check_config(config(gpus=4, precision=precision)).raise_errors()
        assert config(precision=precision).training.resolved_precision == precision
    check_config(config()).raise_errors()
    assert config().training.resolved_precision == "fp32"


RANK = """
import os, sys
import torch
from relayrun.config.compose.determinism import DETERMINISTIC_VALUES
from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError
from relayrun.train import distributed

off, on = map(RunConfig.model_validate_json, sys.argv[1:])

def enter(config, algorithm):
    os.environ["NCCL_ALGO"] = algorithm
    try:
        distributed.enable_determinism(config)
    except ConfigError as error:
        print(error)
    print(*(os.environ.get(name) for name in DETERMINISTIC_VALUES), torch.are_deterministic_algorithms_enabled())

enter(on, "Tree")
enter(off, "Tree")
enter(on, "ring")
print(torch.is_deterministic_algorithms_warn_only_enabled(), torch.utils.deterministic.fill_uninitialized_memory)
print(torch.backends.cuda.cudnn_sdp_enabled(), torch.backends.cuda.flash_sdp_enabled())
torch.cuda.is_available = lambda: True
os.environ.update(RANK="0", WORLD_SIZE="1")
try:
    distributed.start_process_groups(off)
except ConfigError as error:
    print(error)
"""


@pytest.mark.slow
def test_a_rank_turns_everything_on_and_refuses_an_environment_that_was_changed_on_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a GPU on which no precision is said."""
    program = tmp_path / "rank.py"
    program.write_text(RANK)
    for name in determinism.DETERMINISTIC_VALUES:
        monkeypatch.delenv(name, raising=False)
    configs = [config(deterministic=value).model_dump_json() for value in (False, True)]
    done = warm.run([sys.executable, program, *configs], check=True)
    assert done.stdout.splitlines() == [
        "environment of the rank: NCCL_ALGO=Tree makes results differ from run to run, and training.deterministic "
        "is on",
        "  -> leave it out, set it to Ring, or set training.deterministic=false",
        "None Tree None False",
        "None Tree None False",
        ":4096:8 ring 0 True",
        "False False",
        "False True",
        "training.precision: this run has GPUs, and its precision is not set",
        "  -> set bf16; or fp32, if that is meant: it is many times slower on a GPU",
    ]


def test_every_variable_has_a_value_to_set() -> None:
    assert list(determinism.DETERMINISTIC_VALUES) == sorted(determinism.DETERMINISTIC_VALUES)
    assert all(determinism.DETERMINISTIC_VALUES.values())
