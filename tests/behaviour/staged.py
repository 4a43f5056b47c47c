"""Ways out of a chain, staged: the facts that a job would meet are put into a run directory, and its supervisor looks.

The runs are those of the local scheduler, and nothing is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from relayrun.cli import main
from relayrun.control.chain import supervisor
from relayrun.control.rundir import run, triggers
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptOutcome, ChainEnd, Hang, RankFailure
from relayrun.control.rundir.run import Run, write_stop
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE, LocalQueue
from relayrun.errors import RelayrunError
from tests.history import began, make_history, queue_is_run, trained
from tests.plans import plan_with

STAGES: dict[str, Callable[[Stage], None]] = {}
"""What happens on each stage, by its name in the record."""


@dataclasses.dataclass
class Stage:
    """A run with one attempt that has ended and a job that has begun, and what was said."""

    run: Run
    said: list[str] = dataclasses.field(default_factory=list)

    def plan(self, **changes: Any) -> None:
        """Change the plan."""
        plan_with(Plan.load(self.run), **changes).write(self.run.plan)

    def job(self, job_id: str, **changes: Any) -> None:
        """Change a job of the queue, and go on as a program of job `job_id`."""
        queue = LocalQueue(self.run.path / "local")
        queue.write_job(dataclasses.replace(queue.read_job(job_id), **changes))

    def begin(self, job_id: str = "1") -> None:
        """Have a job begin."""
        os.environ[JOB_ID_VARIABLE] = job_id
        self._call("begin", lambda: supervisor.begin_attempt(Run(self.run.path)))

    def end(self, attempt: int = 2, code: int = 1) -> None:
        """Have the job of an attempt end, with this exit code of its ranks."""
        self._call(f"end with exit code {code}", lambda: supervisor.end_attempt(Run(self.run.path), attempt, code))

    def command(self, *words: str) -> None:
        """Call a command of a person on this run."""
        self._call(words[0], lambda: main([words[0], str(self.run.path), *words[1:]]))

    def outcome(self, name: str, reason: str, *, to: int | None = None) -> None:
        """Let rank 0 of attempt 2 leave, behind a checkpoint of iteration `to`."""
        if to is not None:
            trained(self.run, 2, 30, to)
        AttemptOutcome(outcome=name, reason=reason, iteration=to or 30, time=0.0).write(self.run.attempt(2).outcome)  # type: ignore[arg-type]

    def _call(self, name: str, program: Callable[[], int]) -> None:
        words = io.StringIO()
        with contextlib.redirect_stdout(words), contextlib.redirect_stderr(words):
            try:
                found = f"exit status {program()}"
            except (RelayrunError, OSError) as error:
                found = f"{type(error).__name__}: {error}"
        self.said += [f"{name}: {found}", *words.getvalue().splitlines()]


def stage(scene: Callable[[Stage], None]) -> Callable[[Stage], None]:
    """Add a scene to the stages, by the name of its function."""
    STAGES[scene.__name__] = scene
    return scene


@stage
def stop_is_there(on: Stage) -> None:
    write_stop(on.run, ChainEnd("stopped", "somebody wrote it"), words="of a log")
    on.begin()


@stage
def all_steps_are_done(on: Stage) -> None:
    on.plan(total_steps=30)
    on.begin()


@stage
def stop_after_is_reached(on: Stage) -> None:
    on.plan(stop_after=20)
    on.begin()


@stage
def exit_trigger_between_two_jobs(on: Stage) -> None:
    triggers.touch_trigger(on.run, "exit")
    on.begin()


@stage
def predecessor_was_cancelled(on: Stage) -> None:
    on.begin()
    on.job("1", state="CANCELLED")
    on.begin("2")


@stage
def verdict_without_stop(on: Stage) -> None:
    on.begin()
    on.outcome("fatal", "loss is NaN")
    on.job("1", state="NODE_FAIL")
    on.begin("2")


@stage
def too_many_failed_attempts(on: Stage) -> None:
    on.plan(max_failed_attempts=1)
    on.begin()
    on.job("1", state="NODE_FAIL")
    on.begin("2")


@stage
def damaged_record(on: Stage) -> None:
    on.run.attempt(1).begin.write_text("{}")
    on.begin()


@stage
def plan_of_a_newer_version(on: Stage) -> None:
    on.plan(format=99)
    on.begin()


@stage
def plan_that_is_torn(on: Stage) -> None:
    on.run.plan.write_text("{", encoding="utf-8")
    on.begin()


@stage
def done(on: Stage) -> None:
    on.plan(total_steps=40)
    on.begin()
    on.outcome("done", "last step", to=40)
    on.end(code=0)


@stage
def done_of_a_program_without_steps(on: Stage) -> None:
    on.plan(total_steps=None)
    on.begin()
    on.outcome("done", "the program ended by itself", to=40)
    on.end(code=0)


@stage
def saved_before_the_time_limit(on: Stage) -> None:
    on.begin()
    on.outcome("saved", "time limit near", to=40)
    on.end(code=0)


@stage
def saved_where_stop_after_is(on: Stage) -> None:
    on.plan(stop_after=40)
    on.begin()
    on.outcome("saved", "time limit near", to=40)
    on.end(code=0)


@stage
def saved_without_auto_requeue(on: Stage) -> None:
    on.plan(auto_requeue=False)
    on.begin()
    on.outcome("saved", "time limit near", to=40)
    on.end(code=0)


@stage
def exit_trigger_while_it_ran(on: Stage) -> None:
    on.begin()
    on.outcome("exit", "exit trigger by ann", to=40)
    on.end(code=0)


@stage
def fatal_error(on: Stage) -> None:
    on.begin()
    on.outcome("fatal", "loss is NaN at iteration 31")
    on.end(code=3)


@stage
def cancelled_while_it_ran(on: Stage) -> None:
    on.begin()
    on.job("1", cancel_requested=True, state="CANCELLED")
    on.end(code=143)


@stage
def hang(on: Stage) -> None:
    on.begin()
    Hang(iteration=33, phase="step", seconds=300.0, silent=[1], time=0.0).write(on.run.attempt(2).hang)
    on.end(code=137)


@stage
def failed_without_a_word(on: Stage) -> None:
    on.begin()
    on.end(code=7)


@stage
def failed_with_progress(on: Stage) -> None:
    on.begin()
    trained(on.run, 2, 30, 40)
    on.run.attempt(2).outcome.unlink()
    on.end(code=7)


@stage
def failed_for_the_last_time(on: Stage) -> None:
    on.plan(max_failed_attempts=1)
    on.begin()
    on.end(code=7)


@stage
def failed_by_one_rank(on: Stage) -> None:
    on.begin()
    _failure(on, "OSError: [Errno 28] No space left on device")
    on.end(code=1)


@stage
def failed_in_the_same_way_each_time(on: Stage) -> None:
    on.begin()
    _failure(on, "KeyError: 'layout'", repeats=True)
    on.end(code=1)


@stage
def ranks_that_could_not_be_started(on: Stage) -> None:
    on.begin()
    on.run.attempt(2).not_started.write_text("module load cray failed\n")
    on.end(code=1)


@stage
def setup_that_failed(on: Stage) -> None:
    on.plan(setup=["false"])
    on.begin()
    on.run.attempt(2).setup_failed.write_text("job.setup failed (exit code 1) at: false\n")
    on.end(code=1)


@stage
def successor_was_cancelled(on: Stage) -> None:
    on.begin()
    LocalScheduler(on.run).cancel("2")
    on.outcome("saved", "time limit near", to=40)
    on.end(code=0)


@stage
def end_of_an_attempt_that_was_overtaken(on: Stage) -> None:
    on.begin()
    began(on.run, 3, base=30)
    on.end(attempt=2)


@stage
def end_that_is_called_again(on: Stage) -> None:
    on.begin()
    on.end(code=7)
    on.end(code=7)


@stage
def job_that_queues_itself_again(on: Stage) -> None:
    on.plan(mode="requeue")
    on.begin()
    on.end(code=7)


@stage
def stopped_by_a_person(on: Stage) -> None:
    on.job("1", state="COMPLETED")
    on.command("stop")
    on.command("stop")


@stage
def stopped_while_it_runs(on: Stage) -> None:
    on.begin()
    on.command("stop")
    on.outcome("exit", "exit trigger", to=40)
    on.end(code=0)


@stage
def cancelled_by_a_person(on: Stage) -> None:
    on.begin()
    on.command("cancel")
    on.end(code=143)


@stage
def resume_without_a_config(on: Stage) -> None:
    write_stop(on.run, ChainEnd("stopped", "somebody wrote it"))
    on.command("resume")


@stage
def cancelled_on_a_full_disk(on: Stage) -> None:
    on.begin()
    with full_disk():
        on.command("cancel")


@stage
def stopped_on_a_full_disk(on: Stage) -> None:
    on.begin()
    with full_disk():
        on.command("stop")


@stage
def verdict_on_a_full_disk(on: Stage) -> None:
    on.begin()
    on.outcome("fatal", "loss is NaN at iteration 31")
    with full_disk():
        on.end(code=3)
    on.end(code=3)


@contextlib.contextmanager
def full_disk() -> Iterator[None]:
    """No STOP and no trigger can be written, as on a disk that is full."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with mock.patch.object(run, "write_atomic", refuse), mock.patch.object(triggers, "touch_trigger", refuse):
        yield


def _failure(on: Stage, error: str, *, repeats: bool = False) -> None:
    path = on.run.attempt(2).failures / "rank-0000.json"
    RankFailure(rank=0, node="n1", error=error, time=0.0, repeats=repeats).write(path)


def play(name: str, folder: Path) -> Run:
    """Play a scene in a folder; `said.txt` gets what was said. Returns the run."""
    run = make_history(folder / "run", lines=30, attempts=1)
    kept = os.environ.get(JOB_ID_VARIABLE)
    on = Stage(run)
    try:
        with queue_is_run(run):
            STAGES[name](on)
    finally:
        os.environ.pop(JOB_ID_VARIABLE, None)
        if kept is not None:
            os.environ[JOB_ID_VARIABLE] = kept
    (run.path / "said.txt").write_text("\n".join([*on.said, *_jobs(run)]) + "\n", encoding="utf-8")
    return run


def _jobs(run: Run) -> list[str]:
    """The queue of a run as lines: each job's state, and whether it waits for a later time."""
    files = sorted((run.path / "local").glob("job-*.json"))
    jobs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    return [
        f"job {job['id']}: {job['state']}" + (", later" if job["eligible_time"] > 0 and job["id"] != "1" else "")
        for job in jobs
    ]
