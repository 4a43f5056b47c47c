"""A copy from a second place, put back where its run expects it or into any folder."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayrun.control.rundir import checkpoint_records, mirror
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.mirror import CheckpointCopy
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RunDirError
from relayrun.files import fsync_directory, unused_name
from relayrun.train.checkpoint.checksums import LocalCheckpointFiles
from relayrun.train.mirror.destination import (
    CopyFailed,
    CopyRateLimit,
    MirrorDestination,
    copy_faults,
    remove_tree,
    stage_files,
)
from relayrun.train.mirror.sync import check_owner, destination_at, destination_of_policy, mirror_lock


def restore_copy(run: Run, iteration: int | None, *, pace: CopyRateLimit | None = None) -> list[str]:
    """Put a copy back where the run's records say that it was; return what was done, in words.

    `iteration`: None for the newest one that counts and is missing or torn in the run. No job of the run may live.
    Raises RelayrunError where there is no such copy, or none that is what was saved.
    """
    policy = mirror.read_mirror_policy(run)
    if policy is None:
        raise RunDirError("this run has no second place", where=run.path, hint="see checkpoint.mirror")
    place = destination_of_policy(policy, pace or CopyRateLimit(None))
    check_owner(run, policy, place)
    if run.checkpoints.is_symlink() and not run.checkpoints.exists():
        away = os.path.realpath(run.checkpoints)
        raise RunDirError(
            f"this is a link to a folder that is not there: {away}",
            where=run.checkpoints,
            hint=f"mount it, or: {shlex.join(['mkdir', '-p', away])}",
        )
    with mirror_lock(run):
        return _restore(run, iteration, place)


def _restore(run: Run, iteration: int | None, place: MirrorDestination) -> list[str]:
    copied = mirror.copies_newest_first(place.copies())
    line = {commit.iteration: commit for commit in Lineage(run).line()}
    candidates = [copy for copy in copied if copy.iteration in line and copy.is_of(line[copy.iteration])]
    chosen = [copy for copy in candidates if iteration in (None, copy.iteration)]
    have = ", ".join(str(copy.iteration) for copy in reversed(candidates)) or "none"
    newer = _uncounted(place, copied, candidates)
    if not chosen:
        what = "no checkpoint of this run" if iteration is None else f"no copy of iteration {iteration}"
        hint = "; ".join([f"copies that count: {have}", *newer])
        raise InputError(f"the second place has {what} that counts", where=place.where, hint=hint)
    said: list[str] = list(newer)
    for copy in chosen:
        commit = line[copy.iteration]
        if checkpoint_records.checkpoint_fault(commit) is None:
            if len(said) > len(newer) or iteration is not None:
                return [*said, f"iteration {copy.iteration} is whole in the run: {commit.path}"]
            raise InputError(
                f"the newest copy, of iteration {copy.iteration}, is whole in the run: there is nothing to restore",
                where=commit.path,
                hint="; ".join(
                    ["name an iteration as RUN:N, or look at the bytes with `relayrun checkpoint verify`", *newer]
                ),
            )
        try:
            said.append(_put_back(run, place, copy, commit))
        except CopyFailed as error:
            if iteration is not None or copy is chosen[-1]:
                raise _offering(error, copy, candidates) from None
            said.append(f"not restored: {error}")
            continue
        return said
    return said


def _uncounted(
    place: MirrorDestination, copied: Sequence[CheckpointCopy], counting: Sequence[CheckpointCopy]
) -> list[str]:
    """Tell of a copy that is newer than what the run's records count, in words; nothing where there is none."""
    newest = counting[0].iteration if counting else 0
    if not copied or copied[0].iteration <= newest:
        return []
    number = copied[0].iteration
    return [
        f"a copy of iteration {number} is there, too, which the run's records do not count: training went back, or "
        f"they are older than it; `relayrun checkpoint restore {place.where}:{number} --to FOLDER` brings it"
    ]


def _offering(error: CopyFailed, copy: CheckpointCopy, others: Sequence[CheckpointCopy]) -> CopyFailed:
    """The same error; it names the copy before this one."""
    before = next((each.iteration for each in others if each.iteration < copy.iteration), None)
    if before is None:
        return error
    return CopyFailed(
        error.message, where=error.where, hint=f"there is a copy of iteration {before}, too: name it as :{before}"
    )


