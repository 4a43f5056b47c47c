"""An agent whose coordinator is gone closes the attempt, whatever fails meanwhile; and it leaves with its job."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

import pytest

from relayrun.control import job_log
from relayrun.control.chain import failover as module
from relayrun.control.chain import supervisor
from relayrun.control.job_log import log_line
from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job, MinimumNodes, Scheduler
from relayrun.errors import RunDirError, SchedulerError
from tests.history import began

from .conftest import ROOT, MakeRun

RUNNING = Job(id="1", name="x", state="RUNNING", nodes="n[1-3]", batch_host="n0")


class Slept(BaseException):
    """A pause that nobody expected."""


@dataclass
class Cluster:
    """What a scheduler says of the job, one after the other; the last is said for ever."""

    jobs: list[Job | Exception | None]
    failing: list[Exception] = field(default_factory=list)
    """What the first questions of anything else meet."""
    slept: list[float] = field(default_factory=list)
    done: list[str] = field(default_factory=list)
    nodes: Cluster = field(init=False)

    def __post_init__(self) -> None:
        self.nodes = self

    def current_job_id(self) -> str:
        if self.failing:
            raise self.failing.pop(0)
        return "1"

    def expand(self, nodes: str) -> list[str]:
        assert nodes == "n[1-3]"
        return ["n1", "n2", "n3"]

    def query(self, job_id: str) -> Job | None:
        assert job_id == "1"
        assert self.slept, "a question before the first pause"
        found = self.jobs.pop(0) if len(self.jobs) > 1 else self.jobs[0]
        if isinstance(found, Exception):
            raise found
        return found

    def requeue(self, job_id: str, *, delay: int, minimum: MinimumNodes | None) -> None:
        assert minimum is None
        self.done.append(f"requeue {job_id}")

    def cancel(self, job_id: str) -> None:
        self.done.append(f"cancel {job_id}")

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        if len(self.slept) > 20:
            raise Slept


@pytest.fixture
def run(make_run: MakeRun) -> Run:
    made, _ = make_run()
    began(made, 1)
    return made


def close(monkeypatch: pytest.MonkeyPatch, run: Run, cluster: Cluster, *, node: int = 1) -> int:
    def end(run: Run, number: int, code: int) -> int:
        record = run.attempt(number).end
        if not record.exists():
            AttemptEnd.of(ENDED).write(record)
        return 0

    monkeypatch.setattr(module, "scheduler_for_plan", lambda *_, **__: cast(Scheduler, cluster))
    monkeypatch.setattr(module.time, "sleep", cluster.sleep)
    monkeypatch.setattr(supervisor, "end_attempt", end)
    return module.close_orphaned_attempt(run, 1, node=node, restart_number=0)


ENDED = {
    "attempt": 1,
    "cause": "failed",
    "reason": "the batch host is lost",
    "exit_code": 1,
    "durable_iteration": 0,
    "progress": False,
    "end_time": 1.0,
    "action": "retry",
}


def test_a_file_system_or_a_slurm_that_is_away_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = Cluster([SchedulerError("no answer"), RUNNING], failing=[SchedulerError("away"), OSError("stale")])
    load, failing = Plan.load, [OSError("Stale file handle"), RunDirError("not readable", where=run.plan)]

    def loaded(run: Run) -> Plan:
        if failing:
            raise failing.pop(0)
        return load(run)

    monkeypatch.setattr(module.Plan, "load", loaded)
    assert close(monkeypatch, run, cluster) == 1
    assert cluster.done == ["requeue 1"]
    (failed,) = restarts.read_failed_restarts(run.attempt(1))
    assert (failed.node, failed.words) == ("n0", "the batch host is lost")
    said = capsys.readouterr().err
    assert "Stale file handle" in said
    assert "no answer" in said


def test_an_error_that_nobody_foresaw_does_not_end_it(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    cluster = Cluster([ValueError("a word of Slurm that nobody knows"), RUNNING])
    assert close(monkeypatch, run, cluster) == 1
    assert cluster.done == ["requeue 1"]


def test_a_log_on_a_full_disk_does_not_end_it(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    cluster = Cluster([SchedulerError("no answer"), RUNNING])
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        assert close(monkeypatch, run, cluster) == 1
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.close()
    assert cluster.done == ["requeue 1"]


@pytest.mark.parametrize("job", [None, Job(id="1", name="x", state="CANCELLED")])
def test_it_leaves_when_its_job_is_gone(monkeypatch: pytest.MonkeyPatch, run: Run, job: Job | None) -> None:
    cluster = Cluster([Job(id="1", name="x", state="RUNNING", nodes="n[1-3]", batch_host="n1"), job])
    assert close(monkeypatch, run, cluster) == 1
    assert cluster.done == []
    assert not run.attempt(1).end.exists()


def test_the_pause_between_two_questions_is_bounded_whatever_the_number_of_the_node() -> None:
    pauses = [module.question_interval(node) for node in range(10_000)]
    assert pauses[:3] == [5.0, 15.0, 25.0]
    assert max(pauses) <= 300.0
    assert min(pauses[30:]) > 200.0
    assert max(pauses.count(each) for each in set(pauses)) < 500, "they ask at the same moment"


def test_an_agent_becomes_it_without_a_log_and_where_the_program_is_away_at_first(
    tmp_path: Path,
) -> None:
    """In a process of its own, which it replaces."""
    code = f"""
import sys
from pathlib import Path
from relayrun.control.agent import __main__ as module
program = Path(sys.argv[1])
def appear(seconds):
    program.write_text("#!/bin/sh\\necho $* > {tmp_path}/said")
    program.chmod(0o700)
module.time.sleep = appear
module.become_orphaned_program([str(program), "orphaned"], {str(ROOT)!r}, node=2, number=3, log=Path("/dev/full/x"))
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "program")], check=True, cwd=ROOT, timeout=300)
    assert (tmp_path / "said").read_text() == "orphaned --node=2 --restart=3\n"


@pytest.mark.parametrize("say", [log_line, partial(job_log.log_node_line, "n0")], ids=["supervisor", "coordinator"])
def test_a_line_of_the_log_that_cannot_be_written_ends_nobody(
    monkeypatch: pytest.MonkeyPatch, say: Callable[[str], None]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr(sys, "stderr", full)
        say("no space is left for this")
        monkeypatch.undo()
        with pytest.raises(OSError, match="No space"):
            full.close()
