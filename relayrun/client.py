"""What a training program may say to the chain around it, and hear from it. This file may be copied: it needs nothing.

    from relayrun.client import checkpoint_done, should_leave, should_save, step_done

    for iteration in range(start + 1, last + 1):
        loss = train()
        step_done(iteration, loss=loss)
        leave = should_leave()                  # once for each iteration: the answer changes in between
        if iteration % 500 == 0 or should_save() or leave:
            save(folder)                        # whole, and under its final name
            checkpoint_done(iteration, folder)
        if leave:
            break

With several ranks, rank 0 asks and tells the others, so that all leave behind the same iteration. `step_done` and
`checkpoint_done` do nothing on other ranks (RANK, or SLURM_PROCID, is not 0). Outside of a chain nothing is written,
and nobody asks for anything. Nothing here raises: a program must not end because a disk is full. Lines that could not
be written are written with the next ones, or at the end of the program.
"""

from __future__ import annotations

import atexit
import json
import math
import os
import sys
import time

FOLDER = "RELAYRUN_CLIENT"
"""Environment variable: the folder of messages between program and chain."""

STOP = "RELAYRUN_STOP"
"""Environment variable: the file whose existence asks the program to save and leave."""

CHECKPOINT = "RELAYRUN_CHECKPOINT"
"""Environment variable: the checkpoint to resume from; not set at the beginning of the run."""

SECONDS = 1.0
"""Interval of looks at a file: a file system of many nodes must not be asked more often."""

_looked: dict[str, float] = {}
_answers: dict[str, bool] = {}

MOST_UNWRITTEN = 100_000
"""Lines of a file that are kept until it can be written; the oldest ones are dropped."""
_unwritten: dict[str, list[bytes]] = {}
"""By the path of a file."""


def step_done(iteration: int, **metrics: float) -> None:
    """Say that this iteration is done; `metrics` as loss=, lr=, grad_norm=, step_seconds=: any numbers."""
    _append("steps.jsonl", {"iteration": int(iteration), "metrics": _numbers(metrics)})


def checkpoint_done(iteration: int, path: str | os.PathLike[str]) -> None:
    """Say that the checkpoint of this iteration lies at `path`, a file or a folder, whole and under its final name."""
    _append("checkpoints.jsonl", {"iteration": int(iteration), "path": os.path.abspath(path)})


def should_save() -> bool:
    """Return whether somebody wants a checkpoint now: True once per request, and on rank 0 alone."""
    if not _first() or not _exists("save"):
        return False
    try:
        os.unlink(os.path.join(os.environ[FOLDER], "save"))
    except OSError:
        return False
    _answers["save"] = False
    return True


def should_leave() -> bool:
    """Return whether to save and end with exit code 0: the time limit is near, or somebody ends the run."""
    return _exists("leave")


def checkpoint() -> str | None:
    """Return the checkpoint to resume from; None: from the beginning."""
    return os.environ.get(CHECKPOINT) or None


def _exists(name: str) -> bool:
    path = os.environ.get(STOP) if name == "leave" else os.path.join(os.environ.get(FOLDER, ""), name)
    if not path or FOLDER not in os.environ:
        return False
    now = time.monotonic()
    if now - _looked.get(name, -SECONDS) >= SECONDS:
        _looked[name], _answers[name] = now, os.path.exists(path)
    return _answers[name]


def _first() -> bool:
    return os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0"


def _numbers(metrics: dict[str, float]) -> dict[str, float]:
    found = {name: float(value) for name, value in metrics.items()}
    return {name: value for name, value in found.items() if math.isfinite(value)}  # JSON has no others


def _append(name: str, record: dict[str, object]) -> None:
    folder = os.environ.get(FOLDER)
    if folder is None or not _first():
        return
    path = os.path.join(folder, name)
    _unwritten.setdefault(path, []).append(json.dumps(record | {"time": time.time()}).encode())
    _write(path, again=len(_unwritten[path]) > 1)


def _write(path: str, *, again: bool) -> None:
    """Append the unwritten lines of a file with one write. `again`: a write of some has failed before."""
    lines = _unwritten[path]
    del lines[:-MOST_UNWRITTEN]
    try:
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            if again:  # an error may come behind the write: what is there is not written again
                size = sum(map(len, lines)) + 2 * len(lines)
                end = os.pread(file, size, max(0, os.fstat(file).st_size - size)).split(b"\n")
                lines[:] = [line for line in lines if line not in end]
            text = b"".join(b"\n" + line + b"\n" for line in lines) or b"\n"  # the line before may be torn
            written = os.write(file, text)
        finally:
            os.close(file)
        while lines and written >= len(lines[0]) + 2:  # a full disk takes a part: a torn line is written again
            written -= len(lines.pop(0)) + 2
    except OSError as error:
        print(f"relayrun: {os.path.basename(path)} not written yet: {error}", file=sys.stderr)


@atexit.register
def _write_the_rest() -> None:
    for path, lines in _unwritten.items():
        if lines:
            _write(path, again=True)
