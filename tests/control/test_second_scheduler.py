"""A second batch system is one entry and one module: a scheduler that only prints goes through the commands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun import places
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Scheduler
from relayrun.errors import RunDirError

MODULE = """
from relayrun.control.scheduler.base import RankLaunch, Scheduler


class PrintingScheduler(Scheduler):
    def current_job_id(self):
        return "printed"

    def query(self, job_id):
        return None

    def jobs(self, plan, *, anyone=False):
        return []

    def find_job(self, name):
        return None

    def submit(self, plan, script, *, options, delay=0):
        print(f"would queue {script.name} as {plan.job_name}")
        return "printed"

    def submit_auxiliary(self, plan, script, *, name, arguments, limit):
        print(f"would queue {script.name} as {name}")
        return "printed"

    def cancel(self, job_id):
        print(f"would cancel {job_id}")

    def cancelled(self, job_id, *, nodes):
        return False

    def requeue(self, job_id, *, delay=0, minimum=None):
        print(f"would requeue {job_id}")

    def signal_ranks(self, job_id, number):
        print(f"would send {number.name}")

    def rank_launch(self, plan, job, *, leave_signal):
        return RankLaunch(command=["echo"])


SCHEDULER = PrintingScheduler
"""
COMMAND = """
import sys
from relayrun.config.sections.batch_systems import BATCH_SYSTEMS, BatchSystem
import relayrun.control.scheduler
BATCH_SYSTEMS["printing"] = BatchSystem()
relayrun.control.scheduler.__path__.append(sys.argv.pop(1))
from relayrun.cli import main
sys.exit(main(sys.argv[1:]))
"""
CONFIG = """
project: second
name: printed
cluster: {name: here, scheduler: printing}
trainer: command
command: {run: [echo, hello]}
job: {nodes: 2, time: "10:00"}
"""
RUN = "logs/runs/second/printed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "printing.py").write_text(MODULE)
    (tmp_path / "run.yaml").write_text(CONFIG)
    (tmp_path / ".relayrun").touch()
    (tmp_path / "bin").mkdir()
    for name in ("sbatch", "squeue", "scontrol", "scancel", "sacct", "sinfo", "srun"):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\necho {name} $* >> {tmp_path}/asked-slurm\nexit 1\n")
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def relayrun(folder: Path, *words: str, code: int = 0) -> str:
    """Run a command in a process that knows the scheduler, without any command of Slurm's."""
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(folder), *words],
        cwd=folder,
        env={"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": str(folder), "RELAYRUN_CACHE": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert not (folder / "asked-slurm").exists(), (folder / "asked-slurm").read_text()
    return done.stdout


def test_a_new_scheduler_writes_at_most_fifteen_methods() -> None:
    assert len(Scheduler.__abstractmethods__) <= 15


def test_no_module_compares_the_name_of_a_scheduler() -> None:
    compared = re.compile(r"scheduler\b[\"'\])]*\s*(?:[!=]=|(?:not )?in)\s*[(\[{]?[\"']")
    assert compared.search('if plan.scheduler == "slurm":')
    assert compared.search('cluster.get("scheduler") != "slurm"')
    modules = (places.CODE_ROOT / "relayrun").rglob("*.py")
    assert [path for path in modules if compared.search(path.read_text(encoding="utf-8"))] == []


def test_a_run_is_checked_submitted_looked_at_and_ended(folder: Path) -> None:
    assert "the run has no job" not in relayrun(folder, "check", "run.yaml")
    said = relayrun(folder, "submit", "run.yaml")
    assert re.search("^would queue job.sbatch as second-printed-\\w+\njob printed ", said)
    plan = json.loads((folder / RUN / "plan.json").read_text())
    assert (plan["scheduler"], plan["host_python"]) == ("printing", "python3")
    status = json.loads(relayrun(folder, "status", RUN, "--json"))
    assert (status["state"], status["jobs"], status["scheduler_error"]) == ("failed", [], None)
    assert "second/printed" in relayrun(folder, "status")
    assert "would queue job.sbatch" in relayrun(folder, "resume", RUN)
    for command, ending in (("stop", "stopped"), ("cancel", "stopped")):
        relayrun(folder, command, RUN)
        assert json.loads(relayrun(folder, "status", RUN, "--json"))["state"] == ending


def test_a_sweep_begins_as_many_runs_as_it_may(folder: Path) -> None:
    (folder / "sweep.yaml").write_text(f"{CONFIG}sweep: {{at_once: 1, product: {{chain.min_grace_period: [1, 2]}}}}\n")
    said = relayrun(folder, "sweep", "submit", "sweep.yaml")
    assert said.count("would queue") == 1
    assert "second/printed-01" in relayrun(folder, "sweep", "status", "second/printed")
    relayrun(folder, "sweep", "stop", "second/printed")


def test_a_plan_of_an_unknown_scheduler_is_refused_by_name(folder: Path) -> None:
    relayrun(folder, "submit", "run.yaml")
    with pytest.raises(RunDirError, match="scheduler 'printing' is none of slurm, local"):
        Plan.load(Run(folder / RUN))
