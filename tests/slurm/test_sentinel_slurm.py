"""Deaths planted on a real Slurm are told by the sentinel, as cron starts it."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from relayrun.control.notify import notices
from relayrun.control.rundir.run import Run
from relayrun.errors import user_name
from relayrun.watch import cron_check
from relayrun.watch.status import cron_check_record as records
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.chain.test_notices import tell

from .cluster import ROOT, TestCluster
from .test_chain import SLURM, start
from .test_status_slurm import batch_scripts

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]


def look_twice(cluster: TestCluster, run: Run) -> str:
    """Look twice, as if more than a minute lay between; what is printed."""
    said = ""
    for _ in range(2):
        done = cluster.run([sys.executable, "-S", "-m", "relayrun.cli", "sentinel", run.path], env=environment())
        assert done.stderr == ""
        said += done.stdout
        memory = records.read_cron_check(run.path, user_name(os.geteuid()))
        assert memory is not None
        for causes in memory.seen.values():
            for known in causes.values():
                known["since"] -= cron_check.SETTLE_SECONDS
        memory.write(records.cron_check_path(run.path, memory.user))
    return said


def look(cluster: TestCluster, run: Run) -> list[str]:
    """Look twice; ids of the notices that there are then."""
    assert look_twice(cluster, run) == ""
    return sorted(notices.known_notices(run))


def environment() -> dict[str, str]:
    return {"PYTHONPATH": str(ROOT)}


def test_a_job_that_is_gone_and_one_that_is_held(
    cluster: TestCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    run, plan = make_run("--steps=1000", total_steps=1000, **SLURM)
    told = run.path / "told"
    told.write_text('#!/bin/sh\nhead -n 1 >> "$(dirname "$0")/letters"\n')
    told.chmod(0o755)
    policy = tell(run, "http://127.0.0.1:9/x", since=1.0)
    target = policy.targets[0] | {"url": None, "command": [str(told)]}
    notices.write_notice_policy(run, type(policy)(**(vars(policy) | {"targets": [target]})))
    start(cluster, run)
    cluster.wait_until(run.attempt(1).metrics.exists, timeout=600)
    assert look(cluster, run) == []  # it runs, and its successor waits for it

    successor = next(job.id for job in cluster.queue() if job.state == "PENDING")
    cluster.run(["scontrol", "hold", successor])
    (held,) = look(cluster, run)
    assert held.startswith(f"stopped-held-{successor}-")

    for pid in batch_scripts(plan):  # it is killed with all it would have said
        os.kill(pid, signal.SIGSTOP)
    cluster.run(["scancel", successor])
    for pid in batch_scripts(plan):
        os.kill(pid, signal.SIGKILL)
    begin = run.attempt(1).read_begin()
    assert begin is not None
    cluster.wait_job(begin.job_id)
    cluster.wait_until(lambda: not cluster.queue(), timeout=600)
    gone = [name for name in look(cluster, run) if name != held]
    assert [name.startswith("stopped-gone-0001-") for name in gone] == [True]
    letters = Path(run.path / "letters")
    cluster.wait_until(lambda: letters.exists() and len(letters.read_text().splitlines()) == 2, timeout=600)
    subjects = letters.read_text().splitlines()
    assert f"job {successor} never starts unless a person changes something: JobHeld" in subjects[0]
    assert f"attempt 1, job {begin.job_id}, is gone without an end" in subjects[1]
