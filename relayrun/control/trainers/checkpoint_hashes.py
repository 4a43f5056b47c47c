"""Hashes of Megatron-LM's checkpoints, which have none of their own. Standard library only.

A process beside the ranks reads each new checkpoint twice and records the BLAKE2b of its files in `hashes.jsonl` of the
attempt. Before the next attempt or restart begins its base is read again. A checkpoint whose bytes differ, or whose
tensors are those of the checkpoint before it, goes into quarantine with its reason.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice, takewhile
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
from relayrun.files import append_line, open_for_reading, read_json_lines, read_json_lines_backwards

PIECE_BYTES = 1 << 22
READERS = 8
"""Files that are read side by side."""
BASE_SECONDS = 300.0
"""Maximum seconds for the comparison of an attempt's base: all nodes wait for it. `RESTART_SECONDS`: of a restart's."""
RESTART_SECONDS = 60.0
MOST_FALL_BACKS = 2
"""Damaged checkpoints that one attempt moves; if more in a row are damaged, the file system may be at fault."""


@dataclass(frozen=True, kw_only=True)
class CheckpointHashes(Record):
    """A line of `hashes.jsonl`: the BLAKE2b of every file of a checkpoint, by name. `saved`: time of its commit."""

    iteration: int
    saved: float
    files: dict[str, str | None] = field(default_factory=dict)


def hash_new_checkpoints(run: Run, attempt: Attempt) -> None:
    """Hash the checkpoints of a run that have no hashes yet, oldest first; record those that are no good as failed
    saves. Raises OSError and RunDirError."""
    commits = (each.commit for each in Lineage(run).backwards() if each.published)
    own = [each for each in commits if is_checkpoint_of(run, ResumePoint.of(each))]
    for commit in reversed([*takewhile(lambda each: recorded_hashes(run, each) is None, own)]):
        if checkpoint_fault(commit) is not None:
            continue
        before = next((each for each in own if each.iteration < commit.iteration and os.path.isdir(each.path)), None)
        try:
            found, again = (_hash_files(commit.path, list(commit.files)) for _ in range(2))
            same = before is not None and has_same_tensors(Path(before.path), Path(commit.path))
        except FileNotFoundError:  # its run has removed it
            continue
        if found == again and not same:
            CheckpointHashes(iteration=commit.iteration, saved=commit.time, files=found).append(attempt.hashes)
            continue
        why = "two reads of its files gave different bytes"
        if found == again and before is not None:
            why = f"every tensor is that of iteration {before.iteration}: the program saves a state that it has left"
        log_line(f"the checkpoint of iteration {commit.iteration} does not count: {why}")
        line = {"iteration": commit.iteration, "error": why, "time": time.time(), "identical": found == again}
        append_line(attempt.failed_saves, line)
        quarantine_checkpoint(run.checkpoints, ResumePoint.of(commit), attempt=attempt.number, why=why)


def useless_saves(attempt: Attempt) -> str | None:
    """Return the reason to end an attempt whose two newest saves failed since they repeat an earlier state."""
    newest = [line for _, line in islice(read_json_lines_backwards(attempt.failed_saves), 2)]
    if len(newest) < 2 or not all(line.get("identical") for line in newest):
        return None
    return f"the save of iteration {newest[0]['iteration']} is useless, as was the one before: {newest[0]['error']}"


def intact_base(run: Run, line: Lineage, base: ResumePoint, *, attempt: int, restart: bool = False) -> ResumePoint:
    """Return `base` if its bytes are the recorded ones, else the newest intact checkpoint before it; damaged ones are
    moved into quarantine. `restart`: inside an attempt. Raises RunDirError if no intact one is found."""
    until = time.monotonic() + (RESTART_SECONDS if restart else BASE_SECONDS)
    for _ in range(MOST_FALL_BACKS + 1):
        commit = next((each.commit for each in line.backwards() if each.commit.path == base.path), None)
        hashes = None if commit is None or not is_checkpoint_of(run, base) else recorded_hashes(run, commit)
        why = next(iter(faults(str(base.path), hashes, until=until)), None) if hashes is not None else None
        if why is None:
            return base
        target = quarantine_checkpoint(run.checkpoints, base, attempt=attempt, why=why)
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


def faults(folder: str, hashes: CheckpointHashes, *, until: float = float("inf")) -> list[str]:
    """Return the files of a checkpoint that are missing or differ from their hashes, in words. Raises OSError."""
    try:
        found = _hash_files(folder, list(hashes.files), until=until)
    except FileNotFoundError as error:
        return [f"{error.filename} is missing"]
    if unread := [name for name, each in found.items() if each is None]:
        log_line(f"{folder}: {len(unread)} of {len(found)} files are not compared with their hashes: no time")
    wrong = (name for name, each in found.items() if each not in (None, hashes.files[name]))
    return [f"{name} is not the one that was saved" for name in wrong]


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


def _hash_files(folder: str, names: Sequence[str], *, until: float = float("inf")) -> dict[str, str | None]:
    """Return the hashes of files by name; None for files that are not read `until`. Raises OSError."""
    with ThreadPoolExecutor(READERS) as readers:
        return dict(
            zip(names, readers.map(lambda name: _hash_file(os.path.join(folder, name), until), names), strict=True)
        )


def _hash_file(path: str, until: float) -> str | None:
    """Return the hash of a file, read from the disk and not from this node's cache."""
    digest = hashlib.blake2b(digest_size=16)
    with open(open_for_reading(path)[0], "rb", buffering=0) as file:
        os.fdatasync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        while piece := file.read(PIECE_BYTES):
            if time.monotonic() > until:
                return None
            digest.update(piece)
    return digest.hexdigest()
