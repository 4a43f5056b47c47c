"""Under which id a run is told to W&B and TensorBoard: one over all its attempts, another after each rewind.

A resume computes what was lost again, to the same bits, so an iteration is told once, whoever computed it. After a
rewind (a person or a policy left whole checkpoints behind) the iterations above the base need not be the same:
they become a fork, a stream with an id of its own that holds the whole line from its first iteration on.
`streams.json` keeps the ids; which attempts belong to which stream follows from their begin.json.
"""

from __future__ import annotations

import json
import secrets
import string
from dataclasses import asdict, dataclass

from relayrun.errors import RunDirError
from relayrun.files import read_json, write_json
from relayrun.rundir.layout import RunDir
from relayrun.rundir.records import Begin, Record

_LETTERS = string.ascii_lowercase + string.digits


@dataclass(frozen=True, kw_only=True)
class Stream(Record):
    """One line of iterations, as trackers know it."""

    id: str
    """W&B's run id, and TensorBoard's folder."""
    first_attempt: int
    """It ends where the next stream's first attempt begins."""
    forked_from: str | None = None
    """Id of the stream that was rewound."""
    fork_iteration: int = 0
    """Up to this iteration both are the same."""


def read_streams(run: RunDir) -> list[Stream]:
    """The streams on record, oldest first. Raises RunDirError if the file is damaged."""
    try:
        return [Stream.of(entry) for entry in read_json(run.streams)]
    except FileNotFoundError:
        return []
    except (json.JSONDecodeError, TypeError) as error:
        raise RunDirError(f"unreadable record: {error}", where=run.streams,
                          hint="put it back, or remove it: then all is told again under new ids") from None  # fmt: skip


def record_streams(run: RunDir) -> list[Stream]:
    """Bring the record up to date with the attempts there are; return the streams, oldest first, at least one."""
    known = read_streams(run)
    found = list(known) or [Stream(id=_new_id(), first_attempt=1)]
    for number in run.attempt_numbers():
        begin = Begin.read(run.attempt(number).begin)
        if begin is not None and begin.rewound and number > found[-1].first_attempt:
            found.append(Stream(id=_new_id(), first_attempt=number, forked_from=found[-1].id,
                                fork_iteration=begin.base_iteration))  # fmt: skip
    if found != known:
        write_json(run.streams, [asdict(stream) for stream in found])
    return found


def _new_id() -> str:
    """Eight letters and digits, as W&B's own ids."""
    return "".join(secrets.choice(_LETTERS) for _ in range(8))
