"""A sweep of twelve runs and a plan of four stages on a real Slurm: the shell, jobs and the controller are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember, MemberStarted
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run, stop_reason
from tests.campaigns import attempts, iterations, words, write_config, write_stages

from .cluster import ROOT, TestCluster
from .test_status_slurm import batch_scripts

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]

SITE = {"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}}
PATIENCE = {"max_failed_attempts": 9}


def relayrun(cluster: TestCluster, *arguments: str | Path) -> str:
    return cluster.run([sys.executable, "-m", "relayrun.cli", *arguments], cwd=ROOT).stdout


def submit_and_kill(cluster: TestCluster, kind: str, config: Path, when: Path) -> None:
    """Start a submit, and SIGKILL it with what it started as soon as a file is there."""
    command = [sys.executable, "-m", "relayrun.cli", kind, "submit", str(config)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=ROOT, env=cluster.env, start_new_session=True, **quiet) as shell:  # type: ignore[call-overload]
        cluster.wait_until(when.exists, timeout=600, interval=0.01, what=f"{when} is there")
        os.killpg(shell.pid, signal.SIGKILL)


def begun(folder: Path, member: CampaignMember) -> MemberStarted | None:
    return MemberStarted.read(campaign.member_started_path(folder, member.name))


def open_chains(folder: Path) -> list[str]:
    """Members that have begun and not ended."""
    members = Campaign.load(folder).members
    return [member.name for member in members if begun(folder, member) and stop_reason(member.run) is None]


def all_ended(folder: Path) -> bool:
    return all(stop_reason(member.run) is not None for member in Campaign.load(folder).members)


def wait_for_steps(cluster: TestCluster, run: Run) -> None:
    cluster.wait_until(
        lambda: any(begin for begin in attempts(run) if run.attempt(begin.attempt).metrics.exists()), 300
    )


def kill_program(cluster: TestCluster, runs: Iterable[Run]) -> None:
    """SIGKILL the rank of one of these runs: on a busy machine any of them may be done already."""
    folders = {str(run.checkpoints).encode() for run in runs}

    def found() -> int | None:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                line = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if folders & set(line) and line[1].endswith(b"train.py"):
                return int(entry.name)
        return None

    os.kill(cluster.wait_until(found, 300, what="a rank runs") or 0, signal.SIGKILL)


def kill_batch_script(cluster: TestCluster, runs: Iterable[Run]) -> None:
    """SIGKILL the batch script of one of these runs."""
    plans = [Plan.load(run) for run in runs]

    def found() -> list[int]:
        return next((pids for plan in plans if (pids := batch_scripts(plan))), [])

    for pid in cluster.wait_until(found, 300, what="a batch script runs"):
        os.kill(pid, signal.SIGKILL)


def restart_controller(cluster: TestCluster) -> None:
    cluster.stop_ctld()
    time.sleep(5)
    cluster.start_ctld()


def test_a_sweep_of_twelve_runs(cluster: TestCluster, tmp_path: Path) -> None:
    config = write_config(
        tmp_path,
        seconds=0.5,
        cluster=SITE,
        chain=PATIENCE,
        command={"run": words(tmp_path, 8, seconds=0.5), "steps": 8},
        sweep={"product": {"chain.grace_period": [20, 30, 40], "job.cpus_per_task": [1, 2, 3, 4]}, "at_once": 3},
    )
    folder = tmp_path / "tiny"
    submit_and_kill(cluster, "sweep", config, tmp_path / "tiny-04")
    assert not campaign.is_campaign(folder)
    assert cluster.queue() == []
    submit_and_kill(cluster, "sweep", config, folder / "campaign.json")
    members = {member.name: member for member in Campaign.load(folder).members}
    assert list(members) == [f"{number:02}" for number in range(1, 13)]
    relayrun(cluster, "sweep", "resume", folder)
    assert open_chains(folder) == ["01", "02", "03"]
    runs = [member.run for member in members.values()]
    wait_for_steps(cluster, runs[0])
    kill_program(cluster, runs)
    kill_batch_script(cluster, runs)
    cluster.wait_until(lambda: begun(folder, members["05"]), 600, what="the fifth run has begun")
    restart_controller(cluster)
    kill_program(cluster, runs)
    cluster.wait_until(lambda: begun(folder, members["08"]), 600, what="the eighth run has begun")
    cluster.stop_ctld()
    time.sleep(20)  # chains end while nobody can queue the next run
    cluster.start_ctld()
    most = 0

    def over() -> bool:
        nonlocal most
        most = max(most, len(open_chains(folder)))
        return all_ended(folder)

    cluster.wait_until(over, timeout=1200, interval=0.2, what="the end of all runs")
    cluster.wait_until(lambda: not cluster.queue(), timeout=600, interval=0.5, what="nothing is queued")
    assert most <= 3
    times = []
    for member in members.values():
        assert stop_reason(member.run) == "the last iteration, 8, is saved", member.name
        assert iterations(member.run) == list(range(1, 9)), member.name
        record = begun(folder, member)
        assert record is not None
        assert attempts(member.run)[0].job_id == record.job_id
        times.append(record.time)
    assert times == sorted(times)
    assert max(len(attempts(run)) for run in runs) > 1
    assert " failed " not in relayrun(cluster, "sweep", "status", folder)


def test_a_plan_of_four_stages(cluster: TestCluster, tmp_path: Path) -> None:
    config = write_stages(tmp_path, seconds=2.0, cluster=SITE, chain=PATIENCE)
    folder = tmp_path / "plan"
    submit_and_kill(cluster, "stages", config, folder / "campaign.json")
    relayrun(cluster, "stages", "resume", folder)
    members = {member.name: member for member in Campaign.load(folder).members}
    runs = {name: member.run for name, member in members.items()}
    wait_for_steps(cluster, runs["stable"])
    kill_program(cluster, runs.values())
    cluster.wait_until(lambda: begun(folder, members["branch"]), 600, what="the branch has begun")
    restart_controller(cluster)
    cluster.wait_until(lambda: begun(folder, members["long"]), 600, what="the long stage has begun")
    kill_batch_script(cluster, runs.values())
    cluster.wait_until(lambda: all_ended(folder), timeout=900, interval=0.5, what="the end of all stages")
    cluster.wait_until(lambda: not cluster.queue(), timeout=600, interval=0.5, what="nothing is queued")
    stable, long = runs["stable"].checkpoints, runs["long"].checkpoints
    first = {name: attempts(run)[0] for name, run in runs.items()}
    assert {name: (begin.base_iteration, begin.base_path) for name, begin in first.items()} == {
        "stable": (0, None),
        "branch": (2, str(stable / "step-2")),
        "long": (4, str(stable / "step-4")),
        "evaluate": (6, str(long / "step-6")),
    }
    wanted = {"stable": [1, 2, 3, 4], "branch": [3], "long": [5, 6], "evaluate": []}
    assert {name: iterations(run) for name, run in runs.items()} == wanted
    assert (runs["evaluate"].path / "found.json").exists()
    order = [record.time for member in members.values() if (record := begun(folder, member))]
    assert order == sorted(order)
    assert len(order) == 4