def _put_back(run: Run, place: MirrorDestination, copy: CheckpointCopy, commit: CheckpointCommit) -> str:
    staged = run.checkpoints / ".staging" / "restore" / copy.name
    _fetch(place, copy, commit, staged)
    final = Path(commit.path)
    if os.path.lexists(final):
        aside = run.checkpoints / ".superseded"
        aside.mkdir(exist_ok=True)
        os.rename(final, unused_name(aside, f"{final.name}-torn"))
    _name(staged, final)
    mirror.record_verified(run, commit, now=time.time())
    return f"restored iteration {copy.iteration}: {sum(copy.files.values()):,} bytes, verified: {final}"


def fetch_copy(where: str, iteration: int | None, target: Path) -> list[str]:
    """Put a copy below a folder, of a run that is lost itself; return what was done, in words.

    `where`: the folder or URL of the run's copies. `iteration`: None for the newest copy; one that is damaged is named,
    and the one before it taken. Raises RelayrunError where there is no such copy, or none that is what was saved.
    """
    place = destination_at(where, CopyRateLimit(None))
    copied = mirror.copies_newest_first(place.copies())
    chosen = [copy for copy in copied if iteration in (None, copy.iteration)]
    if not chosen:
        have = ", ".join(str(copy.iteration) for copy in reversed(copied)) or "none"
        what = "no copy" if iteration is None else f"no copy of iteration {iteration}"
        raise InputError(f"there is {what}", where=where, hint=f"copies: {have}")
    target.mkdir(parents=True, exist_ok=True)
    with _alone_in(target):
        return _fetch_one(place, chosen, copied, target)


def _fetch_one(
    place: MirrorDestination, chosen: Sequence[CheckpointCopy], copied: Sequence[CheckpointCopy], target: Path
) -> list[str]:
    said: list[str] = []
    for copy in chosen:
        final = target / copy.name
        if os.path.lexists(final):
            raise InputError("something has this name already", where=final, hint="give another folder")
        try:
            _fetch(place, copy, copy.as_commit(place.where), target / ".staging" / copy.name)
        except CopyFailed as error:
            if copy is chosen[-1]:
                raise _offering(error, copy, copied) from None
            said.append(f"not restored: {error}")
            continue
        _name(target / ".staging" / copy.name, final)
        with contextlib.suppress(OSError):  # what a restore of another copy has left goes on later
            (target / ".staging").rmdir()
        size = sum(copy.files.values())
        return [*said, f"restored iteration {copy.iteration}: {size:,} bytes, verified: {final}"]
    return said


def _fetch(place: MirrorDestination, copy: CheckpointCopy, commit: CheckpointCommit, staged: Path) -> None:
    """Bring a copy into a folder, on from where an earlier try has stopped, and verify it.

    What an earlier try has left may be torn itself: then all is brought once more before the copy is blamed. Raises
    NotCopied where the copy is at fault, RunDirError where the folder cannot be written: no other copy helps then.
    """
    source = place.files(copy)
    goes_on = os.path.lexists(staged)
    try:
        # whoever reads from a store has the pace of its place
        stage_files(source, copy.as_commit(place.where), staged, CopyRateLimit(None))
        found, _ = copy_faults(LocalCheckpointFiles(staged), commit, hashes=copy.hashes)
        if found and goes_on:
            remove_tree(staged)
            stage_files(source, copy.as_commit(place.where), staged, CopyRateLimit(None))
            found, _ = copy_faults(LocalCheckpointFiles(staged), commit, hashes=copy.hashes)
    except OSError as error:
        why = f"{error.filename or staged}: {error.strerror or error}"
        hint = "make room, or mend it; the same command goes on where it was"
        raise RunDirError(f"iteration {copy.iteration} cannot be put there: {why}", where=staged, hint=hint) from None
    if found:
        remove_tree(staged)
        _marker(staged).unlink(missing_ok=True)
        raise CopyFailed(f"the copy of iteration {copy.iteration} is damaged: {found[0]}", where=source.where)


def _name(staged: Path, final: Path) -> None:
    os.rename(staged, final)
    fsync_directory(final.parent)
    _marker(staged).unlink(missing_ok=True)


def _marker(staged: Path) -> Path:
    """Where it stands of which commit the files are."""
    return staged.with_name(f"{staged.name}.json")


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Let no other process restore into the same folder meanwhile. Raises InputError where one does."""
    held = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError("another process restores into this folder now", where=folder) from None
        except OSError:  # a file system without locks
            pass
        yield
    finally:
        os.close(held)
