from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.chain import watch
from relayrun.control.chain.failure_reason import log_excerpt, log_tail
from relayrun.control.chain.watch import Watch, stall_limit
from relayrun.control.rundir.records import ChangedJobEnd, Heartbeat
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.errors import RunDirError
from tests.history import began, history_plan
from tests.plans import plan_with
from tests.waiting import wait_for


def beat(phase: str, step: float | None = None, save: float | None = None, interval: float = 0.0) -> Heartbeat:
    return Heartbeat(node="n", iteration=1, phase=phase, time=0.0, step_p95=step, save_p95=save, interval=interval)


@pytest.mark.parametrize(
    ("beats", "limit"),
    [
        ([], 1800),
        ([beat("start")], 1800),
        ([beat("start"), beat("step")], 300),
        ([beat("step", step=1.0)], 300),
        ([beat("step", step=60.0)], 600),
        ([beat("save", step=1.0, save=90.0)], 900),
        ([beat("evaluation", step=40.0)], 400),
        ([beat("start", interval=60.0)], 1860),
        ([beat("step", step=1.0, interval=60.0)], 360),
        ([beat("step", step=1.0, save=90.0, interval=60.0)], 960),  # it may save since
        ([beat("step", step=60.0, interval=60.0), beat("step")], 660),
    ],
)
def test_an_attempt_stands_still_after_ten_times_the_usual_or_the_timeout(beats: list[Heartbeat], limit: float) -> None:
    assert stall_limit(beats, ChainSection(hang_timeout=300, start_timeout=1800)) == limit


def test_the_excerpt_of_a_log_has_its_last_lines_without_the_supervisors_own(tmp_path) -> None:  # type: ignore[no-untyped-def]
    log = tmp_path / "err"
    log.write_text("old attempt\n" + "[relayrun 2026] attempt 2\nTraceback\n\n  File x\nValueError: bad\n")
    assert log_excerpt(log_tail(str(log), since=len("old attempt\n"))) == "Traceback\n  File x\nValueError: bad"
    assert log_tail(str(tmp_path / "none")) == ""
    assert log_tail(None) == ""


