"""Hashes of Megatron-LM's checkpoints, which have none of their own. Standard library only.

A process beside the ranks reads each new checkpoint twice and records the BLAKE2b of its files in `hashes.jsonl` of the
attempt. The next attempt reads its base again before the ranks start. A checkpoint whose bytes differ, or whose tensors
are those of the checkpoint before it, goes into quarantine with its reason.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from relayrun.control.job_log import log_line
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import (
    Lineage,
    ResumePoint,
    checkpoint_fault,
    is_checkpoint_of,
    quarantine_checkpoint,
)
from relayrun.control.rundir.records import CheckpointCommit, Record
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.pickle_records import CorruptPickle, read_records
from relayrun.control.trainers.torch_files import METADATA_FILE, read_bounded, tensor_blocks
from relayrun.errors import RunDirError
from relayrun.files import append_line, read_json_lines, read_json_lines_backwards

PIECE_BYTES = 1 << 22
READERS = 8
"""Files that are read side by side."""
BASE_SECONDS = 300.0
"""Maximum seconds for the comparison of an attempt's base: all nodes wait for it."""
MOST_FALL_BACKS = 2
"""Damaged checkpoints that one attempt moves; if more in a row are damaged, the file system may be at fault."""


@dataclass(frozen=True, kw_only=True)
class CheckpointHashes(Record):
    """A line of `hashes.jsonl`: the BLAKE2b of every file of a checkpoint, by name. `saved`: time of its commit."""

    iteration: int
    saved: float
    files: dict[str, str] = field(default_factory=dict)


def hash_new_checkpoints(run: Run, attempt: Attempt) -> None:
    """Hash the checkpoints of a run that have no hashes yet, oldest first; record those that are no good as failed
    saves. Raises OSError and RunDirError."""
    own = [each.commit for each in Lineage(run).backwards() if each.published and _is_own(run, each.commit)]
    new = list(_without_hashes(run, own))
    for commit in reversed(new):
        if checkpoint_fault(commit) is not None:
            continue
        before = next((each for each in own if each.iteration < commit.iteration and os.path.isdir(each.path)), None)
        try:
            hashes, why = _hash_twice(commit), None
            same = before is not None and has_same_tensors(Path(before.path), Path(commit.path))
        except FileNotFoundError:  # its run has removed it
            continue
        if hashes is None:
            why = "two reads of its files gave different bytes"
        elif before is not None and same:
            why = f"every tensor is that of iteration {before.iteration}: the program saves a state that it has left"
        if why is None and hashes is not None:
            hashes.append(attempt.hashes)
            continue
        log_line(f"the checkpoint of iteration {commit.iteration} does not count: {why}")
        line = {"iteration": commit.iteration, "error": why, "time": time.time(), "identical": bool(hashes)}
        append_line(attempt.failed_saves, line)
        quarantine_checkpoint(run, ResumePoint.of(commit), attempt=attempt.number, why=str(why))


def useless_saves(attempt: Attempt) -> str | None:
    """Return the reason to end an attempt whose two newest saves failed since they repeat an earlier state."""
    newest = list(islice(read_json_lines_backwards(attempt.failed_saves), 2))
    if len(newest) < 2 or not all(line.get("identical") for _, line in newest):
        return None
    line = newest[0][1]
    return f"the save of iteration {line['iteration']} is useless, as was the one before: {line['error']}"


def intact_base(run: Run, line: Lineage, base: ResumePoint, *, attempt: int) -> ResumePoint:
    """Return `base` if its bytes are the recorded ones, else the newest intact checkpoint before it; damaged ones are
    moved into quarantine. Raises RunDirError if no intact one is found."""
    until = time.monotonic() + BASE_SECONDS
    for _ in range(MOST_FALL_BACKS + 1):
        why = None if base.path is None or not is_checkpoint_of(run, base) else _damage(run, line, base, until=until)
        if why is None:
            return base
        target = quarantine_checkpoint(run, base, attempt=attempt, why=why)
        log_line(f"{base.path}: {why}; moved to {target}")
        commits = (each.commit for each in line.backwards() if each.commit.iteration < base.iteration)
        found = next((each for each in commits if checkpoint_fault(each) is None), None)
        if found is None:
            raise RunDirError(f"no checkpoint before iteration {base.iteration} is whole", where=run.checkpoints)
        base = ResumePoint.of(found)
    raise RunDirError(
        f"{MOST_FALL_BACKS + 1} checkpoints in a row were read as damaged; the last: {why}",
        where=run.checkpoints,
        hint="more likely it is this node's memory, network or file system",
    )


