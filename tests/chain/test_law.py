"""A chain is never silent: what begin, watch and end do with what was seen to go wrong around them.

On the local scheduler, whose queue is one file a job; `tests/slurm/test_law_slurm.py` has what Slurm itself does.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control import chain_state
from relayrun.control.chain import supervisor, watch
from relayrun.control.chain.watch import Watch
from relayrun.control.chain_state import count_failed_attempts
from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, Hang, Heartbeat, SuccessorJob
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE, LocalJob, LocalQueue
from relayrun.errors import RunDirError, SchedulerError
from tests.history import began, trained

Patch = pytest.MonkeyPatch


def pending(run: Run) -> list[str]:
    return [job.id for job in LocalScheduler(run).jobs(Plan.load(run)) if job.state == "PENDING"]


def set_state(run: Run, job_id: str, state: str) -> None:
    queue = LocalQueue(run.path / "local")
    queue.write_job(replace(queue.read_job(job_id), state=state))


def broken(*_arguments: object, **_more: object) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_only_a_pending_job_is_a_successor(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A predecessor whose epilog takes long, or whose task cannot be killed, is still COMPLETING."""
    LocalScheduler(run).submit(Plan.load(run), run.job_script, options={})
    set_state(run, "2", "COMPLETING")
    assert supervisor.begin_attempt(run) == 0
    assert pending(run) == ["3"]


def test_of_several_successors_one_is_left(run: Run) -> None:
    for _ in range(3):
        LocalScheduler(run).submit(Plan.load(run), run.job_script, options={})
    assert supervisor.begin_attempt(run) == 0
    assert len(pending(run)) == 1


