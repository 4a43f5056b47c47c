"""One evaluation job a checkpoint, whatever is killed between any two of the supervisor's acts."""

from __future__ import annotations

import fcntl
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from relayrun.control.chain import evaluation_jobs as chain
from relayrun.control.notify import events
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.evaluations import EvaluationClaim, EvaluationPolicy, EvaluationResult
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd, CheckpointCommit
from relayrun.control.rundir.run import Run, write_stop
from relayrun.control.scheduler.base import Job
from relayrun.errors import SchedulerError
from relayrun.watch.cron_check import CronCheck
from relayrun.watch.status import queue as asked
from relayrun.watch.status import run_status, run_status_text
from tests.history import began

from .conftest import MakeRun


class Queue:
    """A scheduler that takes jobs, and may fail or kill its caller at chosen points."""

    def __init__(self) -> None:
        self.submitted: list[tuple[str, str]] = []
        self.states: dict[str, str] = {}
        self.killed_after_submit = False
        self.down = False

    def submit_auxiliary(self, plan: Plan, script: Path, *, name: str, arguments: Sequence[str], limit: int) -> str:
        if self.down:
            raise SchedulerError("sbatch: unable to contact slurm controller")
        job_id = str(100 + len(self.submitted))
        self.submitted.append((name, " ".join(arguments)))
        self.states[job_id] = "PENDING"
        if self.killed_after_submit:
            raise KeyboardInterrupt
        return job_id

    def find_job(self, name: str) -> str | None:
        alive = [str(100 + number) for number, (known, _) in enumerate(self.submitted) if known == name]
        return next((job_id for job_id in alive if self.states[job_id] in ("PENDING", "RUNNING")), None)

    def query(self, job_id: str) -> Job | None:
        return Job(id=job_id, name="", state=self.states[job_id]) if job_id in self.states else None


def attempt(run: Run, number: int, *, base: int = 0, iterations: Sequence[int] = ()) -> None:
    folder = run.attempt(number)
    began(run, number, base=base, job_id=str(number), start_time=float(number))
    for iteration in iterations:
        path = str(run.checkpoint(iteration))
        folder.append_commit(
            CheckpointCommit(
                iteration=iteration, path=path, consumed_samples=iteration, time=100.0 * number + iteration, seconds=1.0
            ),
        )


@pytest.fixture
def prepared(make_run: MakeRun) -> tuple[Run, Plan]:
    run, plan = make_run()
    run.evaluations.mkdir()
    EvaluationPolicy(interval=4, total_steps=11, hold=3, time_limit=60).write(run.evaluation_policy)
    return run, plan


def attend(prepared: tuple[Run, Plan], queue: Queue) -> list[str]:
    chain.submit_due_evaluations(*prepared, queue)  # type: ignore[arg-type]
    return [arguments for _, arguments in queue.submitted]


def test_multiples_of_the_interval_and_the_last_iteration_once_over_all_attempts(prepared: tuple[Run, Plan]) -> None:
    run, plan = prepared
    queue = Queue()
    attempt(run, 1, iterations=[2, 4, 6])
    first = ["--iteration=4 --attempt=1"]
    assert attend(prepared, queue) == first
    assert attend(prepared, queue) == first
    attempt(run, 2, base=6, iterations=[8, 10])
    attempt(run, 3, base=10, iterations=[11])
    assert attend(prepared, queue) == [*first, "--iteration=8 --attempt=2", "--iteration=11 --attempt=3"]
    names = [name for name, _ in queue.submitted]
    assert len({*names, plan.job_name}) == 4, "jobs of their own, not of the chain's singleton"


