"""What rank 0 does with a checkpoint that was found damaged: quarantine, and the one before it for the attempt."""

from __future__ import annotations

import logging

from relayrun.errors import FatalTrainingError, RunDirError
from relayrun.rundir.attempt import Attempt
from relayrun.rundir.lineage import Durable, commit_of, durable, is_own
from relayrun.rundir.quarantine import put_in_quarantine
from relayrun.rundir.records import AttemptStart
from relayrun.rundir.run import Run
from relayrun.training.checkpoint.checksums import Damaged

log = logging.getLogger(__name__)


def checksum_of(path: str) -> str | None:
    """The checksum that the commit of a checkpoint gives; None where there is none. Raises RunDirError."""
    commit = commit_of(path)
    return None if commit is None else commit.checksum


def leave_behind(run: Run, attempt: Attempt, base: Durable, error: Damaged) -> str:
    """Put a damaged checkpoint into quarantine; return where it is. One of another run stays: FatalTrainingError."""
    if not is_own(run, base):
        raise FatalTrainingError(
            error.message, where=error.where, hint="take another checkpoint to begin with, or a whole copy of this one"
        )
    target = put_in_quarantine(run, base, attempt=attempt.number, why=error.message)
    log.warning("%s: %s; moved to %s", base.path, error.message, target)
    return str(target)


def fall_back(run: Run, attempt: Attempt, begin: AttemptStart, error: Damaged) -> AttemptStart:
    """Leave the base of an attempt behind and begin with the newest whole checkpoint before it.

    Returns begin.json as it is then. Raises FatalTrainingError where no checkpoint is left.
    """
    leave_behind(run, attempt, Durable(iteration=begin.base_iteration, path=begin.base_path), error)
    try:
        base = durable(run)
    except RunDirError as none:
        raise FatalTrainingError(none.message, where=none.where, hint=none.hint) from None
    return attempt.fall_back(base.iteration, base.path)
