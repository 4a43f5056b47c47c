"""A chain is never silent: what begin, watch and end do with what was seen to go wrong around them.

On the local scheduler, whose queue is one file a job; `tests/slurm/test_law_slurm.py` has what Slurm itself does.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.chain import supervisor, watch
from relayrun.chain.watch import Watch, read_heartbeats
from relayrun.errors import RunDirError, SchedulerError
from relayrun.rundir import triggers
from relayrun.rundir.plan import Plan
from relayrun.rundir.records import End, Hang, Heartbeat, Outcome, Successor
from relayrun.rundir.run import Run
from relayrun.rundir.stop import stop_reason
from relayrun.scheduler import base
from relayrun.scheduler.local import LocalScheduler
from relayrun.scheduler.local_queue import JOB_ID_VARIABLE, LocalQueue
from tests.history import began, make_history, queue_is_run, trained

from .conftest import MakeRun


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Three attempts of a hundred iterations, and a job that has just begun: this process."""
    made = make_history(tmp_path / "run", lines=300, attempts=3)
    monkeypatch.setenv(JOB_ID_VARIABLE, "1")
    with queue_is_run(made):
        yield made


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
    assert supervisor.begin(run) == 0
    assert pending(run) == ["3"]


def test_of_several_successors_one_is_left(run: Run) -> None:
    for _ in range(3):
        LocalScheduler(run).submit(Plan.load(run), run.job_script, options={})
    assert supervisor.begin(run) == 0
    assert len(pending(run)) == 1


