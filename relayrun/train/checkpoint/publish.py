"""From a staged checkpoint to one that counts: rank 0's part of a save.

A checkpoint is written whole below `.staging/<attempt>/`, then renamed. What makes it count is the line in
commits.jsonl after the rename; the tracker file is for other programs. An attempt that is no longer the
newest must not publish: a later one has begun from an older checkpoint and owns the run. Nor must a rank whose round
is over: its node froze, was given up, and goes on.
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
from relayrun.errors import FatalTrainingError, RunDirError
from relayrun.files import fsync_directory, sync_data, unused_name, write_atomic
from relayrun.train.reporting import liveness

log = logging.getLogger(__name__)

_NAME = re.compile(r"iter_(\d{7,})")


def prepare_staging(run: Run, attempt: int, iteration: int) -> Path:
    """Make the folder to write into, empty."""
    folder = run.staging(attempt) / run.checkpoint(iteration).name
    if folder.exists():  # what a failed save of this attempt left
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    return folder


def publish_checkpoint(run: Run, attempt: int, commit: CheckpointCommit, staged: Path) -> None:
    """Make a complete staged checkpoint durable and give it its final name, then record it.

    Raises FatalTrainingError if a newer attempt has begun. Ends this process if a later round has: what it would write
    about that would be taken for the words of the rank that has its number now.
    """
    _sync(staged)
    number = liveness.restart_number()
    if liveness.has_agent() and any(
        failed.round >= number for failed in restarts.read_failed_restarts(run.attempt(attempt))
    ):
        log.error("round %s is over, so this rank publishes nothing and ends", number)
        os._exit(1)
    newest = run.attempt_numbers()[-1]
    if newest != attempt:
        raise FatalTrainingError(
            f"superseded: attempt {newest} has begun, so attempt {attempt} publishes nothing", where=run.path
        )
    target = Path(commit.path)
    if target.exists():  # of an attempt that died, or lost its right to it; nothing vouches for it
        aside = run.checkpoints / ".superseded"
        aside.mkdir(exist_ok=True)
        os.rename(target, unused_name(aside, f"{target.name}-{attempt:04}"))  # twice, where a commit line failed
    os.rename(staged, target)
    fsync_directory(run.checkpoints)
    try:
        sync_data(run.attempt(attempt).metrics)  # the record is never behind the state
    except OSError as error:
        log.warning("%s is not synced to disk: %s", run.attempt(attempt).metrics.name, error)
    run.attempt(attempt).append_commit(commit)  # from here on it counts, so nothing below may fail the save
    try:
        write_atomic(run.tracker, f"{commit.iteration}\n")
    except OSError as error:
        log.warning("%s not written: %s", run.tracker.name, error)


def prune_checkpoints(run: Run, attempt: int, keep_last: int, keep_every: int | None = None) -> None:
    """Remove this run's oldest checkpoints beyond `keep_last`, and what failed saves and dead attempts staged.

    In line are this attempt's own commits and what lies at or below its base. Multiples of `keep_every`
    stay for good, what waits for its evaluation until that has it, what another run will begin with until it has, what
    is being copied to a second place, and the last one that was read back in full. The newest one always stays: it was
    checked a moment ago, so a good one is left whatever has become of the others. What cannot be removed is reported
    and left.
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
            os.rename(run.checkpoint(iteration), doomed)  # at once: no half a checkpoint under its name
            shutil.rmtree(doomed)
        for leftover in staging.glob("iter_*"):  # of saves that failed; the one that worked has been renamed
            shutil.rmtree(leftover)
        for other in staging.parent.iterdir():
            if other.name.isdecimal() and int(other.name) < attempt:
                shutil.rmtree(other)
    except (OSError, RunDirError) as error:
        log.warning("old checkpoints not removed: %s", error)


def _sync(folder: Path) -> None:
    for directory, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_directory(directory)
    fsync_directory(folder.parent)
