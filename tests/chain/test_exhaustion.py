"""Every way out of begin, watch, end and the ranks' leaving, with each call of the system failing in turn.

The law: a running job that is looked after, a queued successor, or STOP. What was acknowledged or recorded holds. A
program that fails is called again, by the batch script or by the job that Slurm starts in its place, and must then come
to where the undisturbed one came. `make test` takes a sixtieth of the cases, each day another; `make test-long` all.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relayrun.control.chain import excluded_nodes, jobs, supervisor, watch
from relayrun.control.chain.watch import Watch
from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, CheckpointCommit
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.train.checkpoint import publish
from tests.history import make_history, trained
from tests.owners import copy_as_ones_own
from tests.plans import plan_with

from .exhaustion import FAULTS, KILL, Fault, Reached, run_child
from .fake_slurm import FakeSlurm

PARTS = 120
"""Parts of the cases, one of which a day tries."""


def todays(parts: int) -> int:
    """Which of so many parts of the cases is tried today."""
    return int(time.time() // 86_400) % parts


@dataclass(frozen=True)
class State:
    """Where a chain stands, as far as it must not depend on faults that have gone."""

    stop: str | None
    base: int
    """Iteration from which the newest attempt that has begun starts."""
    ends: tuple[str, ...]
    follows: bool
    """A job is queued, or the running one takes care of it."""


@dataclass
class Stage:
    """One run directory and one queue, put back to their beginning before each case."""

    run_path: Path
    template: Path
    slurm: FakeSlurm
    queue: str

    @property
    def run(self) -> Run:
        """A fresh object each time: records that it keeps are of one program."""
        return Run(self.run_path)

    def reset(self) -> None:
        shutil.rmtree(self.run_path)
        copy_as_ones_own(self.template, self.run_path)
        self.slurm.file.write_text(self.queue)

    def keep(self) -> None:
        """What stands now is the beginning of every case."""
        if self.template.exists():
            shutil.rmtree(self.template)
        shutil.copytree(self.run_path, self.template, symlinks=True)
        self.queue = self.slurm.file.read_text()

    def state(self) -> State:
        run, jobs = self.run, self.slurm.jobs()
        newest = run.newest_begun()
        begin = None if newest is None else newest.read_begin()
        assert newest is not None
        assert begin is not None
        ends = [
            AttemptEnd.read(run.attempt(number).end)
            for number in run.attempt_numbers()
            if run.attempt(number).read_begin()
        ]
        owed = newest.retry_successor.exists() and jobs["1"]["state"] == "RUNNING" and jobs["1"]["requeue"] == 1
        return State(
            stop=stop_reason(run),
            base=begin.base_iteration,
            ends=tuple(end.cause if end else "-" for end in ends),
            follows=bool(self.slurm.pending()) or owed,
        )


WAITS = "relayrun:starts-only-if-job=1-fails,failed-begins=0"


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    """Three attempts of ten iterations; job 1 runs and belongs to the chain."""
    run = make_history(tmp_path / "work" / "run", lines=30, attempts=3)
    shutil.rmtree(run.path / "local")
    plan = plan_with(Plan.load(run), scheduler="slurm", fallback_job=True)
    plan.write(run.plan)
    run.fallback_script.write_text("#!/bin/bash\n")
    (tmp_path / "queue").mkdir()
    slurm = FakeSlurm(tmp_path / "queue" / "jobs.json", plan.job_name)
    slurm.add(state="RUNNING")
    behind = ["sbatch", f"--job-name={plan.fallback_job_name}", "--dependency=afternotok:1", f"--comment={WAITS}"]
    slurm.run([*behind, str(run.fallback_script)])
    return Stage(run_path=run.path, template=tmp_path / "template", slurm=slurm, queue="")


def cases(calls: list[str], everything: bool) -> Iterator[tuple[int, Fault]]:
    today = todays(PARTS)
    for number in range(len(calls)):
        for index, fault in enumerate(FAULTS):
            if everything or (number * len(FAULTS) + index) % PARTS == today:
                yield number, fault


def exhaust(
    stage: Stage,
    program: Callable[[], int],
    check: Callable[[Reached], str],
    *,
    everything: bool,
    after: Callable[[], None] = lambda: None,
    job: str = "1",
) -> None:
    """Run `program` once for each call that it makes and each fault; `check` says what is wrong then."""
    stage.keep()
    undisturbed = run_child(program, stage.run_path, stage.slurm, job=job)
    assert "Traceback" not in undisturbed.output, undisturbed.output
    print(f"{len(undisturbed.calls)} calls:", *undisturbed.calls, sep="\n  ")
    after()
    wrong, count = [], 0
    for number, fault in cases(undisturbed.calls, everything):
        stage.reset()
        count += 1
        reached = run_child(program, stage.run_path, stage.slurm, at=number, fault=fault, job=job)
        reached = replace(reached, lasting=fault.lasting)
        try:
            complaint = check(reached)
        except Exception as error:
            complaint = f"{type(error).__name__}: {error}"
        if complaint:
            wrong.append(f"{fault} at {number} {undisturbed.calls[number]}: {complaint} (exit code {reached.code})")
    print(f"{count} cases")
    assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:40]])


EVERYTHING = pytest.mark.parametrize(
    "everything", [False, pytest.param(True, marks=pytest.mark.long)], ids=["a-part", "all"]
)


def guarded(stage: Stage) -> Reached:
    """The guard of attempt 4 is told by SIGTERM that the job ends."""

    def guard() -> int:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # a library may have started a thread in the fork
        return watch.run_guard(stage.run, 4, batch_pid=1)

    reached = run_child(guard, stage.run_path, stage.slurm)
    assert reached.code == 0, reached.output
    return reached


def fresh_begin(stage: Stage, job: str = "1") -> Reached:
    return run_child(lambda: supervisor.begin_attempt(stage.run), stage.run_path, stage.slurm, job=job)


def exit_trigger(stage: Stage) -> None:
    triggers.touch_trigger(stage.run, "exit")


def killed_before_its_end(stage: Stage) -> None:
    stage.run.attempt(3).end.unlink()


def fatal_before_its_end(stage: Stage) -> None:
    stage.run.attempt(3).end.unlink()
    AttemptOutcome(outcome="fatal", reason="nan", iteration=30, time=0.0).write(stage.run.attempt(3).outcome)


def with_successor(stage: Stage) -> None:
    stage.slurm.add()


@pytest.mark.slow
@EVERYTHING
@pytest.mark.parametrize(
    "before",
    [
        lambda _stage: None,
        exit_trigger,
        pytest.param(killed_before_its_end, marks=pytest.mark.long),
        fatal_before_its_end,
        with_successor,
    ],
)
def test_begin(stage: Stage, before: Callable[[Stage], None], everything: bool) -> None:
    before(stage)
    wanted: list[State] = []

    def check(reached: Reached) -> str:
        done = stage.run.triggers / "exit.done"
        if done.exists() and stop_reason(stage.run) is None:
            return "the exit is acknowledged and the chain goes on"
        if reached.code == supervisor.EXIT_CHAIN_ENDS and stop_reason(stage.run) is None:
            return "no job, no STOP"
        waiting = stage.slurm.pending()
        if len(waiting) > 1:
            return f"{len(waiting)} successors"
        if reached.code not in (
            0,
            supervisor.EXIT_CHAIN_ENDS,
        ):  # the batch script queues the job again, or a successor waits
            if stop_reason(stage.run) is not None:
                return "" if wanted[0].stop else f"STOP: {stop_reason(stage.run)}"
            job = waiting[0] if waiting else "1"
            stage.slurm.set("1", state="FAILED" if waiting else "RUNNING")
            stage.slurm.set(job, state="RUNNING")
            again = fresh_begin(stage, job)
            if again.code not in (0, supervisor.EXIT_CHAIN_ENDS):
                return f"nor does the next job begin: {again.output[-500:]}"
        found = stage.state()
        if found.stop != wanted[0].stop or found.base != wanted[0].base:
            return f"{found} instead of {wanted[0]}"
        if found.stop is None and not found.follows:
            return "nothing follows"
        return ""

    exhaust(
        stage,
        lambda: supervisor.begin_attempt(stage.run),
        check,
        everything=everything,
        after=lambda: wanted.append(stage.state()),
    )


def saved(stage: Stage) -> int:
    trained(stage.run, 4, 30, 40)
    return 0


def failed(_stage: Stage) -> int:
    return 7


def exited(stage: Stage) -> int:
    trained(stage.run, 4, 30, 40)
    AttemptOutcome(outcome="exit", reason="exit trigger by ann", iteration=40, time=0.0).write(
        stage.run.attempt(4).outcome
    )
    return 0


def no_successor(stage: Stage) -> int:
    for job_id in stage.slurm.pending():
        stage.slurm.set(job_id, state="FAILED")
    return saved(stage)


def cancelled_successor(stage: Stage) -> int:
    for job_id in stage.slurm.pending():
        stage.slurm.set(job_id, state="CANCELLED")
    return saved(stage)


@pytest.mark.slow
@EVERYTHING
@pytest.mark.parametrize("before", [saved, failed, exited, no_successor, cancelled_successor])
def test_end(stage: Stage, before: Callable[[Stage], int], everything: bool) -> None:
    assert fresh_begin(stage).code == 0
    exit_code = before(stage)
    wanted: list[State] = []

    def end() -> int:
        return supervisor.end_attempt(stage.run, 4, exit_code)

    def check(reached: Reached) -> str:
        if len(stage.slurm.pending()) > 1:
            return "two successors"
        if reached.code not in (0, supervisor.EXIT_ATTEMPT_FAILED):
            after_kill = successor_takes_over(stage, wanted[0])
            if after_kill:
                return after_kill
            again = run_child(end, stage.run_path, stage.slurm)  # as the batch script does
            if again.code not in (0, supervisor.EXIT_ATTEMPT_FAILED):
                return f"nor can it be ended again: {again.output[-500:]}"
        found = stage.state()
        stops = {wanted[0].stop}
        if before is cancelled_successor:  # known by the comment of the job where no record could be written
            stops.add(f"stopped by {jobs.SOMEBODY}")
        if found.stop not in stops or found.ends != wanted[0].ends:
            return f"{found} instead of {wanted[0]}"
        if found.stop is None and not found.follows:
            return "nothing follows"
        return ""

    exhaust(stage, end, check, everything=everything, after=lambda: wanted.append(stage.state()))


def successor_takes_over(stage: Stage, wanted: State) -> str:
    """What is wrong where the batch script died too, and the waiting job alone goes on. The stage stays as it is."""
    waiting = stage.slurm.pending()
    if not waiting:
        return ""
    kept_queue, kept = stage.slurm.file.read_text(), stage.template.with_name("kept")
    stage.run_path.rename(kept)
    copy_as_ones_own(kept, stage.run_path)
    stage.slurm.set("1", state="FAILED")
    stage.slurm.set(waiting[0], state="RUNNING")
    reached = fresh_begin(stage, waiting[0])
    found = stop_reason(stage.run)
    newest = stage.run.newest_begun()
    begin = newest.read_begin() if newest else None
    complaint = ""
    if found != wanted.stop:
        complaint = f"the successor: STOP {found!r} instead of {wanted.stop!r}: {reached.output[-300:]}"
    elif found is None and (
        reached.code != 0 or begin is None or begin.base_iteration != resume_point(stage.run).iteration
    ):
        complaint = f"the successor: exit code {reached.code}: {reached.output[-300:]}"
    shutil.rmtree(stage.run_path)
    kept.rename(stage.run_path)
    stage.slurm.file.write_text(kept_queue)
    return complaint


def three_looks(stage: Stage) -> int:
    """What the watch does in three of its restarts."""
    beside = Watch(stage.run, 4)
    for _ in range(3):
        beside._next_try = 0.0
        beside.look(os.getpid())
    return 0


@pytest.mark.long
@pytest.mark.slow
@EVERYTHING
def test_watch_ends_ranks_that_hang(stage: Stage, everything: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fresh_begin(stage).code == 0
    (stage.run.attempt(4).heartbeats / "n0.json").write_text("{}")
    monkeypatch.setattr("relayrun.control.chain.watch.stall_limit", lambda *_a, **_k: -1.0)

    def check(reached: Reached) -> str:
        if reached.code or reached.lasting:  # it goes on, or the batch script starts it again
            again = run_child(lambda: three_looks(stage), stage.run_path, stage.slurm)
            if again.code:
                return f"nor does it start again: {again.output[-500:]}"
        if not stage.slurm.jobs()["1"].get("killed"):
            return f"the ranks live: {reached.output[-500:]}"
        return "" if len(stage.slurm.pending()) == 1 else f"{len(stage.slurm.pending())} successors"

    exhaust(stage, lambda: three_looks(stage), check, everything=everything)


@pytest.mark.slow
@EVERYTHING
def test_watch_queues_the_successor_that_is_owed(stage: Stage, everything: bool) -> None:
    assert fresh_begin(stage).code == 0
    no_successor(stage)
    stage.run.attempt(4).retry_successor.touch()

    def check(reached: Reached) -> str:
        if reached.code or reached.lasting:
            again = run_child(lambda: three_looks(stage), stage.run_path, stage.slurm)
            if again.code:
                return f"nor does it start again: {again.output[-500:]}"
        waiting = stage.slurm.pending()
        return "" if len(waiting) == 1 else f"{len(waiting)} successors: {reached.output[-500:]}"

    exhaust(stage, lambda: three_looks(stage), check, everything=everything)


def test_a_successor_that_is_queued_late_leaves_out_the_bad_nodes_too(stage: Stage) -> None:
    assert fresh_begin(stage).code == 0
    no_successor(stage)
    stage.run.attempt(4).retry_successor.touch()
    for attempt in (1, 2):
        excluded_nodes.record_node_failures(stage.run, attempt, {"n1": "node failure"}, now=time.time())

    def look() -> int:
        beside = Watch(stage.run, 4)
        beside._next_try = 0.0
        beside.look(os.getpid())
        return 0

    assert run_child(look, stage.run_path, stage.slurm).code == 0
    (job_id,) = stage.slurm.pending()
    assert stage.slurm.jobs()[job_id]["exclude"] == "n1"


@pytest.mark.slow
@EVERYTHING
@pytest.mark.filterwarnings("ignore")  # what torch says to its own authors when it is imported
@pytest.mark.parametrize("name", ["saved", "exit"])
def test_the_ranks_leave(stage: Stage, name: Any, everything: bool) -> None:
    """The training loop's own way out: the last save, the outcome, the answer to the trigger."""
    from relayrun.train.loop import TrainingLoop
    from relayrun.train.requests import RequestPoller

    assert fresh_begin(stage).code == 0
    if name == "exit":
        exit_trigger(stage)

    def last(position: Any) -> str | None:
        run = stage.run
        commit = CheckpointCommit(
            iteration=40,
            path=str(run.checkpoint(40)),
            consumed_samples=40,
            time=time.time(),
            seconds=1.0,
            files={"data": 5},
        )
        failure = None
        for _ in range(3):
            try:
                staged = publish.prepare_staging(run, 4, 40)
                (staged / "data").write_bytes(b"12345")
                publish.publish_checkpoint(run, 4, commit, staged)
                return None
            except OSError as error:
                failure = str(error)
        return failure

    def leave() -> int:
        run = stage.run
        begin = run.attempt(4).read_begin()
        ranks = SimpleNamespace(rank=0, maximum=lambda values: values)
        control = RequestPoller(run, begin, ranks, SimpleNamespace(received=None))  # type: ignore[arg-type]
        control.poll()
        loop = SimpleNamespace(
            position=SimpleNamespace(iteration=40),
            control=control,
            saver=SimpleNamespace(saved_iteration=30, save_before_leaving=last),
            hooks=SimpleNamespace(at_end=lambda _outcome: None),
            ranks=ranks,
            attempt=run.attempt(4),
        )
        TrainingLoop._leave(loop, name, "words")  # type: ignore[arg-type]
        return 0

    def check(reached: Reached) -> str:
        run = stage.run
        outcome = AttemptOutcome.read(run.attempt(4).outcome)
        asked, answered = (run.triggers / "exit").exists(), (run.triggers / "exit.done").exists()
        if answered and (outcome is None or outcome.outcome != "exit"):
            return "the exit is acknowledged and nothing says so"
        if name == "exit" and not asked and not answered:
            return "the exit is lost"
        now = resume_point(run)
        if now.iteration not in (30, 40):
            return f"durable {now}"
        if outcome is not None and now.iteration != 40:
            return "it left without its checkpoint"
        ended = run_child(lambda: supervisor.end_attempt(run, 4, reached.code), stage.run_path, stage.slurm)
        if ended.code not in (0, supervisor.EXIT_ATTEMPT_FAILED):
            return f"it cannot be ended: {ended.output[-500:]}"
        stop = stop_reason(stage.run)
        if (stop is not None) != (outcome is not None and outcome.outcome == "exit"):
            return f"STOP {stop!r} after {outcome}"
        return ""

    exhaust(stage, leave, check, everything=everything)


@pytest.mark.slow
def test_a_fault_is_met_and_the_next_case_begins_anew(stage: Stage) -> None:
    """The harness itself: it fails the call that it names, and finds a program that is silent."""
    stage.keep()
    calls = run_child(lambda: supervisor.begin_attempt(stage.run), stage.run_path, stage.slurm).calls
    assert len(calls) > 60
    assert any(call.startswith("run sbatch") for call in calls)
    stage.reset()
    killed = run_child(lambda: supervisor.begin_attempt(stage.run), stage.run_path, stage.slurm, at=5, fault=KILL)
    assert killed.code == 137
    assert killed.calls == calls[:6]

    def silent() -> int:
        with contextlib.suppress(OSError):
            stage.run.plan.read_text()
        return supervisor.EXIT_CHAIN_ENDS

    with pytest.raises(AssertionError, match="no job, no STOP"):
        exhaust(
            stage,
            silent,
            lambda reached: "no job, no STOP" if reached.code == supervisor.EXIT_CHAIN_ENDS else "",
            everything=True,
        )