def test_who_ends_a_chain_attends_also_behind_one_that_hangs(
    prepared: tuple[Run, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chain, "LOCK_PATIENCE", 0.2)
    attempt(prepared[0], 1, iterations=[4])
    with open(prepared[0].evaluations / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert attend(prepared, Queue()) == ["--iteration=4 --attempt=1"]


def test_another_checkpoint_of_the_same_iteration_is_evaluated_too(prepared: tuple[Run, Plan]) -> None:
    run, _ = prepared
    queue = Queue()
    attempt(run, 1, iterations=[2, 4])
    attend(prepared, queue)
    attempt(run, 2, base=2, iterations=[4])  # somebody went back to iteration 2
    assert attend(prepared, queue) == ["--iteration=4 --attempt=1", "--iteration=4 --attempt=2"]


def test_a_supervisor_killed_behind_its_submit_does_not_make_a_second_job(prepared: tuple[Run, Plan]) -> None:
    run, _ = prepared
    attempt(run, 1, iterations=[4])
    queue = Queue()
    queue.killed_after_submit = True
    with pytest.raises(KeyboardInterrupt):
        attend(prepared, queue)
    queue.killed_after_submit = False
    assert attend(prepared, queue) == ["--iteration=4 --attempt=1"]
    assert json.loads(evaluations.evaluation_dir(run, 4, 1).submitted.read_text())["job_id"] == "100"


def test_a_supervisor_killed_before_its_submit_is_made_up_for(prepared: tuple[Run, Plan]) -> None:
    run, _ = prepared
    attempt(run, 1, iterations=[4])
    evaluations.evaluation_dir(run, 4, 1).path.mkdir()
    assert attend(prepared, Queue()) == ["--iteration=4 --attempt=1"]


def test_a_scheduler_that_is_away_is_tried_again_later(
    prepared: tuple[Run, Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    run, _ = prepared
    attempt(run, 1, iterations=[4])
    queue = Queue()
    queue.down = True
    assert attend(prepared, queue) == []
    assert "evaluations are left for later: sbatch: unable to contact" in capsys.readouterr().err
    queue.down = False
    assert attend(prepared, queue) == ["--iteration=4 --attempt=1"]


def test_a_look_behind_the_end_of_a_chain_queues_what_was_refused(
    prepared: tuple[Run, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, queue = prepared[0], Queue()
    attempt(run, 1, iterations=[4])
    queue.down = True
    attend(prepared, queue)
    write_stop(run, ChainEnd("done", "iteration 11"))
    queue.down = False
    monkeypatch.setattr(chain, "scheduler_for_plan", lambda *_, **__: queue)
    CronCheck(run.path.parent, now=time.time()).run()
    assert [arguments for _, arguments in queue.submitted] == ["--iteration=4 --attempt=1"]
    CronCheck(run.path.parent, now=time.time()).run()
    assert len(queue.submitted) == 1


def test_a_job_that_the_scheduler_refuses_is_told_by_status_until_it_is_queued(prepared: tuple[Run, Plan]) -> None:
    run, _ = prepared
    attempt(run, 1, iterations=[4, 8])

    def told() -> str:
        status = run_status.read_run_status(run, asked.QueueStatus(), now=0.0)
        return dict(run_status_text._lines(status, 0.0))["evaluations"]

    assert told() == "2 wanted and not queued (iteration 4, 8)"
    queue = Queue()
    queue.down = True
    attend(prepared, queue)
    assert told() == "2 wanted and not queued (iteration 4, 8): sbatch: unable to contact slurm controller"
    plan, policy = Plan.load(run), SimpleNamespace(since=0.0)
    told_to_people = [notice.reason for notice in events._evaluation_notices(run, plan, policy, 9.0)]  # type: ignore[arg-type]
    words = "evaluation of iteration 4 is wanted and not queued: sbatch: unable to contact slurm controller"
    assert told_to_people == [words]
    queue.down = False
    attend(prepared, queue)
    assert "no result yet: iteration 4 (job 100" in told()
    assert "not queued" not in told()


@pytest.mark.parametrize(
    ("claimed", "state", "words"),
    [
        ("100", "NODE_FAIL", "job 100 ended (node_fail) without a result"),
        ("", "CANCELLED", "job 100 ended (cancelled) before it began"),
        ("41", "CANCELLED", "job 100 ended (cancelled) before it began"),  # an evaluation by hand was killed
        ("100", None, "job 100 is not known to the scheduler any more without a result"),
    ],
)
def test_a_job_that_went_without_a_word_is_a_failed_evaluation(
    prepared: tuple[Run, Plan], claimed: str, state: str | None, words: str
) -> None:
    run, _ = prepared
    attempt(run, 1, iterations=[4])
    queue = Queue()
    attend(prepared, queue)
    if claimed:
        claim = EvaluationClaim(job_id=claimed, node="n1", time=0.0)
        claim.write(evaluations.evaluation_dir(run, 4, 1).claim)
    if state is None:
        del queue.states["100"]
    else:
        queue.states["100"] = state
    assert len(attend(prepared, queue)) == 1
    assert len(attend(prepared, queue)) == 1, "it is not tried again"
    (line,) = [json.loads(text) for text in run.evaluations_view.read_text().splitlines()]
    assert (line["iteration"], line["status"], line["error"]) == (4, "failed", words)


def test_an_older_view_that_is_written_last_is_mended(
    prepared: tuple[Run, Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, _ = prepared
    first = EvaluationResult(iteration=4, attempt=1, status="done", time=1.0, results={"task": {"acc": 0.5}})
    for result in (first, replace(first, iteration=8)):
        evaluations.evaluation_dir(run, result.iteration, 1).path.mkdir()
    evaluations.record_result(run, first)
    write = evaluations.write_atomic
    others: list[Mapping[str, object]] = [{}]

    def overtaken(path: Path, text: str) -> None:
        if others:  # between this one's reading and its writing another job finishes
            others.pop()
            replace(first, iteration=8).write(evaluations.evaluation_dir(run, 8, 1).result)
        write(path, text)

    monkeypatch.setattr(evaluations, "write_atomic", overtaken)
    evaluations.write_evaluations_view(run)
    assert [json.loads(line)["iteration"] for line in run.evaluations_view.read_text().splitlines()] == [4, 8]


def test_an_evaluation_whose_folder_was_removed_is_tried_again(prepared: tuple[Run, Plan]) -> None:
    run, _ = prepared
    queue = Queue()
    attempt(run, 1, iterations=[4, 8])
    attend(prepared, queue)
    for iteration in (4, 8):
        evaluations.record_result(run, EvaluationResult(iteration=iteration, attempt=1, status="failed", time=0.0))
    attend(prepared, queue)
    shutil.rmtree(evaluations.evaluation_dir(run, 4, 1).path)
    del queue.states["100"]
    assert attend(prepared, queue)[2:] == ["--iteration=4 --attempt=1"]