def test_a_scheduler_that_does_not_answer_is_no_reason_to_end_the_chain(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def away(*_: object) -> None:
        raise SchedulerError("scontrol: Protocol authentication error")

    monkeypatch.setattr(LocalScheduler, "query", away)
    with pytest.raises(SchedulerError):
        supervisor.begin(run)
    assert stop_reason(run) is None


def test_a_damaged_record_ends_the_chain_with_its_name(run: Run) -> None:
    run.attempt(3).begin.write_text("{}")
    with pytest.raises(RunDirError):
        supervisor.begin(run)
    assert "begin.json" in (stop_reason(run) or "") or "unreadable" in (stop_reason(run) or "")


@pytest.mark.parametrize("cause", ["exit", "fatal"])
def test_a_verdict_outlives_the_kill_before_stop(run: Run, cause: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin(run) == 0
    trained(run, 4, 300, 400)
    Outcome(outcome=cause, reason="words", iteration=400, time=0.0).write(run.attempt(4).outcome)  # type: ignore[arg-type]
    monkeypatch.setattr(supervisor, "write_stop", broken)
    with pytest.raises(OSError, match="Input/output"):
        supervisor.end(run, 4, 0)
    assert run.attempt(4).end.exists()
    assert len(pending(run)) == 1  # it begins, and decides the same
    monkeypatch.undo()
    monkeypatch.setenv(JOB_ID_VARIABLE, pending(run)[0])
    set_state(run, pending(run)[0], "RUNNING")
    assert supervisor.begin(Run(run.path)) == supervisor.CHAIN_ENDS
    assert "words" in (stop_reason(run) or "")
    assert pending(run) == []


def test_a_verdict_that_only_rank_0_recorded_is_found_by_the_successor(run: Run) -> None:
    assert supervisor.begin(run) == 0
    Outcome(outcome="fatal", reason="nan", iteration=300, time=0.0).write(run.attempt(4).outcome)
    set_state(run, "1", "NODE_FAIL")
    set_state(run, "2", "RUNNING")
    os.environ[JOB_ID_VARIABLE] = "2"
    assert supervisor.begin(Run(run.path)) == supervisor.CHAIN_ENDS
    assert stop_reason(run) == "fatal: nan"


def test_an_end_that_is_called_again_does_what_is_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin(run) == 0
    LocalQueue(run.path / "local").path("2").unlink()  # the scheduler lost its queue
    trained(run, 4, 300, 400)
    refuse = pytest.MonkeyPatch()
    refuse.setattr(LocalScheduler, "jobs", broken)
    with pytest.raises(OSError, match="Input/output"):
        supervisor.end(run, 4, 0)
    refuse.undo()
    record = End.read(run.attempt(4).end)
    assert record is not None
    assert pending(run) == []
    assert supervisor.end(Run(run.path), 4, 0) == 0
    assert len(pending(run)) == 1
    assert End.read(run.attempt(4).end) == record


def test_an_attempt_that_never_began_hides_nobody(run: Run) -> None:
    """Its begin was killed between the directory and begin.json."""
    began(run, 4, base=300)
    trained(run, 4, 300, 400)
    run.attempt(5).path.mkdir()
    assert supervisor.begin(run) == 0
    end = End.read(run.attempt(4).end)
    assert end is not None
    assert end.progress
    assert supervisor.failed_attempts(Run(run.path), Plan.load(run)) == 1  # the new one


def test_a_successor_that_somebody_cancelled_is_not_replaced(run: Run) -> None:
    assert supervisor.begin(run) == 0
    (successor,) = pending(run)
    LocalScheduler(run).cancel(successor)
    trained(run, 4, 300, 400)
    supervisor.end(run, 4, 0)
    assert stop_reason(run) == f"the successor, job {successor}, was cancelled"
    assert pending(run) == []


def test_a_cancelled_successor_is_noted_before_the_scheduler_forgets_it(run: Run) -> None:
    assert supervisor.begin(run) == 0
    (successor,) = pending(run)
    LocalScheduler(run).cancel(successor)
    beside = Watch(run, 4)
    beside._next_try = 0.0
    beside._look_after_successor()
    LocalQueue(run.path / "local").path(successor).unlink()
    noted = Successor.read(run.attempt(4).successor)
    assert noted is not None
    assert noted.cancelled
    trained(run, 4, 300, 400)
    supervisor.end(run, 4, 0)
    assert "was cancelled" in (stop_reason(run) or "")


def test_a_waiting_successor_is_postponed_after_a_failure_and_stays_the_same_job(run: Run) -> None:
    assert supervisor.begin(run) == 0
    before = pending(run)
    supervisor.end(run, 4, 1)
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
    assert supervisor.begin(run) == 0
    assert run.attempt(4).retry_successor.exists()
    beside = Watch(run, 4)
    beside._seen = [Heartbeat(node="n", iteration=301, phase="step", time=0.0, step_p95=None, save_p95=None)]
    beside._guard(1)  # for the case that the batch script is killed
    assert LocalQueue(run.path / "local").read_job("1").guarded
    trained(run, 4, 300, 400)
    assert supervisor.end(run, 4, 0) == 0
    assert LocalQueue(run.path / "local").read_job("1").requeue_delay == 0
    assert stop_reason(run) is None


@pytest.mark.parametrize("what", ["views", "heartbeats", "evaluations", "successor"])
def test_watch_does_all_its_duties_though_one_fails(run: Run, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin(run) == 0
    beside = Watch(run, 4)
    done: list[str] = []
    names = {
        "views": "_follow",
        "heartbeats": "_look_for_hang",
        "evaluations": "_evaluate",
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
    assert supervisor.begin(run) == 0
    beats = run.attempt(4).heartbeats
    (beats / "n0.json").write_text("torn")
    Heartbeat(node="n1", iteration=1, phase="step", time=0.0, step_p95=None, save_p95=None).write(beats / "n1.json")
    assert [beat.node for beat in read_heartbeats(run.attempt(4))] == ["n1"]


def test_ranks_that_hang_are_ended_though_nothing_can_be_written(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin(run) == 0
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
    assert supervisor.begin(run) == supervisor.CHAIN_ENDS
    assert (stop_reason(run) or "").startswith("exit trigger by")
    assert json.loads((run.triggers / "exit.done").read_text())["result"].startswith("the chain ends")
    assert folder.exists() is (how == "full")


def test_stop_stands_before_an_exit_is_acknowledged(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    triggers.touch(run, "exit")
    monkeypatch.setattr(supervisor, "write_stop", broken)
    with pytest.raises(OSError, match="Input/output"):
        supervisor.begin(run)
    assert (run.triggers / "exit").exists()
    assert not (run.triggers / "exit.done").exists()


def chain(run: Run, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run it to its end, with short delays between tries."""
    monkeypatch.setattr("relayrun.scheduler.local.BEGIN_BACKOFF", 0.2)
    events: list[str] = []
    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    scheduler.run_queue(events.append)
    return events


def refusing_python(folder: Path, verb: str, *, times: int) -> str:
    """A host Python that cannot start the supervisor's `verb` the first `times` times."""
    python, count = folder / "python", folder / "count"
    python.write_text(
        f"#!/bin/bash\nset -e\n"
        f'if [[ " $* " == *" relayrun.chain {verb} "* ]]; then\n'
        f'  echo x >>"{count}"\n'
        f'  [[ "$(wc -l <"{count}")" -gt {times} ]] || {{ echo "No module named relayrun" >&2; exit 1; }}\n'
        f'fi\nexec "{os.sys.executable}" "$@"\n'  # type: ignore[attr-defined]
    )
    python.chmod(0o755)
    return str(python)


@pytest.mark.slow
def test_a_begin_that_cannot_start_is_tried_again_later_each_time(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run("--steps=5", total_steps=5, host_python=refusing_python(tmp_path, "begin", times=2))
    events = chain(run, plan, monkeypatch)
    assert [event for event in events if "queued again" in event] == ["job 1 ended: FAILED and is queued again"] * 2
    assert (stop_reason(run) or "").startswith("the last iteration, 5, is durable")
    assert LocalQueue(run.path / "local").read_job("1").failed_begins == 0  # forgotten once it has begun


@pytest.mark.slow
def test_a_begin_that_never_starts_ends_the_chain_with_a_reason(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run(host_python=refusing_python(tmp_path, "begin", times=99))
    events = chain(run, plan, monkeypatch)
    assert len([event for event in events if "queued again" in event]) == base.MAX_FAILED_BEGINS - 1
    assert (stop_reason(run) or "").startswith(f"the supervisor failed in job 1, {base.MAX_FAILED_BEGINS} times")


@pytest.mark.slow
def test_without_auto_requeue_a_begin_that_cannot_start_is_not_tried_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run(auto_requeue=False, host_python=refusing_python(tmp_path, "begin", times=99))
    events = chain(run, plan, monkeypatch)
    assert not [event for event in events if "queued again" in event]
    assert (stop_reason(run) or "").startswith("begin failed in job 1 on ")


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 99])
def test_an_end_that_fails_is_called_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    run, plan = make_run(
        "--steps=5",
        total_steps=5,
        host_python=refusing_python(tmp_path, "end", times=times),
        package_root=str(fast(tmp_path)),
    )
    chain(run, plan, monkeypatch)
    assert (stop_reason(run) or "").startswith("the last iteration, 5, is durable")
    assert [record.cause for number in run.attempt_numbers() if (record := run.attempt(number).read_end())] == ["done"]


@pytest.mark.slow
def test_a_watch_that_is_killed_starts_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run(
        "--stop-rank=1",
        "--stop-at=2",
        max_failed_attempts=1,
        hang_timeout=4.0,
        host_python=refusing_python(tmp_path, "watch", times=1),
        package_root=str(fast(tmp_path)),
    )
    chain(run, plan, monkeypatch)
    assert [record.cause for number in run.attempt_numbers() if (record := run.attempt(number).read_end())] == ["hang"]


def fast(folder: Path) -> Path:
    """The package, with a batch script that waits less between two tries."""
    root = folder / "root"
    root.mkdir()
    here = Path(__file__).resolve().parents[2]
    (root / "relayrun").symlink_to(here / "relayrun")
    (root / "launchers/lib").mkdir(parents=True)
    for script in (here / "launchers/lib").iterdir():
        text = (
            script.read_text().replace("for pause in 2 10 30 0", "for pause in 0 0").replace("sleep 5 &", "sleep 0.2 &")
        )
        (root / "launchers/lib" / script.name).write_text(text)
    return root


@pytest.mark.slow
def test_a_batch_script_that_cannot_read_its_package_is_tried_again(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, plan = make_run("--steps=3", total_steps=3, package_root=str(tmp_path / "root"))

    scheduler = LocalScheduler(run)
    scheduler.submit(plan, run.job_script, options={})
    monkeypatch.setattr("relayrun.scheduler.local.BEGIN_BACKOFF", 0.2)
    events: list[str] = []

    def listen(event: str) -> None:
        events.append(event)
        if "queued again" in event and not (tmp_path / "root").exists():
            fast(tmp_path)

    scheduler.run_queue(listen)
    assert [event for event in events if "queued again" in event] == ["job 1 ended: FAILED and is queued again"]
    assert (stop_reason(run) or "").startswith("the last iteration, 3, is durable")


def test_the_job_script_has_what_it_needs_when_the_package_is_away(make_run: MakeRun) -> None:
    run, _plan = make_run()
    here = Path(__file__).resolve().parents[2]
    text = (here / "launchers/lib/again.sh").read_text().partition("\n")[2].strip()
    assert text in run.job_script.read_text()
    subprocess.run(["bash", "-n", run.job_script], check=True)


def test_ranks_that_say_how_they_leave_and_do_not_go_are_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    assert supervisor.begin(run) == 0
    Outcome(outcome="exit", reason="words", iteration=300, time=0.0).write(run.attempt(4).outcome)
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
    assert supervisor.begin(run) == 0
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
        supervisor.begin(Run(run.path))
    away.rename(run.checkpoints)
    run.stop.unlink()
    again = Run(run.path)
    assert supervisor.begin(again) == 0
    newest = again.newest_begun()
    assert newest is not None
    begun = newest.read_begin()
    assert begun is not None
    assert begun.base_iteration == 300


def test_a_cancelled_successor_ends_the_chain_though_no_end_could_say_so(run: Run) -> None:
    """The job's `end` was killed, or its node was lost; another job of the chain begins all the same."""
    assert supervisor.begin(run) == 0
    (successor,) = pending(run)
    LocalScheduler(run).cancel(successor)
    trained(run, 4, 300, 400)
    assert supervisor.begin(Run(run.path)) == supervisor.CHAIN_ENDS
    assert stop_reason(run) == f"the successor, job {successor}, was cancelled"


SLURM_COMMANDS = """#!/bin/bash
folder="{folder}"
echo "${{0##*/}} $*" >>"$folder/asked"
case "${{0##*/}} $*" in
  squeue*%k*) cat "$folder/comment" 2>/dev/null ;;
  squeue*PENDING*)
    [[ -e "$folder/answers" ]] || exit 1
    cat "$folder/pending" 2>/dev/null ;;
  squeue*--jobs=8*) cat "$folder/successor" 2>/dev/null ;;
  squeue*%T*) cat "$folder/state" ;;
  sbatch*) exit 1 ;;
  scontrol*) cat >>"$folder/orders" ;;
esac
exit 0
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["alone", "successor", "cancelled", "cancelled-successor", "silent"])
def test_again_asks_before_it_queues(make_run: MakeRun, tmp_path: Path, what: str) -> None:
    """Slurm may be silent for a while, a person may act meanwhile, and Slurm brings back what it is told to."""
    run, _plan = make_run()
    folder = tmp_path / "slurm"
    folder.mkdir()
    for name in ("squeue", "scontrol", "sbatch", "sleep"):
        text = SLURM_COMMANDS.format(folder=folder)
        if name == "sleep":  # the second question is answered; and nothing comes after an order but the end
            text = f'#!/bin/bash\ntouch "{folder}/answers"\n[[ ! -e "{folder}/orders" ]] || kill -KILL $PPID\n'
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    (folder / "state").write_text("COMPLETING" if what == "cancelled" else "RUNNING")
    if what != "silent":
        (folder / "answers").touch()
    attempt = tmp_path / "attempt"
    attempt.mkdir()
    if what == "successor":
        (folder / "pending").write_text("8\n")
    if what == "cancelled-successor":
        (attempt / "successor.json").write_text('{\n  "job_id": "8",\n  "cancelled": false\n}\n')
        (folder / "successor").write_text("CANCELLED")
    script = run.job_script.read_text()
    script = script[: script.index("# shellcheck source=/dev/null")] + f'attempt_dir="{attempt}"\nexit 9\n'
    (tmp_path / "script").write_text(script)
    done = subprocess.run(
        ["bash", tmp_path / "script"],
        env={"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURMD_NODENAME": "n0"},
        capture_output=True,
        text=True,
    )
    orders = (folder / "orders").read_text() if (folder / "orders").exists() else ""
    if what in ("alone", "silent"):
        assert "requeue 7" in orders, done.stderr
        assert "begin-failed=1@n0" in orders
        assert "StartTime=now+30" in orders
    else:
        assert "requeue" not in orders
    reasons = {"cancelled": "while Slurm ended the job", "cancelled-successor": "the successor, job 8, was cancelled"}
    assert reasons.get(what, "") in (stop_reason(run) or "")
    assert (stop_reason(run) is not None) == (what in reasons)