def test_a_scheduler_that_does_not_answer_is_no_reason_to_end_the_chain(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise SchedulerError("scontrol: Protocol authentication error")

    monkeypatch.setattr(LocalScheduler, "query", away)
    with pytest.raises(SchedulerError):
        supervisor.begin_attempt(run)
    assert stop_reason(run) is None


def test_a_damaged_record_ends_the_chain_with_its_name(run: Run) -> None:
    run.attempt(3).begin.write_text("{}")
    with pytest.raises(RunDirError):
        supervisor.begin_attempt(run)
    assert "begin.json" in (stop_reason(run) or "") or "unreadable" in (stop_reason(run) or "")


@pytest.mark.parametrize("cause", ["exit", "fatal"])
def test_a_verdict_outlives_the_kill_before_stop(run: Run, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin_attempt(run) == 0
    trained(run, 4, 300, 400)
    AttemptOutcome(outcome=cause, reason="words", iteration=400, time=0.0).write(run.attempt(4).outcome)  # type: ignore[arg-type]
    monkeypatch.setattr(supervisor, "write_stop", broken)
    with pytest.raises(OSError, match="Input/output"):
        supervisor.end_attempt(run, 4, 0)
    assert run.attempt(4).end.exists()
    assert len(pending(run)) == 1  # it begins, and decides the same
    monkeypatch.undo()
    monkeypatch.setenv(JOB_ID_VARIABLE, pending(run)[0])
    set_state(run, pending(run)[0], "RUNNING")
    assert supervisor.begin_attempt(Run(run.path)) == supervisor.EXIT_CHAIN_ENDS
    assert "words" in (stop_reason(run) or "")
    assert pending(run) == []


def test_a_verdict_that_only_rank_0_recorded_is_found_by_the_successor(run: Run) -> None:
    assert supervisor.begin_attempt(run) == 0
    AttemptOutcome(outcome="fatal", reason="nan", iteration=300, time=0.0).write(run.attempt(4).outcome)
    set_state(run, "1", "NODE_FAIL")
    set_state(run, "2", "RUNNING")
    os.environ[JOB_ID_VARIABLE] = "2"
    assert supervisor.begin_attempt(Run(run.path)) == supervisor.EXIT_CHAIN_ENDS
    assert stop_reason(run) == "fatal: nan"


def test_an_end_that_is_called_again_does_what_is_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin_attempt(run) == 0
    LocalQueue(run.path / "local").path("2").unlink()  # the scheduler lost its queue
    trained(run, 4, 300, 400)
    refuse = pytest.MonkeyPatch()
    refuse.setattr(LocalScheduler, "jobs", broken)
    with pytest.raises(OSError, match="Input/output"):
        supervisor.end_attempt(run, 4, 0)
    refuse.undo()
    record = AttemptEnd.read(run.attempt(4).end)
    assert record is not None
    assert pending(run) == []
    assert supervisor.end_attempt(Run(run.path), 4, 0) == 0
    assert len(pending(run)) == 1
    assert AttemptEnd.read(run.attempt(4).end) == record


@pytest.mark.parametrize("forgotten", [False, True])
@pytest.mark.parametrize("state", ["CANCELLED", "NODE_FAIL"])
def test_an_end_that_no_job_could_record_is_completed_though_a_person_submitted_since(
    run: Run, state: str, forgotten: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: the attempt stayed without an end for ever, and counted as failed. `forgotten`: by the controller,
    and not by accounting."""
    query = LocalScheduler.query
    if forgotten:
        monkeypatch.setattr(LocalScheduler, "query", lambda self, name: None if name == "2" else query(self, name))
    began(run, 4, base=300, job_id="2")
    times = {"start_time": 1e9, "end_time": 1e9 + 30, "eligible_time": 1e9, "time_limit": 60, "signal_seconds": 1}
    LocalQueue(run.path / "local").add(LocalJob(id="", name="j", script="x", log_folder="x", **times))  # type: ignore[arg-type]
    set_state(run, "2", state)
    replace(Plan.load(run), submitted_after_attempt=4).write(run.plan)
    assert supervisor.begin_attempt(run) == 0
    end = AttemptEnd.read(run.attempt(4).end)
    assert end is not None
    assert (end.cause, end.end_time) == ("cancelled" if state == "CANCELLED" else "unknown", 1e9 + 30)
    assert count_failed_attempts(Run(run.path), Plan.load(run)) == 1  # the one that runs now


def test_an_attempt_that_never_began_hides_nobody(run: Run) -> None:
    """Its begin was killed between the directory and begin.json."""
    began(run, 4, base=300)
    trained(run, 4, 300, 400)
    run.attempt(5).path.mkdir()
    assert supervisor.begin_attempt(run) == 0
    end = AttemptEnd.read(run.attempt(4).end)
    assert end is not None
    assert end.progress
    assert count_failed_attempts(Run(run.path), Plan.load(run)) == 1  # the new one


def test_a_successor_that_somebody_cancelled_is_not_replaced(run: Run) -> None:
    assert supervisor.begin_attempt(run) == 0
    (successor,) = pending(run)
    LocalScheduler(run).cancel(successor)
    trained(run, 4, 300, 400)
    supervisor.end_attempt(run, 4, 0)
    assert stop_reason(run) == f"the successor, job {successor}, was cancelled"
    assert pending(run) == []


def test_a_cancelled_successor_is_noted_before_the_scheduler_forgets_it(run: Run) -> None:
    assert supervisor.begin_attempt(run) == 0
    (successor,) = pending(run)
    LocalScheduler(run).cancel(successor)
    beside = Watch(run, 4)
    beside._next_try = 0.0
    beside._look_after_successor()
    LocalQueue(run.path / "local").path(successor).unlink()
    noted = SuccessorJob.read(run.attempt(4).successor)
    assert noted is not None
    assert noted.cancelled
    trained(run, 4, 300, 400)
    supervisor.end_attempt(run, 4, 0)
    assert "was cancelled" in (stop_reason(run) or "")


@pytest.mark.parametrize("program", ["end", "begin"])
def test_a_person_cancels_on_a_disk_that_takes_no_record(run: Run, program: str, monkeypatch: Patch) -> None:
    """Slurm forgets the job, and a later one would go on: so no job may wait, and the own one knows it."""
    if program == "end":
        assert supervisor.begin_attempt(run) == 0
        set_state(run, "1", "CANCELLED")
    else:
        began(run, 4, base=300, job_id="2")
        queue = LocalScheduler(run)
        queue.submit(Plan.load(run), run.job_script, options={})
        set_state(run, "2", "CANCELLED")
        queue.submit(Plan.load(run), run.job_script, options={})
    assert pending(run)
    noted: list[str] = []
    monkeypatch.setattr(LocalScheduler, "note_stop", lambda _, job_id, user: noted.append(f"{job_id} {user}"))
    monkeypatch.setattr(AttemptEnd, "write", broken)
    with pytest.raises(OSError, match="Input/output"):
        supervisor.end_attempt(run, 4, 1) if program == "end" else supervisor.begin_attempt(run)
    assert pending(run) == []
    assert program == "end" or "1 somebody" in noted


def test_a_successor_is_cancelled_on_a_disk_that_takes_no_record(run: Run, monkeypatch: Patch) -> None:
    assert supervisor.begin_attempt(run) == 0
    LocalScheduler(run).cancel(pending(run)[0])
    noted: list[tuple[str, str]] = []
    monkeypatch.setattr(LocalScheduler, "note_stop", lambda _, *words: noted.append(words))
    monkeypatch.setattr(SuccessorJob, "write", broken)
    beside = Watch(run, 4)
    beside._next_try = 0.0
    beside._look_after_successor()
    assert noted == [("1", "somebody")]


def test_a_waiting_successor_is_postponed_after_a_failure_and_stays_the_same_job(run: Run) -> None:
    assert supervisor.begin_attempt(run) == 0
    before = pending(run)
    supervisor.end_attempt(run, 4, 1)
    assert pending(run) == before
    job = LocalQueue(run.path / "local").read_job(before[0])
    assert job.eligible_time > time.time() + 15


def test_a_job_behind_which_none_may_be_queued_is_queued_again_itself(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit of one submitted job, as debug queues have."""

    def refused(*_: object, **__: object) -> str:
        raise SchedulerError("sbatch: QOSMaxSubmitJobPerUserLimit")

    monkeypatch.setattr(LocalScheduler, "submit", refused)
    assert supervisor.begin_attempt(run) == 0
    assert run.attempt(4).retry_successor.exists()
    beside = Watch(run, 4)
    beside._seen = [Heartbeat(node="n", iteration=301, phase="step", time=0.0, step_p95=None, save_p95=None)]
    beside._guard(1)  # for the case that the batch script is killed
    assert LocalQueue(run.path / "local").read_job("1").guarded
    trained(run, 4, 300, 400)
    assert supervisor.end_attempt(run, 4, 0) == 0
    assert LocalQueue(run.path / "local").read_job("1").requeue_delay == 0
    assert stop_reason(run) is None


@pytest.mark.parametrize("what", ["views", "heartbeats", "evaluations", "successor"])
def test_watch_does_all_its_duties_though_one_fails(run: Run, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin_attempt(run) == 0
    beside = Watch(run, 4)
    done: list[str] = []
    names = {
        "views": "_follow",
        "heartbeats": "_look_for_hang",
        "evaluations": "_look_at_saves",
        "successor": "_look_after_successor",
    }
    for duty, name in names.items():
        if duty == what:
            monkeypatch.setattr(beside, name, broken)
        else:
            monkeypatch.setattr(beside, name, lambda duty=duty: done.append(duty))
    beside.look(1)
    beside.look(1)
    assert sorted(done) == sorted([duty for duty in names if duty != what] * 2)


def test_a_heartbeat_that_cannot_be_read_is_no_sign_of_life(run: Run) -> None:
    assert supervisor.begin_attempt(run) == 0
    beats = run.attempt(4).heartbeats
    (beats / "n0.json").write_text("torn")
    Heartbeat(node="n1", iteration=1, phase="step", time=0.0, step_p95=None, save_p95=None).write(beats / "n1.json")
    assert [beat.node for beat in run.attempt(4).read_heartbeats()] == ["n1"]


@pytest.mark.parametrize(("interval", "lives"), [(0.0, False), (60.0, True)])
def test_an_attempt_whose_heartbeats_are_rare_lives_for_longer_after_the_last(
    run: Run, interval: float, lives: bool
) -> None:
    assert supervisor.begin_attempt(run) == 0
    attempt, plan = run.attempt(4), Plan.load(run)
    last = time.time() + 1000
    beat = Heartbeat(node="n", iteration=1, phase="step", time=last, step_p95=None, save_p95=None, interval=interval)
    beat.write(attempt.heartbeats / "n.json")
    found = chain_state.newest_life_sign(run, plan, now=last + plan.chain.hang_timeout + 59)
    assert (found is not None) == lives
    assert chain_state.newest_life_sign(run, plan, now=last + plan.chain.hang_timeout + 61) is None


@pytest.mark.parametrize(("interval", "reads"), [(0.0, 60), (60.0, 10)])
def test_the_watch_reads_heartbeats_as_rarely_as_they_come(
    run: Run, monkeypatch: pytest.MonkeyPatch, interval: float, reads: int
) -> None:
    assert supervisor.begin_attempt(run) == 0
    beat = Heartbeat(node="n", iteration=1, phase="step", time=0.0, step_p95=None, save_p95=None, interval=interval)
    clock, found = [time.monotonic()], [0]

    def read() -> list[Heartbeat]:
        found[0] += 1
        return [beat]

    monkeypatch.setattr(watch.time, "monotonic", lambda: clock[0])
    beside = Watch(run, 4)
    monkeypatch.setattr(type(beside.attempt), "read_heartbeats", lambda _self: read())
    for _ in range(60):
        beside._look_for_hang()
        clock[0] += 1.0
    assert found == [reads]


def test_ranks_that_hang_are_ended_though_nothing_can_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin_attempt(run) == 0
    sent: list[int] = []

    def send(_self: object, _job: str, number: signal.Signals) -> None:
        if number == signal.SIGUSR1 or not sent:
            sent.append(0)
            raise SchedulerError("scancel: Unable to contact slurm controller")
        sent.append(number)

    monkeypatch.setattr(LocalScheduler, "signal_ranks", send)
    monkeypatch.setattr(Hang, "write", broken)
    monkeypatch.setattr(watch, "stall_limit", lambda *_a, **_k: -1.0)
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.0)
    beside = Watch(run, 4)
    for _ in range(4):
        beside.look(1)
    assert sent.count(signal.SIGKILL) == 1


@pytest.mark.parametrize("how", ["empty", "full"])
def test_a_directory_as_exit_trigger_ends_the_chain(run: Run, how: str) -> None:
    folder = run.triggers / "exit"
    folder.mkdir()
    if how == "full":
        (folder / "file").touch()
    assert supervisor.begin_attempt(run) == supervisor.EXIT_CHAIN_ENDS
    assert (stop_reason(run) or "").startswith("exit trigger by")
    assert json.loads((run.triggers / "exit.done").read_text())["result"].startswith("the chain ends")
    assert folder.exists() is (how == "full")


def test_stop_stands_before_an_exit_is_acknowledged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    triggers.touch_trigger(run, "exit")
    monkeypatch.setattr(supervisor, "write_stop", broken)
    with pytest.raises(OSError, match="Input/output"):
        supervisor.begin_attempt(run)
    assert (run.triggers / "exit").exists()
    assert not (run.triggers / "exit.done").exists()


def test_ranks_that_say_how_they_leave_and_do_not_go_are_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin_attempt(run) == 0
    AttemptOutcome(outcome="exit", reason="words", iteration=300, time=0.0).write(run.attempt(4).outcome)
    sent: list[int] = []
    monkeypatch.setattr(LocalScheduler, "signal_ranks", lambda _self, _job, number: sent.append(number))
    beside = Watch(run, 4)
    beside.look(1)
    assert sent == []
    beside._left = time.monotonic() - 1e6
    beside.look(1)
    beside.look(1)
    assert sent == [signal.SIGKILL]
    assert not run.attempt(4).hang.exists()


def test_ranks_whose_signs_of_life_cannot_be_written_may_be_silent_for_longer(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert supervisor.begin_attempt(run) == 0
    sent: list[int] = []
    monkeypatch.setattr(LocalScheduler, "signal_ranks", lambda _self, _job, number: sent.append(number))
    monkeypatch.setattr(watch, "stall_limit", lambda *_a, **_k: 100.0)
    monkeypatch.setattr(watch, "ANSWER_SECONDS", 0.0)
    monkeypatch.setattr(Path, "touch", broken)
    beside = Watch(run, 4)
    beside.look(1)
    for silent, signals in ((200.0, []), (501.0, [signal.SIGUSR1, signal.SIGKILL])):
        beside._changed = time.monotonic() - silent
        beside.look(1)
        assert sent == signals


def test_a_run_does_not_go_back_to_what_it_began_with_while_its_own_checkpoints_are_away(run: Run) -> None:
    foreign = run.path.parent / "other" / "iter_0000000"
    foreign.mkdir(parents=True)
    plan = Plan.load(run)
    replace(plan, load_path=str(foreign), load_iteration=0).write(run.plan)
    begin = json.loads(run.attempt(1).begin.read_text())
    run.attempt(1).begin.write_text(json.dumps(begin | {"base_path": str(foreign)}))
    away = run.checkpoints.rename(run.path / "away")
    with pytest.raises(RunDirError, match="no checkpoint of this run is whole"):
        supervisor.begin_attempt(Run(run.path))
    away.rename(run.checkpoints)
    run.stop.unlink()
    again = Run(run.path)
    assert supervisor.begin_attempt(again) == 0
    newest = again.newest_begun()
    assert newest is not None
    begun = newest.read_begin()
    assert begun is not None
    assert begun.base_iteration == 300


def test_a_cancelled_successor_ends_the_chain_though_no_end_could_say_so(run: Run) -> None:
    """The job's `end` was killed, or its node was lost; another job of the chain begins all the same."""
    assert supervisor.begin_attempt(run) == 0
    (successor,) = pending(run)
    LocalScheduler(run).cancel(successor)
    trained(run, 4, 300, 400)
    assert supervisor.begin_attempt(Run(run.path)) == supervisor.EXIT_CHAIN_ENDS
    assert stop_reason(run) == f"the successor, job {successor}, was cancelled"
