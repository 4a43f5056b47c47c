"""Between two rounds of a foreign program: who may touch what it left, and from where the next round is followed.

The records of such a program are written by the watch (`trainers.by_rounds`), and its files are moved by the
coordinator of the agents (`agent.between`). Two files of the attempt keep the two apart:

    hand_over.json    round 1 is over, and no rank lives          by the coordinator
                      ... and all that it left is on record       by the watch, which touches nothing from here on
                      removed: the next round may be followed     by the coordinator
    round.json        what round 2 starts from, and the bytes that the log had then

Each side may be killed at any point. A watch that is started anew finds what it may do in the file. Without an answer
the coordinator moves nothing, and ends the attempt. Standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart, Record


@dataclass(frozen=True, kw_only=True)
class RestartHandOver(Record):
    """What `hand_over.json` says: a round is over, and none of its ranks lives."""

    round: int
    exit_code: int
    """The end of the rank that failed first, as a shell reports it."""
    recorded: bool = False
    """Whether all that the round left is on record."""
    log_offset: int = 0
    """Bytes of the job's standard error then, as the watch sees it: in a container it may not be there."""
    output_offset: int = 0
    """Bytes of its standard output."""


@dataclass(frozen=True, kw_only=True)
class RestartBase(Record):
    """What `round.json` says: what the newest round after the first starts from."""

    round: int
    base_iteration: int
    base_path: str | None
    log_offset: int
    """Bytes of the job's standard error: what stands before them is of earlier rounds."""
    output_offset: int
    """Bytes of its standard output."""
    commits: int
    """How many checkpoints the attempt had on record, whether or not they still count."""


def pending_hand_over(attempt: Attempt) -> RestartHandOver | None:
    """Return the round that is handed over; None where one is running. Raises OSError and RunDirError."""
    return RestartHandOver.read(attempt.hand_over)


def read_restart_base(attempt: Attempt) -> RestartBase | None:
    """Return what the newest round starts from; None in the first one. Raises OSError and RunDirError."""
    return RestartBase.read(attempt.round)


def attempt_start_of_restart(attempt: Attempt, begin: AttemptStart) -> AttemptStart:
    """Return the attempt's begin as it is for its newest round: another base, and a log that was there before it."""
    start = read_restart_base(attempt)
    if start is None:
        return begin
    return replace(
        begin,
        base_iteration=start.base_iteration,
        base_path=start.base_path,
        log_offset=start.log_offset,
        output_offset=start.output_offset,
    )
