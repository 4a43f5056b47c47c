"""Comparison of two runs of one config, bit by bit: losses, checkpoints, and the values of single attempts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.train.checkpoint.checksums import PIECE_SUFFIXES, Checksums, committed_checksum, verify_checkpoint

COMPARED_VALUES = (("loss", "loss"), ("grad_norm", "gradient norm"))
"""Compared fields of metrics.jsonl, with names for people."""


def loss_differences(run: Run, reference: Run, last: int) -> list[str]:
    """Return a line for each difference in loss, gradient norm and evaluations of iterations 1 to `last`. `last`: the
    run's last iteration; the reference may have more."""
    (own, twice), (other, twice_there) = _exact_metrics(run), _exact_metrics(reference)
    other = {name: text for name, text in other.items() if int(name.split()[0]) <= last}
    faults = [f"iteration {place} stands twice" for place in [*twice, *twice_there]]
    wanted = [str(number) for number in range(1, last + 1)]
    places = sorted({*wanted, *own, *other}, key=lambda name: (int(name.split()[0]), name))
    return faults + [
        f"iteration {place}: {own.get(place)}, undisturbed {other.get(place)}"
        for place in places
        if place not in own or own[place] != other.get(place)
    ]


def _exact_metrics(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Exact values by iteration (`12`, or `12 evaluation`), and the iterations that occur twice."""
    found: dict[str, Any] = {}
    twice = []
    for line in read_json_lines(run.metrics_view):
        if "loss" in line:
            place, value = str(line["iteration"]), [line["loss"].hex(), line["grad_norm"].hex()]
        elif "validation" in line:
            place = f"{line['iteration']} evaluation"
            value = [f"{name} {loss.hex()}" for name, loss in line["validation"].items()]
        else:
            continue
        if place in found:
            twice.append(place)
        found[place] = value
    return found, twice


def checkpoint_differences(checkpoint: Path, reference: Path, *, tensors_only: bool = False) -> tuple[int, list[str]]:
    """Return the number of tensors in a checkpoint, and its differences from another one.

    Each file is read back and compared with the hashes (XXH3-128) taken from the values before writing; if all bytes
    are right, the hashes of both are compared. `tensors_only`: ignore objects and files beside the tensors.
    """
    faults: list[str] = []
    own, other = (_checkpoint_hashes(folder, faults) for folder in (checkpoint, reference))
    tensors = sum(shape is not None for shape, *_ in own.values())
    if not faults:
        names = own.keys() | other.keys()
        if tensors_only:
            names = {name for name in names if (own.get(name) or other[name])[0] is not None}
        faults = [
            f"{key} at {list(offset)} differs"
            for key, offset in sorted(names)
            if own.get((key, offset)) != other.get((key, offset))
        ]
    return tensors, faults


def _checkpoint_hashes(folder: Path, faults: list[str]) -> dict[tuple[str, tuple[int, ...]], tuple[Any, ...]]:
    """Shape, type and hash of all values: of tensors by name and offset, of other files by name."""
    root = committed_checksum(folder)
    found = verify_checkpoint(folder, root)[1]
    faults += [f"{folder}: {fault}" for fault in found]
    if found:
        return {}
    sums = Checksums(folder, root)
    hashes: dict[tuple[str, tuple[int, ...]], tuple[Any, ...]] = {
        (block.key, tuple(block.offset or ())): (block.shape, block.dtype, block.values or block.frame, block.bytes)
        for block in sums.blocks()
    }
    files = {name: known.xxh3_128 for name, known in sums.files.items() if not name.endswith(PIECE_SUFFIXES)}
    return hashes | {(name, ()): (None, known) for name, known in files.items() if known is not None}


@dataclass(frozen=True, kw_only=True)
class AttemptValues:
    """Values that one attempt computed. A digest has an entry for each rank."""

    lines: dict[int, dict[str, Any]]
    """Lines of metrics.jsonl by iteration."""
    states: dict[int, Any]
    """Digests of the optimizer state by iteration."""
    loaded: dict[int, Any]
    """Digests of the loaded optimizer states, of the attempt and of restarts in it, by iteration."""
    weights: dict[int, Any]
    """Digest of the final weights."""
    twice: list[str] = field(default_factory=list)
    """Values that differed when a restart computed them again, in words."""

    @classmethod
    def of(cls, lines: Sequence[dict[str, Any]], digests: Sequence[Mapping[str, Any]]) -> AttemptValues:
        """Collect the iterations of an attempt's metrics.jsonl, and the digests that its hook recorded."""
        twice: list[str] = []

        def by_iteration(kind: str, words: str) -> dict[int, Any]:
            found = ((entry["iteration"], entry["ranks"]) for entry in digests if entry["kind"] == kind)
            return _first_values(found, words, twice)

        for name, words in COMPARED_VALUES:
            _first_values(((line["iteration"], line[name]) for line in lines), words, twice)
        return cls(
            lines={line["iteration"]: line for line in lines},
            states=by_iteration("state", "optimizer state"),
            loaded=by_iteration("loaded", "optimizer state as loaded"),
            weights=by_iteration("weights", "weights"),
            twice=twice,
        )


def _first_values(values: Iterable[tuple[int, Any]], words: str, twice: list[str]) -> dict[int, Any]:
    """The first value of each iteration; different later values are added to `twice`."""
    found: dict[int, Any] = {}
    for iteration, value in values:
        if found.setdefault(iteration, value) != value:
            twice.append(f"{words} of iteration {iteration}, when it was computed again")
    return found


def first_difference(own: AttemptValues, expected: AttemptValues) -> str | None:
    """Return the first difference from the undisturbed run, in words, or None."""
    if not own.lines:
        return "no iteration was trained"
    for iteration, digest in own.loaded.items():
        if digest != expected.states[iteration]:
            return f"optimizer state as loaded, of iteration {iteration}"
    for iteration, line in own.lines.items():
        other = expected.lines[iteration]
        for name, words in COMPARED_VALUES:
            if line[name] != other[name] or math.isnan(line[name]):  # NaN never counts as equal
                return f"{words} of iteration {iteration}: {line[name]!r}, not {other[name]!r}"
        if own.states.get(iteration) != expected.states[iteration]:
            return f"optimizer state after iteration {iteration}, whose loss is equal"
    if own.twice:
        return own.twice[0]
    if any(expected.weights.get(iteration, digest) != digest for iteration, digest in own.weights.items()):
        return "weights in the end, where the optimizer's state is equal"
    return None
