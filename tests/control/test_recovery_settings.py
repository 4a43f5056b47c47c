"""`chain.recovery: node`: what is refused before anything is queued, and how the agents are started."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from relayrun.config.compose import resolve
from relayrun.control.agent.job_nodes import NodeRanks
from relayrun.control.chain import job_script
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError
from relayrun.submit.run_plan import make_plan
from tests.config.test_trainer_configs import COMMAND, written
from tests.workspace import Workspace

NODE = {"recovery": "node"}


def plan_of(folder: Path, **sections: Any) -> Plan:
    path = Workspace.make(folder).config("run", **sections)
    return make_plan(resolve.load_run_config(path), Run(folder / "run"), folder, revision=1)


def test_agents_are_off(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert (plan.chain.recovery, plan.fork_server) == ("job", [])
    assert job_script.rank_program(plan, [*plan.program, "--attempt=1"], where=[]) == [*plan.program, "--attempt=1"]


def test_an_agent_is_started_with_the_python_and_the_arguments_of_the_ranks(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, chain=NODE | {"max_failed_restarts": 2}, cluster={"python": sys.executable})
    assert plan.chain.max_failed_restarts == 2
    assert plan.fork_server == [sys.executable, "-m", "relayrun.train.fork_server", f"--run-dir={tmp_path}/run"]
    command = job_script.rank_program(
        plan, [*plan.program, "--attempt=1"], where=[f"--run-dir={tmp_path}/run", "--attempt=1"]
    )
    assert command == [sys.executable, "-m", "relayrun.control.agent", f"--run-dir={tmp_path}/run", "--attempt=1"]


def test_slurm_starts_one_agent_a_node_with_the_processors_of_its_ranks(tmp_path: Path) -> None:
    job = {"nodes": 3, "ntasks_per_node": 4, "cpus_per_task": 2}
    plan = plan_of(tmp_path, chain=NODE, job=job, training={"global_batch_size": 24})
    command = Slurm().agent_command(plan, nodes=3, cpus_per_task="2")
    assert command[0] == "srun"
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=8"} <= set(command)


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"debug": {"profile": "nsys"}}, "set debug.profile=torch or chain.recovery=job"),
        ({"cluster": {"srun_options": ["--gpus-per-task=1"]}}, "--gpus-per-task gives each task its own"),
        ({"job": {"sbatch": {"gpu-bind": "closest"}}}, "--gpu-bind gives each task its own"),
        (
            {"cluster": {"scheduler": "slurm"}, "job": {"spare_nodes": 1, "sbatch": {"gpus": 8}}},
            "--gpus is of the whole job",
        ),
        ({"chain": NODE | {"max_failed_restarts": 0}}, "max_failed_restarts"),
        ({"chain": {"recovery": "nodes"}}, "recovery"),
        ({"chain": {"recovery": "job"}, "checkpoint": {"memory_interval": 1}}, "set chain.recovery=node"),
        (
            {"checkpoint": {"memory_interval": 1}, "optimizer": {"name": "muon"}},
            "optimizer muon is not copied to memory",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_to_change(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    path = Workspace.make(tmp_path).config("run", **({"chain": NODE} | sections))
    with pytest.raises(ConfigError) as refused:
        resolve.load_run_config(path)
    assert words in str(refused.value)


def test_another_trainer_has_a_server_that_starts_its_command(tmp_path: Path) -> None:
    config = resolve.load_run_config(written(tmp_path, COMMAND, chain=NODE))
    plan = make_plan(config, Run(tmp_path / "run"), tmp_path, revision=1)
    where = [f"--run-dir={tmp_path}/run"]
    assert plan.fork_server == [sys.executable, "-P", "-m", "relayrun.control.agent.spawn_server", *where]
    command = job_script.rank_program(plan, ["its-own"], where=[*where, "--attempt=2"])
    assert command == [sys.executable, "-P", "-m", "relayrun.control.agent", *where, "--attempt=2"]


@pytest.mark.parametrize(("has", "train"), [(5, 4), (4, 4), (3, 3)])
def test_of_a_job_with_fewer_nodes_those_train_that_a_round_has_places_for(has: int, train: int) -> None:
    plan = Mock(outlives_nodes=True, nodes=4)
    assert Plan.training_nodes(plan, has) == train
    assert NodeRanks(4, spare=1).fitting(has) == (4 if has >= 4 else 0)
