"""Under which id a run is told to W&B and TensorBoard: one over all its attempts, another after each rewind.

A resume computes what was lost again, to the same bits, so an iteration is told once, whoever computed it. After a
rewind (a person left whole checkpoints behind, or a policy went back and passed over data) the iterations above its
base are other ones: they become a fork, a stream with an id of its own that holds the whole line from its first
iteration on. `streams.json` keeps the ids; where a stream begins follows from begin.json and rewinds.jsonl of the
attempts. A fork's id follows from the first one's, so that whoever records it records the same.
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
from relayrun.files import read_json, read_lines, write_json

_ID_LETTERS = string.ascii_lowercase + string.digits
TRACKER_ID_LENGTH = 8
"""Characters of an id, as of W&B's own ids."""


@dataclass(frozen=True, kw_only=True)
class TrackerRun(Record):
    """One line of iterations, as trackers know it."""

    id: str
    """W&B's run id, and TensorBoard's folder."""
    first_attempt: int
    rewind: int = 0
    """The rewind of this attempt, from 1 on, that began the stream; 0: the attempt's begin. It ends where the next
    stream begins."""
    forked_from: str | None = None
    """Id of the stream that was rewound."""
    fork_iteration: int = 0
    """Last iteration that the fork and the stream before it have in common."""

    @property
    def start(self) -> tuple[int, int]:
        """Where the stream begins: its attempt, and the number of the rewind in it."""
        return self.first_attempt, self.rewind


def read_tracker_runs(run: Run) -> list[TrackerRun]:
    """The streams on record, oldest first. Raises RunDirError if the file is damaged."""
    try:
        return [TrackerRun.of(entry) for entry in read_json(run.streams)]
    except FileNotFoundError:
        return []
    except (json.JSONDecodeError, TypeError) as error:
        raise RunDirError(
            f"unreadable record: {error}",
            where=run.streams,
            hint="put it back, or remove it: then all is told again under new ids",
        ) from None


def update_tracker_runs(run: Run) -> list[TrackerRun]:
    """Bring the record up to date with the attempts there are; return the streams, oldest first, at least one."""
    known = read_tracker_runs(run)
    found = list(known) or [TrackerRun(id=_new_id(), first_attempt=1)]
    for start, base in _rollbacks(run):
        if start > found[-1].start:
            found.append(
                TrackerRun(
                    id=_fork_id(found[0].id, start),
                    first_attempt=start[0],
                    rewind=start[1],
                    forked_from=found[-1].id,
                    fork_iteration=base,
                )
            )
    if found != known:
        write_json(run.streams, [asdict(stream) for stream in found])
    return found


def _rollbacks(run: Run) -> Iterator[tuple[tuple[int, int], int]]:
    """Start and base iteration of each, oldest first."""
    for number in run.attempt_numbers():
        begin = run.attempt(number).read_begin()
        if begin is not None and begin.rewound:
            yield (number, 0), begin.base_iteration
        for count, entry in enumerate(read_lines(run.attempt(number).rewinds), start=1):
            yield (number, count), int(entry["base_iteration"])


def _fork_id(first: str, start: tuple[int, int]) -> str:
    digest = hashlib.sha256(f"{first} {start[0]} {start[1]}".encode()).digest()
    return "".join(_ID_LETTERS[byte % len(_ID_LETTERS)] for byte in digest[:TRACKER_ID_LENGTH])


def _new_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(TRACKER_ID_LENGTH))