@pytest.fixture
def batch(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A batch script that waits for a starter, which stands still."""
    script = f"sh -c 'kill -STOP $$; exec sleep 1000' & echo $! >{tmp_path}/starter; wait; echo ended >{tmp_path}/ended"
    process = subprocess.Popen(["bash", "-c", script])
    wait_for(lambda: "T (stopped)" in state(tmp_path), words="the starter stands still")
    yield process
    if state(tmp_path):
        os.kill(starter(tmp_path), signal.SIGKILL)
    process.kill()
    process.wait()


def starter(folder: Path) -> int:
    return int((folder / "starter").read_text() or 0)


def state(folder: Path) -> str:
    try:
        return Path(f"/proc/{starter(folder)}/status").read_text()
    except (FileNotFoundError, ValueError):
        return ""


def watch_of_ended_ranks(seconds: float) -> Watch:
    """The watch of an attempt whose ranks it has ended so many seconds ago; its other duties fail."""
    made = object.__new__(Watch)
    made._observer, made._complaints = None, {}
    made.attempt, made._notices = SimpleNamespace(commits=None), SimpleNamespace(look=lambda: None)  # type: ignore[assignment]
    made._ended = time.monotonic() - seconds
    return made


def test_a_starter_that_outlives_its_ranks_is_ended(batch: subprocess.Popen[bytes], tmp_path: Path) -> None:
    """A stopped starter held three nodes to the time limit: the batch script waited for it."""
    watching = watch_of_ended_ranks(watch.STARTER_SECONDS - 1)
    watching.look(batch.pid)
    assert state(tmp_path)
    watching._ended = time.monotonic() - watch.STARTER_SECONDS - 1
    watching.look(batch.pid)
    assert batch.wait(timeout=60) == 0
    assert (tmp_path / "ended").read_text() == "ended\n"  # the batch script goes on to `end`


def test_a_batch_script_whose_starter_cannot_be_ended_is_ended(batch: subprocess.Popen[bytes], tmp_path: Path) -> None:
    watching = watch_of_ended_ranks(2 * watch.STARTER_SECONDS + 1)
    watching.look(batch.pid)
    assert batch.wait(timeout=60) == -signal.SIGKILL


def test_a_duty_that_fails_is_told_once_until_it_fails_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    watching = watch_of_ended_ranks(0.0)
    for error in (
        OSError("no space"),
        OSError("no space"),
        RunDirError("damaged", where="/x"),
        None,
        OSError("no space"),
    ):
        watching._try("a duty", Mock(side_effect=error))
    said = capsys.readouterr().err
    assert said.count("OSError: no space") == 2
    assert said.count("damaged") == 1
    assert "RunDirError" not in said


def test_each_look_does_every_duty_whichever_of_them_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def failing(name: str) -> Mock:
        return Mock(side_effect=lambda *_: (done.append(name), open("/nowhere/file"))[1])

    own = ["_follow", "_look_for_hang", "_look_for_starter", "_guard", "_look_at_job_end", "_look_at_budget"]
    own += ["_look_after_successor", "_look_at_saves"]
    helpers = ["_copier", "_hasher", "_quota", "_notices"]
    watching = watch_of_ended_ranks(0.0)
    watching.attempt = Run(Path("/nowhere")).attempt(1)
    for name in own:
        monkeypatch.setattr(watching, name, failing(name))
    for name in ["_observer", *helpers]:
        monkeypatch.setattr(watching, name, SimpleNamespace(look=failing(name)), raising=False)
    with pytest.raises(OSError, match="/nowhere/file"):  # notices mind their failures themselves
        watching.look(1)
    assert done == ["_observer", *own, *helpers]


class RunningJob:
    """The scheduler of a job whose end moves."""

    end: tuple[float | None, str] = (None, "")

    def current_job_id(self) -> str:
        return "1"

    def query(self, job_id: str) -> Job:
        return Job(id=job_id, name="j", state="RUNNING")

    def job_end(self, _job: Job) -> tuple[float | None, str]:
        return self.end


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The signals that the batch script gets."""
    found: list[int] = []
    monkeypatch.setattr("relayrun.control.chain.watch.os.kill", lambda _pid, number: found.append(number))
    return found


def test_an_end_of_the_job_that_moves_is_asked_for_and_recorded(tmp_path: Path, told: list[int]) -> None:
    run, now = Run(tmp_path), time.time()
    made, attempt = object.__new__(Watch), run.attempt(1)
    made.begin, made.attempt = began(run, 1, job_end_time=now + 1000, grace_period=100.0), attempt
    made.scheduler, made._latest_end = RunningJob(), now + 1000  # type: ignore[assignment]
    made.run = run
    history_plan(run, total_steps=10).write(run.plan)

    def look(end: float | None, why: str = "") -> None:
        made._next_job_end, made.scheduler.end = 0.0, (end, why)  # type: ignore[attr-defined]
        made._look_at_job_end(1)

    look(now + 1000)
    assert not attempt.job_end.exists()
    look(now + 5000)  # `scontrol update TimeLimit=...`
    assert ChangedJobEnd.read(attempt.job_end) == ChangedJobEnd(time=now + 5000, why="")
    look(now + 2000, "maintenance m begins")  # the ranks may know the later end alone
    assert attempt.job_end_time(made.begin) == now + 2000
    assert (told, attempt.stop.exists()) == ([], False)
    look(now + 150, "maintenance m begins")
    assert (told, attempt.stop.read_text()) == ([signal.SIGUSR2], "maintenance m begins\n")
    made._next_job_end = 0.0
    made._look_at_job_end(1)
    assert len(told) == 1


@pytest.mark.parametrize("job", [None, Job(id="1", name="j", state="COMPLETING")])
def test_a_job_that_slurm_does_not_show_as_running_has_no_other_end(
    tmp_path: Path, told: list[int], job: Job | None
) -> None:
    run, now = Run(tmp_path), time.time()
    made = object.__new__(Watch)
    made.begin, made.attempt = began(run, 1, job_end_time=now + 1000, grace_period=100.0), run.attempt(1)
    made.scheduler, made._latest_end, made._next_job_end = RunningJob(), now + 1000, 0.0  # type: ignore[assignment]
    made.scheduler.query, made.scheduler.end = lambda _id: job, (now + 5, "")  # type: ignore[attr-defined,method-assign]
    made.run = run
    history_plan(run, total_steps=10).write(run.plan)
    made._look_at_job_end(1)
    assert (made.attempt.job_end.exists(), told) == (False, [])


def test_ranks_that_know_the_end_of_their_job_leave_by_their_own_clock(tmp_path: Path, told: list[int]) -> None:
    run, now = Run(tmp_path), time.time()
    made = object.__new__(Watch)
    made.begin, made.attempt = began(run, 1, job_end_time=now + 110, grace_period=100.0), run.attempt(1)
    made.scheduler, made._latest_end, made._next_job_end = RunningJob(), now + 110, 0.0  # type: ignore[assignment]
    made.run = run
    history_plan(run, total_steps=10).write(run.plan)
    made.scheduler.end = (now + 110, "")  # type: ignore[attr-defined]
    made._look_at_job_end(1)
    made._next_job_end, made.scheduler.end = 0.0, (None, "")  # type: ignore[attr-defined]
    made._look_at_job_end(1)
    assert made.attempt.job_end_time(made.begin) is None
    assert told == []


def test_a_time_limit_that_is_raised_does_not_raise_the_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, now = Run(tmp_path), time.time()
    made, killed = object.__new__(Watch), []
    made.run, plan = run, plan_with(history_plan(run, total_steps=10), max_node_hours=1.0)
    plan.write(run.plan)
    made.begin, made.attempt = began(run, 1, start_time=now, job_end_time=now + 1000, grace_period=9.0), run.attempt(1)
    made.scheduler, made._latest_end, made._ended = RunningJob(), now + 1000, None  # type: ignore[assignment]
    made._next_job_end, made.scheduler.end = 0.0, (now + 7200, "")  # type: ignore[attr-defined]
    monkeypatch.setattr(made, "_end_step", lambda: killed.append(time.time()))
    made._look_at_job_end(1)
    assert made.attempt.job_end_time(made.begin) == now + 3600
    made._look_at_budget()
    assert killed == []
    monkeypatch.setattr(time, "time", lambda: now + 3601)
    made._look_at_budget()
    assert killed == [now + 3601]
    plan_with(plan, max_node_hours=1.5).write(run.plan)  # what its owner changes meanwhile holds
    made._next_job_end = 0.0
    made._look_at_job_end(1)
    assert made.attempt.job_end_time(made.begin) == now + 5400
    made._look_at_budget()
    assert len(killed) == 1


def test_the_watch_and_its_parents_are_no_starters() -> None:
    assert os.getpid() not in watch.other_children(os.getppid())
    with subprocess.Popen(["sleep", "1000"]) as child:
        assert child.pid in watch.other_children(os.getpid())
        child.kill()
