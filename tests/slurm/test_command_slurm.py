"""The examples of docs/how-to/command.md as chains of real Slurm jobs: cut twice by a time limit, killed once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests.command_examples import (
    LAST_CHECKPOINT,
    NAMES,
    ROOT,
    Uncut,
    assert_same_checkpoints,
    config,
    kill_a_rank,
    left_over,
    losses,
)
from tests.workspace import ends

from .cluster import TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(3600)]

SLURM = {"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}}
JOB = {"time": "4", "nodes": 1}
CHAIN = {"grace_period": 120, "signal_seconds": 1, "max_failed_attempts": 5}
"""A job has two of its four minutes, in which a slow machine too makes some steps, and a fast one not too many."""
LAST = 280


def chain_jobs(cluster: TestCluster, run: Run) -> list[str]:
    name = Plan.load(run).job_name
    return [job.state for job in cluster.queue() if job.name == name]


def test_examples_that_are_cut_twice_and_killed_once_are_as_uncut(cluster: TestCluster, tmp_path: Path) -> None:
    runs = {name: Run(tmp_path / name) for name in NAMES}
    for name in NAMES:  # all at once: they wait more than they compute
        job = JOB | {"nodes": 2} if name == "ddp" else JOB  # torchrun over two nodes, a rank on each
        pace = ["--seconds=1", f"--fast-when={tmp_path / name}-killed"]
        path = config(tmp_path, name, last=LAST, pace=pace, cluster=SLURM, job=job, chain=CHAIN)
        path.write_text(path.read_text().replace("--nproc-per-node=2", "--nproc-per-node=1"))
        cluster.run([sys.executable, "-m", "relayrun.cli", "submit", path], cwd=ROOT)
    waiting = set(NAMES)

    def kill_in_the_third_job() -> bool:
        for name in sorted(waiting):
            attempt = runs[name].attempt(3)
            if any(read_json_lines(attempt.metrics)):
                kill_a_rank(runs[name], name)
                (tmp_path / f"{name}-killed").touch()  # what is to be cut and killed has been
                waiting.remove(name)
        return not waiting

    cluster.wait_until(kill_in_the_third_job, timeout=1800, interval=0.2)
    uncut = {name: Uncut(tmp_path, name, LAST) for name in NAMES}
    cluster.wait_until(lambda: not any(chain_jobs(cluster, run) for run in runs.values()), timeout=1800, interval=1)
    for name, run in runs.items():
        causes = [end.cause for end in ends(run)]
        assert causes[:3] == ["saved", "saved", "failed"], (name, causes)
        assert (causes[-1], causes.count("failed")) == ("done", 1), (name, causes)
        assert {end.reason.partition(";")[0] for end in ends(run) if end.cause == "saved"} == {"time limit near"}
        assert resume_point(run).iteration == LAST
        found = losses(run.metrics_view)
        assert sorted(found) == list(range(1, LAST + 1))
        assert found == uncut[name].losses(), name
        final = LAST_CHECKPOINT[name].format(LAST)
        assert_same_checkpoints(uncut[name].folder / final, run.checkpoints / final)
        assert left_over(run) == []
