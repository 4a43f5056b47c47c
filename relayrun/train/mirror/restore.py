"""Restores copies from a second place: to their place in the run, or into any folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from relayrun.control.rundir import checkpoint_records, mirror
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.mirror import CheckpointCopy
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RunDirError, on_interrupt
from relayrun.files import fsync_directory, unused_name
from relayrun.leftovers import exclusive_lock, rename_no_replace
from relayrun.train.mirror.destination import CopyFailed, commit_marker, copy_faults, remove_staged, stage_files
from relayrun.train.mirror.sync import check_owner, mirror_lock, trusted_policy


def restore_copy(run: Run, iteration: int | None) -> list[str]:
    """Restore a copy to the place in the run's records; return a report, line by line. `iteration`: None for the newest
    copy that counts and whose checkpoint is missing or torn in the run. No job of the run may live. Raises
    RelayrunError if there is no such copy, or every such copy is damaged."""
    policy = trusted_policy(run)
    check_owner(run, policy)
    if run.checkpoints.is_symlink() and not run.checkpoints.exists():
        away = os.path.realpath(run.checkpoints)
        raise RunDirError(
            f"this is a link to a folder that is not there: {away}",
            where=run.checkpoints,
            hint=f"mount it, or: {shlex.join(['mkdir', '-p', away])}",
        )
    with mirror_lock(run):
        return _restore(run, iteration, Path(policy.folder))


def _restore(run: Run, iteration: int | None, place: Path) -> list[str]:
    copied = mirror.copies_newest_first(mirror.read_copies(place))
    line = {commit.iteration: commit for commit in Lineage(run).line()}
    candidates = [copy for copy in copied if copy.iteration in line and copy.is_of(line[copy.iteration])]
    chosen = [copy for copy in candidates if iteration in (None, copy.iteration)]
    have = ", ".join(str(copy.iteration) for copy in reversed(candidates)) or "none"
    newer = _uncounted(place, copied, candidates)
    if not chosen:
        what = "no checkpoint of this run" if iteration is None else f"no copy of iteration {iteration}"
        hint = "; ".join([f"copies that count: {have}", *newer])
        raise InputError(f"the second place has {what} that counts", where=place, hint=hint)

    def put_back(copy: CheckpointCopy) -> str:
        commit = line[copy.iteration]
        if checkpoint_records.checkpoint_fault(commit) is not None:
            return _put_back(run, place, copy, commit)
        if copy is not chosen[0] or iteration is not None:
            return f"iteration {copy.iteration} is whole in the run: {commit.path}"
        ways = ["name an iteration as RUN:N, or look at the bytes with `relayrun checkpoint verify`", *newer]
        raise InputError(
            f"the newest copy, of iteration {copy.iteration}, is whole in the run: there is nothing to restore",
            where=commit.path,
            hint="; ".join(ways),
        )

    return [*newer, *_first_intact(chosen, candidates, put_back)]


def _first_intact(
    chosen: Sequence[CheckpointCopy], others: Sequence[CheckpointCopy], bring: Callable[[CheckpointCopy], str]
) -> list[str]:
    """Bring the first intact copy of `chosen`; return a report. Raises CopyFailed, which names one of `others`."""
    said: list[str] = []
    for copy in chosen:
        try:
            return [*said, bring(copy)]
        except CopyFailed as error:
            if copy is chosen[-1]:
                before = next((each.iteration for each in others if each.iteration < copy.iteration), None)
                hint = None if before is None else f"there is a copy of iteration {before}, too: name it as :{before}"
                raise CopyFailed(error.message, where=error.where, hint=error.hint or hint) from None
            said.append(f"not restored: {error}")
    return said


def _uncounted(place: Path, copied: Sequence[CheckpointCopy], counting: Sequence[CheckpointCopy]) -> list[str]:
    """Return a line about a copy that is newer than every copy in the run's records, or an empty list."""
    if not copied or copied[0].iteration <= (counting[0].iteration if counting else 0):
        return []
    number = copied[0].iteration
    return [
        f"a copy of iteration {number} is there, too, which the run's records do not count: training went back, or "
        f"they are older than it; `relayrun checkpoint restore {place}:{number} --to FOLDER` brings it"
    ]


