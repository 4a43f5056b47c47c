"""What one attempt of a small training run computed, to the last bit, and what differs from an undisturbed one.

The hook `programs.hooks.Digest` notes it; parts `resume` and `recovery` hold it against a run that nobody cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from relayrun.control.rundir.run import Run
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import CheckFailed

COMPARED_VALUES = (("loss", "loss"), ("grad_norm", "gradient norm"))
"""What is compared of a line of metrics.jsonl, and its name for people."""


@dataclass(frozen=True, kw_only=True)
class AttemptValues:
    """What one attempt computed. A digest has an entry for each rank."""

    lines: dict[int, dict[str, Any]]
    """The lines of metrics.jsonl by iteration."""
    states: dict[int, Any]
    """Digests of the optimizer's state by iteration."""
    loaded: dict[int, Any]
    """Those that it began with, and each round inside it."""
    weights: dict[int, Any]
    """The digest of the weights that it ended with."""
    twice: list[str] = field(default_factory=list)
    """What came out otherwise when a later round computed it again, in words."""

    @classmethod
    def of(cls, run: Run, attempt: int) -> AttemptValues:
        """Read what an attempt left."""
        notes = [entry for entry in runs.read_notes(run, "digest") if entry["attempt"] == attempt]
        twice: list[str] = []

        def digests(kind: str, words: str) -> dict[int, Any]:
            found = ((entry["iteration"], entry["ranks"]) for entry in notes if entry["kind"] == kind)
            return _first_values(found, words, twice)

        lines = runs.iteration_lines(run, attempt)
        for name, words in COMPARED_VALUES:
            _first_values(((line["iteration"], line[name]) for line in lines), words, twice)
        return cls(
            lines={line["iteration"]: line for line in lines},
            states=digests("state", "optimizer state"),
            loaded=digests("loaded", "optimizer state as loaded"),
            weights=digests("weights", "weights"),
            twice=twice,
        )


def _first_values(values: Iterable[tuple[int, Any]], words: str, twice: list[str]) -> dict[int, Any]:
    """The first value of each iteration; a later one that is another goes to `twice`, in words."""
    found: dict[int, Any] = {}
    for iteration, value in values:
        if found.setdefault(iteration, value) != value:
            twice.append(f"{words} of iteration {iteration}, when it was computed again")
    return found


def undisturbed_values(run: Run) -> AttemptValues:
    """Read what a run computed that nobody cut. Raises CheckFailed where it was cut, or left no digests."""
    if (attempts := len(run.attempt_numbers())) != 1:
        raise CheckFailed(f"{run.path.name} has {attempts} attempts, not 1")
    found = AttemptValues.of(run, 1)
    if not found.weights or len(found.states) != len(found.lines):
        raise CheckFailed(f"{run.path.name} left no digests of its states")
    return found


def first_difference(own: AttemptValues, expected: AttemptValues) -> str | None:
    """Return the first thing that is not as in the undisturbed run, in words; None: all is."""
    if not own.lines:
        return "no iteration was trained"
    for iteration, digest in own.loaded.items():
        if digest != expected.states[iteration]:
            return f"optimizer state as loaded, of iteration {iteration}"
    for iteration, line in own.lines.items():
        other = expected.lines[iteration]
        for name, words in COMPARED_VALUES:
            if line[name] != other[name] or math.isnan(line[name]):  # no number, no training
                return f"{words} of iteration {iteration}: {line[name]!r}, not {other[name]!r}"
        if own.states.get(iteration) != expected.states[iteration]:
            return f"optimizer state after iteration {iteration}, whose loss is equal"
    if own.twice:
        return own.twice[0]
    if any(expected.weights.get(iteration, digest) != digest for iteration, digest in own.weights.items()):
        return "weights in the end, where the optimizer's state is equal"
    return None
