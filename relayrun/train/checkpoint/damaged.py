"""What rank 0 does with a checkpoint that was found damaged: quarantine, and the one before it for the attempt."""

from __future__ import annotations

import logging

from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.lineage import ResumePoint, is_checkpoint_of, newest_commit_at, resume_point
from relayrun.control.rundir.quarantine import quarantine_checkpoint
from relayrun.control.rundir.run import Run
from relayrun.errors import FatalTrainingError, RunDirError
from relayrun.train.checkpoint.checksums import DamagedCheckpoint

log = logging.getLogger(__name__)


def committed_checksum(path: str) -> str | None:
    """The checksum that the commit of a checkpoint gives; None where there is none. Raises RunDirError."""
    commit = newest_commit_at(path)
    return None if commit is None else commit.checksum


def quarantine_and_fall_back(run: Run, attempt: Attempt, base: ResumePoint, error: DamagedCheckpoint) -> ResumePoint:
    """Leave a checkpoint behind and return the newest whole one before it.

    begin.json follows, if the attempt is to go on from a checkpoint before its own base. Raises FatalTrainingError
    where no checkpoint is left, and for a checkpoint of another run, which stays where it is.
    """
    if not is_checkpoint_of(run, base):
        raise FatalTrainingError(
            error.message, where=error.where, hint="take another checkpoint to begin with, or a whole copy of this one"
        )
    target = quarantine_checkpoint(run, base, attempt=attempt.number, why=error.message)
    log.warning("%s: %s; moved to %s", base.path, error.message, target)
    try:
        before = resume_point(run)
    except RunDirError as none:
        raise FatalTrainingError(none.message, where=none.where, hint=none.hint) from None
    begin = attempt.read_begin()
    if begin is not None and before.iteration < begin.base_iteration:
        attempt.fall_back(before.iteration, before.path)
    return before
