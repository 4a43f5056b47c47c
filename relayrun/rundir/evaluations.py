"""Evaluations of a run's checkpoints: which are due, how far each is, and the merged view. Standard library only.

evaluations/policy.json          which checkpoints, by the newest submit
evaluations/iter_0000100-0003/   of iteration 100 as attempt 3 committed it: made by who submits the job (mkdir)
    submitted.json                 its job, by the supervisor
    claim.json                     by the job, which ends if another one has written it (O_EXCL)
    exported                       the checkpoint is not needed any more
    model/                         the exported folder, while it is needed, or for good
    result.json                    by the job; by the supervisor where the job went without a word
evaluations.jsonl                a line per result
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from relayrun.files import fsync_directory, write_atomic
from relayrun.rundir import lineage
from relayrun.rundir.records import Commit, Record
from relayrun.rundir.run import Run


@dataclass(frozen=True, kw_only=True)
class Policy(Record):
    """`policy.json`: which checkpoints are evaluated, as the newest submit says."""

    interval: int
    """Iterations."""
    total_steps: int
    """The run's last iteration, which is always evaluated."""
    hold: int
    """Checkpoints at most that must stay until they are exported."""
    time_limit: int
    """Seconds, of an evaluation job."""


@dataclass(frozen=True, kw_only=True)
class Submitted(Record):
    """`submitted.json`: the job that was submitted for one checkpoint."""

    job_id: str
    time: float
    """When it was submitted, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Claim(Record):
    """`claim.json`: who evaluates the checkpoint; any other job that finds it ends."""

    job_id: str | None
    """None for who evaluates by hand."""
    node: str
    time: float
    """When the evaluation began, in seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class Result(Record):
    """`result.json`, and a line of evaluations.jsonl. `time` is seconds since 1970."""

    iteration: int
    attempt: int
    status: Literal["done", "failed"]
    time: float
    job_id: str | None = None
    error: str | None = None
    seconds: float | None = None
    """From the claim to the result."""
    results: dict[str, dict[str, float]] = field(default_factory=dict)
    """By task, or by validation set: metric and value."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What they depend on: program and version, few-shot examples, limit."""
    model: str | None = None
    """The exported folder, where it is kept."""


@dataclass(frozen=True)
class EvaluationDir:
    """One checkpoint's evaluation."""

    path: Path

    @property
    def iteration(self) -> int:
        return int(self.path.name.removeprefix("iter_").partition("-")[0])

    @property
    def attempt(self) -> int:
        return int(self.path.name.rpartition("-")[2])

    @property
    def submitted(self) -> Path:
        return self.path / "submitted.json"

    @property
    def claim(self) -> Path:
        return self.path / "claim.json"

    @property
    def exported(self) -> Path:
        return self.path / "exported"

    @property
    def model(self) -> Path:
        return self.path / "model"

    @property
    def result(self) -> Path:
        return self.path / "result.json"


def directory(run: Run, iteration: int, attempt: int) -> EvaluationDir:
    return EvaluationDir(run.evaluations / f"iter_{iteration:07}-{attempt:04}")


def due(run: Run) -> list[tuple[int, Commit]]:
    """(attempt, commit) of every checkpoint that counts and is to be evaluated, rising; none without a policy."""
    policy = Policy.read(run.evaluation_policy)
    if policy is None:
        return []
    found = [
        (counted.attempt, counted.commit)
        for counted in lineage.Lineage(run).backwards()
        if counted.published
        and (counted.commit.iteration % policy.interval == 0 or counted.commit.iteration == policy.total_steps)
    ]
    return found[::-1]


def held(run: Run) -> set[int]:
    """Iterations whose checkpoints must stay until they are exported."""
    policy = Policy.read(run.evaluation_policy)
    if policy is None or not policy.hold:
        return set()
    folders = [directory(run, commit.iteration, attempt) for attempt, commit in due(run)]
    waiting = [folder.iteration for folder in folders if not (folder.exported.exists() or folder.result.exists())]
    return set(waiting[-policy.hold :])


def claim(folder: EvaluationDir, job_id: str | None, node: str) -> bool:
    """Make this process the one that evaluates; false if there is one already."""
    folder.path.mkdir(parents=True, exist_ok=True)
    try:
        fd = os.open(folder.claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    except FileExistsError:
        return False
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(asdict(Claim(job_id=job_id, node=node, time=time.time())), file)
        file.flush()
        os.fsync(file.fileno())
    fsync_directory(folder.path)
    return True


def every(run: Run) -> list[EvaluationDir]:
    """All evaluations on record, by iteration."""
    try:
        names = sorted(name for name in os.listdir(run.evaluations) if name.startswith("iter_"))
    except FileNotFoundError:
        return []
    return [EvaluationDir(run.evaluations / name) for name in names]


def results(run: Run) -> list[Result]:
    """All results, by iteration."""
    found = [Result.read(folder.result) for folder in every(run)]
    return sorted((result for result in found if result is not None), key=lambda r: (r.iteration, r.attempt))


def finish(run: Run, result: Result) -> None:
    """Record a result and bring the view up to date."""
    result.write(directory(run, result.iteration, result.attempt).result)
    write_view(run)


def write_view(run: Run) -> None:
    """Rewrite evaluations.jsonl. Without a lock: who has put an older view over a newer one sees it, and mends it."""
    while True:
        text = _text(run)
        write_atomic(run.evaluations_view, text)
        if _text(run) == text:
            return


def _text(run: Run) -> str:
    return "".join(json.dumps(asdict(result), ensure_ascii=False) + "\n" for result in results(run))
