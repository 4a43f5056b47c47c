"""Evaluations of a run's checkpoints: which are due, the state of each, and the merged view. Standard library only.

evaluations/policy.json          which checkpoints are due, by the newest submit
evaluations/iter_0000100-0003/   of iteration 100 as attempt 3 committed it: made by the submitter of the job (mkdir)
    not_queued.json                why it has no job yet, by the supervisor
    submitted.json                 its job, by the supervisor
    .result.json.lock              names the process that evaluates the checkpoint, any other one is refused meanwhile
    claim.json                     the process that began last
    exported                       the checkpoint is not needed any more
    model/                         the exported folder, as long as it is needed or kept
    scores.json                    the output of the user's command (`evaluation.command`)
    result.json                    by the job; by the supervisor if the job ended without a result
evaluations.jsonl                one line per result
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from relayrun.control.rundir import checkpoint_records
from relayrun.control.rundir.attempt import PathIn
from relayrun.control.rundir.records import CheckpointCommit, Record
from relayrun.control.rundir.run import Run
from relayrun.files import names_in, write_atomic

EvaluationScores = dict[str, dict[str, float]]
"""Metrics and values by task, or by validation set."""


def numeric_scores(tasks: Mapping[str, Mapping[str, Any]]) -> EvaluationScores:
    """Return the numbers among the metrics of tasks, without the suffix `,none` of lm_eval's names."""
    return {
        task: {
            name.removesuffix(",none"): float(value)
            for name, value in metrics.items()
            if isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        for task, metrics in tasks.items()
    }


@dataclass(frozen=True, kw_only=True)
class EvaluationPolicy(Record):
    """`policy.json`, by the newest submit. `interval` is in iterations, `time_limit` in seconds."""

    interval: int
    total_steps: int
    """The run's last iteration, which is always evaluated; 0 if only its program knows it."""
    hold: int
    """Maximum number of checkpoints that must stay until they are exported."""
    time_limit: int


@dataclass(frozen=True, kw_only=True)
class SubmittedEvaluation(Record):
    """`submitted.json`: the job of one checkpoint. Here and below `time` is seconds since 1970."""

    job_id: str
    time: float


@dataclass(frozen=True, kw_only=True)
class UnqueuedEvaluation(Record):
    """`not_queued.json`: the scheduler refused the job of one checkpoint; it is tried again."""

    error: str
    time: float


@dataclass(frozen=True, kw_only=True)
class EvaluationClaim(Record):
    """`claim.json`: the process that began to evaluate the checkpoint last; it may have died."""

    job_id: str | None
    """The allocation of an evaluation by hand, or None."""
    node: str
    time: float


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Record):
    """`result.json`, and a line of evaluations.jsonl."""

    iteration: int
    attempt: int
    status: Literal["done", "failed"]
    time: float
    job_id: str | None = None
    error: str | None = None
    seconds: float | None = None
    """From the claim to the result."""
    results: EvaluationScores = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """Program and version, few-shot examples, limit."""
    model: str | None = None
    """The exported folder, if it is kept."""

    def scores(self) -> str:
        """Return the scores of all tasks in one line, without their standard errors."""
        named = {
            task: [f"{name} {value:.4g}" for name, value in metrics.items() if "stderr" not in name]
            for task, metrics in self.results.items()
        }
        return ", ".join(f"{task} {' '.join(scores)}" for task, scores in named.items())


@dataclass(frozen=True)
class EvaluationDir:
    """The evaluation of one checkpoint."""

    path: Path

    submitted = PathIn("submitted.json")
    not_queued = PathIn("not_queued.json")
    claim = PathIn("claim.json")
    exported = PathIn("exported")
    model = PathIn("model")
    scores = PathIn("scores.json")
    result = PathIn("result.json")

    @property
    def iteration(self) -> int:
        return int(self.path.name.removeprefix("iter_").partition("-")[0])

    @property
    def attempt(self) -> int:
        return int(self.path.name.rpartition("-")[2])


def evaluation_dir(run: Run, iteration: int, attempt: int) -> EvaluationDir:
    return EvaluationDir(run.evaluations / f"iter_{iteration:07}-{attempt:04}")


def due_checkpoints(run: Run) -> list[tuple[int, CheckpointCommit]]:
    """Return (attempt, commit) of every due checkpoint that counts, by rising iteration; empty without a policy."""
    policy = EvaluationPolicy.read(run.evaluation_policy)
    if policy is None:
        return []
    found = []
    for counted in checkpoint_records.Lineage(run).backwards():
        iteration = counted.commit.iteration
        due = iteration % policy.interval == 0 or iteration == policy.total_steps
        if counted.published and due:
            found.append((counted.attempt, counted.commit))
    return found[::-1]


def unqueued_iterations(run: Run) -> dict[int, str]:
    """Return the due iterations without job or result, with the scheduler's refusal; empty text: not refused so far."""
    folders = [evaluation_dir(run, commit.iteration, attempt) for attempt, commit in due_checkpoints(run)]
    waiting = [each for each in folders if not (each.result.exists() or each.submitted.exists())]
    return {
        each.iteration: known.error if (known := UnqueuedEvaluation.read(each.not_queued)) else "" for each in waiting
    }


def iterations_held_by_evaluations(run: Run) -> set[int]:
    """Return iterations whose checkpoints must stay until they are exported."""
    policy = EvaluationPolicy.read(run.evaluation_policy)
    if policy is None or not policy.hold:
        return set()
    folders = [evaluation_dir(run, commit.iteration, attempt) for attempt, commit in due_checkpoints(run)]
    waiting = [folder.iteration for folder in folders if not (folder.exported.exists() or folder.result.exists())]
    return set(waiting[-policy.hold :])


def all_evaluations(run: Run) -> list[EvaluationDir]:
    """Return all evaluations on record, by iteration."""
    return [EvaluationDir(run.evaluations / name) for name in names_in(run.evaluations) if name.startswith("iter_")]


def evaluation_results(run: Run) -> list[EvaluationResult]:
    """Return all results, by iteration."""
    found = [EvaluationResult.read(folder.result) for folder in all_evaluations(run)]
    return sorted((result for result in found if result is not None), key=lambda r: (r.iteration, r.attempt))


def record_result(run: Run, result: EvaluationResult) -> None:
    """Record a result and update the view."""
    result.write(evaluation_dir(run, result.iteration, result.attempt).result)
    write_evaluations_view(run)


def write_evaluations_view(run: Run) -> None:
    """Rewrite evaluations.jsonl without a lock: a writer that overwrote a newer view sees and mends it."""
    while True:
        text = _view_text(run)
        write_atomic(run.evaluations_view, text)
        if _view_text(run) == text:
            return


def _view_text(run: Run) -> str:
    return "".join(json.dumps(asdict(result), ensure_ascii=False) + "\n" for result in evaluation_results(run))
