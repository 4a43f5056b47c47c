"""Slurm as tests write it: commands that are scripts, a job's line of scontrol, a plan of the fewest fields."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayrun.control.scheduler.slurm import Slurm

LINE = (
    "JobId=17 JobName=relayrun-demo-1a2b3c4d UserId=ann(1000) Priority=1 QOS=long JobState=RUNNING Reason=None "
    "Dependency=(null) Requeue=0 Restarts=0 RunTime=00:00:04 TimeLimit=1-00:02:00 TimeMin=N/A "
    "StartTime=2026-11-21T04:48:32 EndTime=2026-11-22T04:50:32 PreemptEligibleTime=2026-11-21T04:48:32 "
    "PreemptTime=None Partition=debug Account=(null) ExcNodeList=n3 NodeList=n[0-1] BatchHost=n0 NumNodes=2 "
    "NumCPUs=4 NumTasks=2 CPUs/Task=2 MinCPUsNode=2 MinMemoryNode=100M Features=(null) Reservation=res "
    "TresPerNode=gres:gpu:3 Command=/home/ann/a b/job.sbatch WorkDir=/home/ann"
)


def fake_command(folder: Path, name: str, script: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def slurm_of(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Slurm:
    for name, script in scripts.items():
        fake_command(folder, name, script)
    monkeypatch.setenv("PATH", str(folder) + os.pathsep + os.environ["PATH"])
    return Slurm(patience=60, pause=0.01)


PLAN = {
    "run": "a/b",
    "job_name": "j",
    "scheduler": "slurm",
    "total_steps": 1,
    "config_revision": 1,
    "submitted_after_attempt": 0,
    "chain": {"auto_requeue": True},
    "time_limit": 60,
    "grace_period": 1.0,
    "min_grace_period": 1.0,
    "max_grace_period": 1.0,
    "signal_seconds": 1,
    "nodes": 1,
    "ntasks_per_node": 1,
    "cpus_per_task": 1,
    "sbatch_options": {},
    "srun_options": [],
    "command_prefix": [],
    "program": [],
    "environment": {},
    "modules": [],
    "host_python": "python3",
    "package_root": "/",
    "log_folder": "/",
}
