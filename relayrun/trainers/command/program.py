"""One attempt of a user's own program, followed by what it says through `relayrun.client`, by its log, by its files."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from relayrun.files import read_lines
from relayrun.trainers.base import ENDED_BY_ITSELF, Ending, FoundCheckpoint, ObservedStep
from relayrun.trainers.command.checkpoints import CheckpointRule
from relayrun.trainers.new_lines import NewLines


class CommandProgram:
    """What a program says and leaves on disk.

    Args:
        client: the folder of `relayrun.client`.
        folder: of the run's checkpoints; what the program says of others does not count.
        logs: files with what the ranks print, each with the bytes that it had before the attempt.
        progress: a regular expression with a group `iteration`, and others whose numbers are metrics; None: it says
            its steps through the client.
        rule: its checkpoints; None: it says them through the client.
        save: asks it for a checkpoint besides the client's file; None: nothing else does.
        asked_to_leave: whether somebody has asked it to save and leave.
    """

    def __init__(
        self,
        *,
        client: Path,
        folder: Path,
        logs: Sequence[tuple[str, int]],
        progress: re.Pattern[str] | None,
        rule: CheckpointRule | None,
        save: Callable[[], None] | None,
        asked_to_leave: Callable[[], bool],
    ) -> None:
        self._client = client
        self._folder = folder
        self._said = NewLines(client / "steps.jsonl")
        self._lines = [NewLines(path, offset=offset) for path, offset in logs]
        self._progress = progress
        self._rule = rule
        self._save = save
        self._asked_to_leave = asked_to_leave
        self._newest = 0

    def steps(self) -> list[ObservedStep]:
        """The iterations that it has said since the last call, rising; from its beginning for the first call."""
        found = [_told(line) for line in self._said.read()]
        if self._progress is not None:
            found += [_matched(self._progress, line) for lines in self._lines for line in lines.read()]
        rising = []
        for step in found:
            if step is not None and step.iteration > self._newest:
                rising.append(step)
                self._newest = step.iteration
        return rising

    def checkpoints(self) -> list[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""
        if self._rule is not None:
            return self._rule.whole()
        said: dict[int, str] = {}
        for entry in read_lines(self._client / "checkpoints.jsonl"):
            with contextlib.suppress(ValueError, TypeError, KeyError):
                iteration, path = int(entry["iteration"]), str(entry["path"])
                if Path(path).exists() and os.path.realpath(os.path.dirname(path)) == os.path.realpath(self._folder):
                    said[iteration] = path
        return [FoundCheckpoint(iteration=iteration, path=said[iteration]) for iteration in sorted(said)]

    def saving(self) -> int | None:
        """The newest checkpoint that has a name and is not whole."""
        if self._rule is None:
            return None
        torn = [iteration for iteration, path in self._rule.every() if not self._rule.is_whole(path)]
        return torn[-1] if torn else None

    def ask_to_save(self) -> None:
        """Leave word for the client, and do what else the settings say."""
        self._client.mkdir(exist_ok=True)
        (self._client / "save").touch()
        if self._save is not None:
            self._save()

    def ending(self, exit_code: int | None) -> Ending | None:
        """A program that ends well has done all it had to do, or was asked to leave; no other end is on purpose."""
        if exit_code != 0:
            return None
        if self._asked_to_leave():
            return Ending(outcome="left", words="it was asked to leave")
        return Ending(outcome="done", words=ENDED_BY_ITSELF)


def _told(line: str) -> ObservedStep | None:
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError):
        entry: dict[str, Any] = json.loads(line)
        metrics = {str(name): float(value) for name, value in entry["metrics"].items()}
        seconds, samples = metrics.pop("step_seconds", None), metrics.pop("consumed_samples", None)
        return ObservedStep(
            iteration=int(entry["iteration"]),
            seconds=seconds,
            consumed_samples=None if samples is None else int(samples),
            metrics=metrics,
        )
    return None


def _matched(progress: re.Pattern[str], line: str) -> ObservedStep | None:
    found = progress.search(line)
    if found is None:
        return None
    groups = found.groupdict()
    metrics: dict[str, float] = {}
    for name, text in groups.items():
        with contextlib.suppress(ValueError, TypeError):
            if math.isfinite(value := float(text)):
                metrics[name] = value
    iteration = metrics.pop("iteration", None)
    if iteration is None:
        return None
    seconds, samples = metrics.pop("step_seconds", None), metrics.pop("consumed_samples", None)
    return ObservedStep(
        iteration=int(iteration),
        seconds=seconds,
        consumed_samples=None if samples is None else int(samples),
        metrics=metrics,
    )
