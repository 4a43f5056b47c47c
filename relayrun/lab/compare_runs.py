"""Comparison of two runs of one config: losses bit by bit, weights byte by byte, numbers of samples."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from relayrun.control.rundir.checkpoint_records import newest_commit_at
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.files import read_lines
from relayrun.tokens.mixture.audit import audit_run, dataset_ledgers
from relayrun.train.checkpoint.checksums import Checksums, verify_checkpoint


def loss_differences(run: Run, reference: Run, last: int) -> list[str]:
    """Return a line for each difference in loss, gradient norm and evaluations of iterations 1 to `last`.

    `last`: the run's last iteration; the reference may have more.
    """
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


def sample_differences(run: Run, reference: Run, last: int) -> list[str]:
    """Return the faults in the samples of iterations 1 to `last`: missing, repeated, or of other data."""
    rows, others = (
        list(map(vars, dataset_ledgers(replace(audit_run(one), consumed_samples=_samples_consumed(one, last)))))
        for one in (run, reference)
    )
    return sample_gaps(run, last) + ([] if rows == others else [f"the ledger is {rows}, undisturbed {others}"])


def _samples_consumed(run: Run, last: int) -> int:
    """Samples after iteration `last`. Raises InputError if the run did not reach it."""
    for line in read_lines(run.metrics_view):
        if "loss" in line and line["iteration"] == last:
            return int(line["consumed_samples"])
    raise InputError(f"iteration {last} was not done", where=run.metrics_view)


def sample_gaps(run: Run, last: int) -> list[str]:
    """Return the first place where the samples of iterations 1 to `last` are not consecutive."""
    consumed = number = 0
    for line in read_lines(run.metrics_view):
        if "loss" not in line:
            continue
        number += 1
        consumed += line["global_batch_size"]
        if (line["iteration"], line["consumed_samples"]) != (number, consumed):
            return [
                f"iteration {line['iteration']} ends with {line['consumed_samples']} samples, where iteration {number} "
                f"was to end with {consumed}"
            ]
    return [] if number == last else [f"{number} iterations, not {last}"]


def compare_weights(checkpoint: Path, reference: Path) -> tuple[int, list[str]]:
    """Compare weights and optimizer state of two checkpoints; return the number of tensors and the differences.

    Each file is read back and compared with the hashes (XXH3-128) taken from the values before writing; then the hashes
    of both are compared.
    """
    faults = []
    blocks = []
    for folder in (checkpoint, reference):
        commit = newest_commit_at(folder)
        if commit is None or commit.checksum is None:
            raise InputError("this checkpoint was saved without checksums", where=folder)
        faults += [f"{folder}: {fault}" for fault in verify_checkpoint(folder, commit.checksum)[1]]
        found: dict[tuple[str, tuple[int, ...]], Any] = {}
        for block in Checksums(folder, commit.checksum).blocks():
            if block.shape is not None:
                found[block.key, tuple(block.offset or ())] = (block.shape, block.dtype, block.values, block.bytes)
        blocks.append(found)
    own, other = blocks
    faults += [
        f"{key} at {list(offset)} differs"
        for key, offset in sorted(own.keys() | other.keys())
        if own.get((key, offset)) != other.get((key, offset))
    ]
    return len(own), faults


def _exact_metrics(run: Run) -> tuple[dict[str, Any], list[str]]:
    """Exact values by iteration (`12`, or `12 evaluation`), and the iterations that occur twice."""
    found: dict[str, Any] = {}
    twice = []
    for line in read_lines(run.metrics_view):
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
