"""Ranks on two nodes of a real Slurm are killed and started again inside their job: the real training program."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from relayrun.control.rundir import restarts
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests.chain.test_local_recovery import SETTINGS, assert_same_run, with_kills
from tests.workspace import Workspace, ends

from .cluster import ROOT, TestCluster
from .test_training_chain import SLURM, TWO_NODES, chain_jobs, job_of, submit, wait_for_end

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

CLUSTER = SLURM | {"environment": SLURM["environment"] | {"PYTHONPATH": str(ROOT)}}  # type: ignore[operator]


def killed_config(workspace: Workspace, folder: str, *kills: str, **changes: dict[str, object]) -> Path:
    sections = with_kills(*kills) | {"job": TWO_NODES | {"time": "10"}, "cluster": CLUSTER}
    for name, values in changes.items():
        sections[name] = sections.get(name, {}) | values
    return workspace.config(folder, **sections)


def test_ranks_on_two_nodes_are_started_again_in_the_same_job(cluster: TestCluster, tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    submit(cluster, workspace.config("whole", **SETTINGS, job=TWO_NODES | {"time": "10"}, cluster=SLURM))
    wait_for_end(cluster, workspace.run("whole"), timeout=600)
    kills = ("1:1:setup", "2:0:forward:7", "3:1:forward:8", "4:0:save:10")
    submit(cluster, killed_config(workspace, "killed", *kills))
    run = workspace.run("killed")
    wait_for_end(cluster, run, timeout=900)
    assert [end.cause for end in ends(run)] == ["done"]
    found = restarts.read_failed_restarts(run.attempt(1))
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    assert [(failed.rank, failed.node) for failed in found] == [(1, "n1"), (0, "n0"), (1, "n1"), (0, "n0")], begin.nodes
    assert cluster.job(begin.job_id)["Restarts"] == "0"
    assert_same_run(run, workspace.run("whole"))


@pytest.mark.parametrize("how", ["limit", "cancel", "agent"])
def test_what_ends_a_job_ends_it_as_without_agents(cluster: TestCluster, tmp_path: Path, how: str) -> None:
    workspace = Workspace.make(tmp_path)
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "slow-after=3:2"}}
    changes: dict[str, dict[str, object]] = {"training": {"hooks": [slow], "steps": 1000}}
    if how == "limit":
        changes |= {"job": {"time": "2"}, "chain": {"grace_period": 80, "signal_seconds": 1}}
    run = workspace.run("run")
    submit(cluster, killed_config(workspace, "run", **changes))
    cluster.wait_until(lambda: any(read_json_lines(run.attempt(1).metrics)), timeout=360, interval=0.2)
    if how == "cancel":
        cluster.run(["scancel", job_of(run, 1)])
    elif how == "agent":
        os.kill(agents(run)[0], signal.SIGKILL)
    cluster.wait_until(run.attempt(1).end.exists, timeout=300)
    cause = {"limit": "saved", "cancel": "cancelled", "agent": "failed"}[how]
    end = run.attempt(1).read_end()
    assert end is not None
    assert end.cause == cause, end
    assert not any(failed.again for failed in restarts.read_failed_restarts(run.attempt(1)))
    if how != "cancel":
        cluster.run(["scancel", f"--name={chain_name(run)}"])
    cluster.wait_until(lambda: not chain_jobs(cluster, run), timeout=300, interval=0.5)
    cluster.wait_until(lambda: not agents(run), timeout=300)


def chain_name(run: Run) -> str:
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    return begin.job_name


def agents(run: Run, module: str = "relayrun.control.agent") -> list[int]:
    """Processes of the run's agents on this machine, which has all nodes."""
    found = []
    for name in os.listdir("/proc"):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0") if name.isdecimal() else []
        except OSError:
            continue
        if module.encode() in words[2:4] and f"--run-dir={run.path}".encode() in words:
            found.append(int(name))
    return sorted(found)
