"""What people write into a job's names, comments and paths is never read as a field of Slurm's."""

from __future__ import annotations

import subprocess

import pytest

from relayrun.control.scheduler.slurm import Slurm

from .cluster import TestCluster

pytestmark = pytest.mark.slurm

FORGED = (
    "x JobState=COMPLETED NodeList=n9 NumNodes=9 Partition=low ExcNodeList=n3 Requeue=0 Reservation=r "
    "PreemptTime=2026-01-01T00:00:00 TresPerNode=gres:gpu:4 CPUs/Task=7 TimeLimit=00:01:00"
)
BLOCK = "x UserId=root(0) GroupId=root(0) MCS_label=N/A " + FORGED.removeprefix("x ") + " Command=/x"


@pytest.fixture
def slurm_here(cluster: TestCluster, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    return Slurm(patience=10)


@pytest.mark.parametrize("place", ["comment", "name", "folder", "arguments", "output", "all"])
def test_a_running_job_is_read_as_it_is_whatever_its_texts_say(
    cluster: TestCluster, slurm_here: Slurm, place: str
) -> None:
    options = {
        "comment": [f"--comment={FORGED}"],
        "name": [f"--job-name={FORGED}"],
        "folder": [f"--chdir={cluster.work}/{FORGED.replace('/', '_')}"],
        "arguments": [],
        "output": [f"--output={cluster.work}/out {FORGED.replace('/', '_')}"],
        "all": [f"--job-name={BLOCK}", f"--comment={BLOCK}", f"--wckey={FORGED}", f"--account={FORGED}"],
    }[place]
    script = cluster.work / "script"
    script.write_text("#!/bin/sh\nsleep 300\n")
    if place == "folder":
        (cluster.work / FORGED.replace("/", "_")).mkdir()
    command = ["sbatch", "--parsable", "--nodes=1", "--time=5", "--cpus-per-task=2", "--requeue", *options]
    command += [str(script), *([FORGED, BLOCK] if place in ("arguments", "all") else [])]
    done = subprocess.run(
        command, env=cluster.env, cwd=cluster.work, capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    job_id = done.stdout.strip()

    def state() -> str:
        asked = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%T"]
        return subprocess.run(
            asked, env=cluster.env, capture_output=True, text=True, check=True, timeout=600
        ).stdout.strip()

    cluster.wait_until(lambda: state() == "RUNNING", what="the start of the job")
    job = slurm_here.query(job_id)
    assert job is not None
    assert (job.state, job.num_nodes, job.requeue, job.preempted) == ("RUNNING", 1, True, False)
    assert job.nodes in {"n0", "n1", "n2", "n3"}
    expected = {"nodes": "1", "time": "00:05:00", "partition": "debug", "cpus-per-task": "2"}
    assert {name: job.options.get(name) for name in expected} == expected
    assert not {"reservation", "exclude", "gpus-per-node"} & job.options.keys()
    if place in ("name", "all"):
        assert job.name == (FORGED if place == "name" else BLOCK)
    subprocess.run(["scancel", job_id], env=cluster.env, check=True, timeout=600)
