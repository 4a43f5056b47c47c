"""Publishes a staged checkpoint: rank 0's part of a save.

A checkpoint is written completely below `.staging/<attempt>/`, then renamed. It counts with the line in commits.jsonl
after the rename; the tracker file is for other programs. An attempt that is no longer the newest must not publish: a
later attempt started from an older checkpoint and owns the run. A rank of a failed restart must not publish either: its
node froze, was given up, and runs again.
"""

from __future__ import annotations

import logging
import os
import re
import shutil
from pathlib import Path

from relayrun.control.rundir import campaign, evaluations, mirror, restarts
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import FatalTrainingError, RunDirError, warned
from relayrun.files import fsync_directory, fsync_tree, sync_data, unused_name, write_atomic
from relayrun.train.reporting import liveness

log = logging.getLogger(__name__)

_NAME = re.compile(r"iter_(\d{7,})")


def prepare_staging(run: Run, attempt: int, iteration: int) -> Path:
    """Create an empty folder for a checkpoint."""
    folder = run.staging(attempt) / run.checkpoint(iteration).name
    if folder.exists():  # from a failed save of this attempt
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def publish_checkpoint(run: Run, attempt: int, commit: CheckpointCommit, staged: Path) -> None:
    """Make a complete staged checkpoint durable, give it its final name, and record it.

    Raises FatalTrainingError if a newer attempt has begun. Ends this process if a later restart has begun: its records
    would be taken for those of the rank that has its number now.
    """
    fsync_tree(staged)
    fsync_directory(staged.parent)
    number = liveness.restart_number()
    if liveness.has_agent() and any(
        failed.restart >= number for failed in restarts.read_failed_restarts(run.attempt(attempt))
    ):
        log.error("restart %s is over, so this rank publishes nothing and ends", number)
        os._exit(1)
    newest = run.attempt_numbers()[-1]
    if newest != attempt:
        raise FatalTrainingError(
            f"superseded: attempt {newest} has begun, so attempt {attempt} publishes nothing", where=run.path
        )
    target = Path(commit.path)
    if target.exists():  # from a dead or superseded attempt, without a commit
        aside = run.checkpoints / ".superseded"
        aside.mkdir(exist_ok=True)
        os.rename(target, unused_name(aside, f"{target.name}-{attempt:04}"))  # twice if a commit line failed
    os.rename(staged, target)
    fsync_directory(run.checkpoints)
    with warned(log, "%s is not synced to disk", run.attempt(attempt).metrics.name):
        sync_data(run.attempt(attempt).metrics)  # the record is never behind the state
    run.attempt(attempt).append_commit(commit)  # the checkpoint counts now, so nothing below may fail the save
    with warned(log, "%s not written", run.tracker.name):
        write_atomic(run.tracker, f"{commit.iteration}\n")


def prune_checkpoints(run: Run, attempt: int, keep_last: int, keep_every: int | None = None) -> None:
    """Remove this run's oldest checkpoints beyond `keep_last`, and leftovers in staging of failed saves and dead
    attempts.

    Candidates are this attempt's own commits and checkpoints at or below its base. Kept are multiples of `keep_every`,
    checkpoints that wait for their evaluation, for another run that starts from them, or for their mirror copy, and the
    last one that was read back in full. The newest one always stays: it was verified a moment ago. A failure is logged.
    """
    begin = run.attempt(attempt).read_begin()
    base = begin.base_iteration if begin is not None else 0
    own = {commit.iteration for commit in run.attempt(attempt).read_commits()}
    staging = run.staging(attempt)
    try:
        found = [int(match[1]) for name in os.listdir(run.checkpoints) if (match := _NAME.fullmatch(name))]
        line = sorted((iteration for iteration in found if iteration <= base or iteration in own), reverse=True)
        held = (
            evaluations.iterations_held_by_evaluations(run)
            | mirror.iterations_held_by_mirror(run)
            | campaign.iterations_held_by_campaign(run)
        )
        for iteration in line[keep_last:]:
            if (keep_every and iteration % keep_every == 0) or iteration in held:
                continue
            doomed = staging / f"removing-{iteration}"
            os.rename(run.checkpoint(iteration), doomed)  # atomic: never half a checkpoint under its name
            shutil.rmtree(doomed)
        for leftover in staging.glob("iter_*"):  # from failed saves; a successful one has been renamed
            shutil.rmtree(leftover)
        for other in staging.parent.iterdir():
            if other.name.isdecimal() and int(other.name) < attempt:
                shutil.rmtree(other)
    except (OSError, RunDirError) as error:
        log.warning("old checkpoints not removed: %s", error)