def _put_back(run: Run, place: Path, copy: CheckpointCopy, commit: CheckpointCommit) -> str:
    staged = run.checkpoints / ".staging" / "restore" / copy.name
    _fetch(place, copy, commit, staged)
    final = Path(commit.path)
    if os.path.lexists(final):
        aside = run.checkpoints / ".superseded"
        aside.mkdir(exist_ok=True)
        os.rename(final, unused_name(aside, f"{final.name}-torn"))
    _name(staged, final)
    mirror.record_verified(run, commit, now=time.time())
    return _restored(copy, final)


def _restored(copy: CheckpointCopy, final: Path) -> str:
    return f"restored iteration {copy.iteration}: {sum(copy.files.values()):,} bytes, verified: {final}"


@on_interrupt(lambda: "what is copied is kept; the same command goes on")
def fetch_copy(where: str, iteration: int | None, target: Path) -> list[str]:
    """Restore a copy of a lost run into a folder; return a report, line by line. `where`: the folder of the run's
    copies. `iteration`: None for the newest copy; a damaged copy is reported, and the copy before it taken.
    Raises RelayrunError if there is no such copy, or every such copy is damaged."""
    place = Path(where)
    copied = mirror.copies_newest_first(mirror.read_copies(place))
    chosen = [copy for copy in copied if iteration in (None, copy.iteration)]
    if not chosen:
        have = ", ".join(str(copy.iteration) for copy in reversed(copied)) or "none"
        what = "there is no copy" + ("" if iteration is None else f" of iteration {iteration}")
        found = (path for deep in ("*", "*/*") for path in place.glob(f"{deep}/copies.jsonl"))
        hint = "; ".join([f"copies: {have}", *(f"did you mean {path.parent}?" for path in found)])
        raise InputError(what, where=where, hint=hint)
    target.mkdir(parents=True, exist_ok=True)
    staging = target / ".staging"

    def fetch(copy: CheckpointCopy) -> str:
        final = target / copy.name
        if not os.path.lexists(final):
            _fetch(place, copy, copy.as_commit(place), staging / copy.name)
            _name(staging / copy.name, final)
            said = _restored(copy, final)
        elif not copy_faults(final, copy.as_commit(place), hashes=copy.hashes)[0]:
            remove_staged(staging / copy.name)  # of a call that was killed just then
            said = f"iteration {copy.iteration} is there already, verified: {final}"
        else:
            raise InputError("something has this name already", where=final, hint="give another folder")
        with contextlib.suppress(OSError):  # the remains of another restore stay
            staging.rmdir()
        return said

    refusal = InputError("another process restores into this folder now", where=target)
    with exclusive_lock(os.open(target, os.O_RDONLY), refusal, optional=True):
        return _first_intact(chosen, copied, fetch)


def _fetch(place: Path, copy: CheckpointCopy, commit: CheckpointCommit, staged: Path) -> None:
    """Bring a copy into a folder, on from the remains of an earlier try, and verify it. Raises CopyFailed if the copy
    is damaged, RunDirError if the folder cannot be written: no other copy helps then."""
    try:
        # the remains may be torn themselves: then all is brought once more before the copy is blamed
        for _ in range(1 + os.path.lexists(staged)):
            stage_files(place / copy.name, copy.as_commit(place), staged)
            found = copy_faults(staged, commit, hashes=copy.hashes)[0]
            if not found:
                return
            remove_staged(staged)
    except OSError as error:
        why = f"{error.filename or staged}: {error.strerror or error}"
        hint = "make room, or mend it; the same command goes on where it was"
        raise RunDirError(f"iteration {copy.iteration} cannot be put there: {why}", where=staged, hint=hint) from None
    raise CopyFailed(f"the copy of iteration {copy.iteration} is damaged: {found[0]}", where=place / copy.name)


def _name(staged: Path, final: Path) -> None:
    rename_no_replace(staged, final)
    fsync_directory(final.parent)
    commit_marker(staged).unlink(missing_ok=True)
