"""What rank 0 does with a checkpoint that was found damaged: quarantine, and the one before it for the attempt."""

from __future__ import annotations

import logging

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.lineage import Durable, commit_of, durable, is_own
from relayrun.control.rundir.quarantine import put_in_quarantine
from relayrun.control.rundir.run import Run
from relayrun.errors import FatalTrainingError, RunDirError
from relayrun.train.checkpoint.checksums import Damaged

log = logging.getLogger(__name__)


def checksum_of(path: str) -> str | None:
    """The checksum that the commit of a checkpoint gives; None where there is none. Raises RunDirError."""
    commit = commit_of(path)
    return None if commit is None else commit.checksum


def fall_back(run: Run, attempt: Attempt, base: Durable, error: Damaged) -> Durable:
    """Leave a checkpoint behind and return the newest whole one before it.

    begin.json follows, if the attempt is to go on from a checkpoint before its own base. Raises FatalTrainingError
    where no checkpoint is left, and for a checkpoint of another run, which stays where it is.
    """
    if not is_own(run, base):
        raise FatalTrainingError(
            error.message, where=error.where, hint="take another checkpoint to begin with, or a whole copy of this one"
        )
    target = put_in_quarantine(run, base, attempt=attempt.number, why=error.message)
    log.warning("%s: %s; moved to %s", base.path, error.message, target)
    try:
        before = durable(run)
    except RunDirError as none:
        raise FatalTrainingError(none.message, where=none.where, hint=none.hint) from None
    begin = attempt.read_begin()
    if begin is not None and before.iteration < begin.base_iteration:
        attempt.fall_back(before.iteration, before.path)
    return before
