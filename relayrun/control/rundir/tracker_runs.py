"""Ids of a run in W&B and TensorBoard: one id over all attempts, and another after each rollback.

A resume computes lost iterations again, to the same bits, so each iteration is logged once, by any attempt. After a
rollback the iterations above its base differ: they become a fork, a tracker run with an id of its own that holds the
whole line from the first iteration on. `streams.json` keeps the ids. A fork's id follows from the first id and its
start, so that every writer records the same.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import string
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from relayrun.files import read_json, read_json_lines, write_json

_ID_LETTERS = string.ascii_lowercase + string.digits
TRACKER_ID_LENGTH = 8
"""Length of an id, as of W&B's own ids."""


@dataclass(frozen=True, kw_only=True)
class TrackerRun(Record):
    """One line of iterations, as trackers know it."""

    id: str
    """W&B's run id, and TensorBoard's folder."""
    first_attempt: int
    rollback: int = 0
    """Number, from 1 on, of the rollback of this attempt that began the tracker run; 0: the attempt's begin."""
    forked_from: str | None = None
    """Id of the tracker run that was rolled back."""
    fork_iteration: int = 0
    """Last iteration that the fork has in common with the tracker run before it."""

    @property
    def start(self) -> tuple[int, int]:
        """The start of the tracker run: its attempt, and the number of the rollback in it."""
        return self.first_attempt, self.rollback


def read_tracker_runs(run: Run) -> list[TrackerRun]:
    """Return the tracker runs on record, oldest first. Raises RunDirError if the file is damaged."""
    try:
        return [TrackerRun.of(entry) for entry in read_json(run.streams)]
    except FileNotFoundError:
        return []
    except (json.JSONDecodeError, TypeError) as error:
        hint = "put it back, or remove it: then all is told again under new ids"
        raise RunDirError(f"unreadable record: {error}", where=run.streams, hint=hint) from None


def update_tracker_runs(run: Run) -> list[TrackerRun]:
    """Update the record from the attempts; return the tracker runs, oldest first, at least one."""
    known = read_tracker_runs(run)
    new = "".join(secrets.choice(_ID_LETTERS) for _ in range(TRACKER_ID_LENGTH))
    found = list(known) or [TrackerRun(id=new, first_attempt=1)]
    for start, base in _rollbacks(run):
        if start > found[-1].start:
            digest = hashlib.sha256(f"{found[0].id} {start[0]} {start[1]}".encode()).digest()
            fork = TrackerRun(
                id="".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[:TRACKER_ID_LENGTH]),
                first_attempt=start[0],
                rollback=start[1],
                forked_from=found[-1].id,
                fork_iteration=base,
            )
            found.append(fork)
    if found != known:
        write_json(run.streams, [asdict(stream) for stream in found])
    return found


def _rollbacks(run: Run) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield start and base iteration of each rollback, oldest first."""
    for number in run.attempt_numbers():
        begin = run.attempt(number).read_begin()
        if begin is not None and begin.rolled_back:
            yield (number, 0), begin.base_iteration
        for count, entry in enumerate(read_json_lines(run.attempt(number).rollbacks), start=1):
            yield (number, count), int(entry["base_iteration"])