def _damage(run: Run, line: Lineage, base: ResumePoint, *, until: float = float("inf")) -> str | None:
    """Return the difference between a checkpoint and its recorded hashes; None without one. What is not read `until`
    (monotonic) is taken as it is."""
    commit = next((each.commit for each in line.backwards() if each.commit.path == base.path), None)
    hashes = None if commit is None else recorded_hashes(run, commit)
    if commit is None or hashes is None:
        return None
    return next(iter(faults(commit.path, hashes, until=until)), None)


def faults(folder: str, hashes: CheckpointHashes, *, until: float = float("inf")) -> list[str]:
    """Return the files of a checkpoint that are missing or differ from their hashes, in words. Raises OSError."""
    try:
        found = _hash_files(folder, list(hashes.files), until=until)
    except FileNotFoundError as error:
        return [f"{error.filename} is missing"]
    if unread := [name for name, each in found.items() if each is None]:
        log_line(f"{folder}: {len(unread)} of {len(found)} files are not compared with their hashes: no time")
    return [
        f"{name} is not the one that was saved"
        for name, each in found.items()
        if each not in (None, hashes.files[name])
    ]


def recorded_hashes(run: Run, commit: CheckpointCommit) -> CheckpointHashes | None:
    """Return the recorded hashes of a checkpoint; None without a record. Raises RunDirError."""
    for number in reversed(run.attempt_numbers()):
        for entry in read_json_lines(run.attempt(number).hashes):
            if (entry.get("iteration"), entry.get("saved")) == (commit.iteration, commit.time):
                return CheckpointHashes.of(entry)
    return None


def has_same_tensors(one: Path, other: Path) -> bool:
    """Return whether two checkpoints hold the same tensors, weights and optimizer. Bytes are read up to the first
    difference. False if one has no readable `.metadata`, or another layout. Raises FileNotFoundError."""
    try:
        blocks = [sorted(tensor_blocks(read_records(read_bounded(path / METADATA_FILE))[0])) for path in (one, other)]
    except (CorruptPickle, AttributeError, KeyError, TypeError, FileNotFoundError):
        return False
    if not blocks[0] or blocks[0] != blocks[1]:
        return False
    return all(
        _block(one, file, offset, length) == _block(other, file, offset, length)
        for _, file, offset, length in blocks[0]
    )


def _block(folder: Path, file: str, offset: int, length: int) -> bytes:
    with open(folder / file, "rb") as opened:
        opened.seek(offset)
        return opened.read(length)


def _is_own(run: Run, commit: CheckpointCommit) -> bool:
    return is_checkpoint_of(run, ResumePoint.of(commit))


def _without_hashes(run: Run, commits: Sequence[CheckpointCommit]) -> Iterator[CheckpointCommit]:
    """Yield the commits that are newer than the newest one with hashes."""
    for commit in commits:
        if recorded_hashes(run, commit) is not None:
            return
        yield commit


def _hash_twice(commit: CheckpointCommit) -> CheckpointHashes | None:
    """Return the hashes of a checkpoint; None if a second read gives others. Raises OSError."""
    names = list(commit.files)
    found, again = _hash_files(commit.path, names), _hash_files(commit.path, names)
    if found != again:
        return None
    files = {name: value for name, value in found.items() if value is not None}
    return CheckpointHashes(iteration=commit.iteration, saved=commit.time, files=files)


def _hash_files(folder: str, names: Sequence[str], *, until: float = float("inf")) -> dict[str, str | None]:
    """Return the hashes of files by name; None for files that are not read `until`. Raises OSError."""
    with ThreadPoolExecutor(READERS) as readers:
        return dict(
            zip(names, readers.map(lambda name: _hash_file(os.path.join(folder, name), until), names), strict=True)
        )


def _hash_file(path: str, until: float) -> str | None:
    """Return the hash of a file, read from the disk and not from this node's cache."""
    digest = hashlib.blake2b(digest_size=16)
    with open(path, "rb", buffering=0) as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(PIECE_BYTES):
            if time.monotonic() > until:
                return None
            digest.update(piece)
    return digest.hexdigest()
