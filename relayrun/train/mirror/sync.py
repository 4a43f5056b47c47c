"""One pass over the checkpoints of a run: copy the missing, withdraw the damaged, remove the old."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from relayrun.control.rundir import checkpoint_records, mirror
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.mirror import CheckpointCopy, MirrorOwner, MirrorPass, MirrorPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError, RunDirError, on_interrupt, run_main
from relayrun.files import writable_by_owner_alone
from relayrun.leftovers import exclusive_lock, open_lock, remove_leftovers
from relayrun.train.mirror import destination
from relayrun.train.mirror.destination import CopyFailed, copy_faults, copy_name, source_faults

COPY_TRIES = 2
"""Tries to copy a checkpoint in one pass; then it is left for the next pass."""


@dataclass
class MirrorPassResult:
    """Report of a pass: lines about its work, and complaints about its failures."""

    lines: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def tell(self) -> int:
        """Print the report; return the exit code, 1 after a complaint."""
        for line in self.lines or ["nothing to copy"] * (not self.complaints):
            print(line)
        for complaint in self.complaints:
            print(f"error: {complaint}", file=sys.stderr)
        return int(bool(self.complaints))


def mirror_checkpoints(run: Run, *, verify: bool = False) -> MirrorPassResult:
    """Bring the copies of a run up to date; return a report. `verify`: read all copies back in full, too. Raises
    RelayrunError if the run has no mirror, its place is away or another run's, or another process copies now."""
    policy = trusted_policy(run)
    run.mirror.mkdir(exist_ok=True)
    with mirror_lock(run), writable_by_owner_alone():
        work = _MirrorPass(run, policy)
        try:
            work.all(verify=verify)
        except OSError as error:
            work.done.complaints.append(f"{error.filename or policy.folder}: {error.strerror or error}")
        except RelayrunError as error:
            work.done.complaints.append(str(error))
            raise
        finally:
            work.note()
        return work.done


def main() -> int:
    """Make the pass of the supervisor of a job; return the exit code, 1 after a complaint."""
    parser = argparse.ArgumentParser(prog="relayrun.train.mirror.sync")
    parser.add_argument("run", type=Path)
    return mirror_checkpoints(Run(parser.parse_args().run)).tell()


def trusted_policy(run: Run) -> MirrorPolicy:
    """Return the policy of a run whose files are trusted. Raises RunDirError, also if it has none."""
    Plan.load_trusted(run)
    policy = MirrorPolicy.read_trusted(run.path, mirror.MIRROR_POLICY_NAME)
    if policy is None:
        raise RunDirError(
            "the checkpoints of this run are not copied to a second place",
            where=run.path,
            hint="set checkpoint.mirror in its config and submit it again",
        )
    return policy


class _MirrorPass:
    """One pass over the checkpoints of a run."""

    def __init__(self, run: Run, policy: MirrorPolicy) -> None:
        self._run = run
        self._policy = policy
        self._place = Path(policy.folder)
        self.done = MirrorPassResult()
        self._ended = False

    def all(self, *, verify: bool) -> None:
        _open_destination(self._run, self._policy)
        mirror.write_copy_in_progress(self._run, None, now=time.time())  # of a pass that was killed
        self._tidy()
        self._look_at_copies(verify=verify)
        failed: set[int] = set()
        while commit := next((each for each in self._missing() if each.iteration not in failed), None):
            mirror.write_copy_in_progress(self._run, commit.iteration, now=time.time())
            try:
                self._copy(commit)
            except CopyFailed as error:
                failed.add(commit.iteration)
                self.done.complaints.append(str(error))
            finally:
                mirror.write_copy_in_progress(self._run, None, now=time.time())
        self._remove()
        self._ended = True

    def note(self) -> None:
        """Record the end of the pass, for people."""
        complaints = self.done.complaints or ["the pass was interrupted"] * (not self._ended)
        now, complaint = time.time(), "; ".join(complaints) or None
        last = MirrorPass(time=now, iteration=None, behind=0, complaint=complaint, seen=False)
        with contextlib.suppress(RelayrunError, OSError):
            if (before := MirrorPass.read(self._run.mirror_pass)) is not None:
                good_time = before.time if before.complaint is None else before.good_time
                last = replace(last, iteration=before.iteration, copies=before.copies, good_time=good_time)
            last = replace(last, behind=len(self._missing()))
            if mirror.read_owner(self._place) is not None:
                every = mirror.copies_newest_first(mirror.read_copies(self._place))
                counting = self._counting(every)
                whole = (copy.iteration for copy in counting if mirror.copy_fault(self._place, copy) is None)
                last = replace(last, iteration=next(whole, None), copies=len(every), seen=True)
        if complaint is None:
            last = replace(last, good_time=now)
        with contextlib.suppress(OSError):
            last.write(self._run.mirror_pass)

    def _line(self) -> dict[str, CheckpointCommit]:
        """Return the run's own commits that count, by the names of their copies."""
        own = [counted.commit for counted in Lineage(self._run).backwards() if counted.published]
        return {copy_name(commit): commit for commit in own}

    def _missing(self) -> list[CheckpointCommit]:
        """Return whole checkpoints that are still to be copied, newest first."""
        line, copied = self._line(), mirror.read_copies(self._place)
        whole = {name: commit for name, commit in line.items() if checkpoint_records.checkpoint_fault(commit) is None}
        there = {copy.iteration for name, copy in copied.items() if name in line and copy.is_of(line[name])}
        wanted = self._kept({commit.iteration for commit in whole.values()} | there)
        found = [commit for commit in whole.values() if commit.iteration in wanted - there]
        return sorted(found, key=lambda commit: commit.iteration, reverse=True)

    def _kept(self, iterations: set[int]) -> set[int]:
        rising, every = sorted(iterations), self._policy.keep_every
        return set(rising[-self._policy.keep_last :]) | {each for each in rising if every and each % every == 0}

    def _copy(self, commit: CheckpointCommit) -> None:
        """Copy a checkpoint, verify the copy and claim it. Raises CopyFailed, and OSError if the place fails."""
        began, name = time.monotonic(), copy_name(commit)
        staged, final = self._place / ".staging" / name, self._place / name
        for number in range(1, COPY_TRIES + 1):
            if os.path.lexists(final) and not os.path.lexists(staged):  # a kill came between name and claim
                os.rename(final, staged)
            destination.stage_files(Path(commit.path), commit, staged)
            found, hashes = copy_faults(staged, commit)
            if not found:
                break
            destination.remove_staged(staged)
            if known := source_faults(commit):
                raise CopyFailed(f"it is damaged: {known[0]}", where=commit.path, hint="verify it, and those before it")
            if number == COPY_TRIES:
                what = f"its copy is not what was saved, {COPY_TRIES} times: {found[0]}"
                raise CopyFailed(what, where=staged)
        copy = CheckpointCopy(
            name=name,
            iteration=commit.iteration,
            files=commit.files,
            checksum=commit.checksum,
            hashes=hashes,
            saved=commit.time,
            time=time.time(),
        )
        destination.publish(self._place, copy)
        mirror.record_verified(self._run, commit, now=time.time())
        size = sum(commit.files.values())
        self.done.lines.append(
            f"copied iteration {commit.iteration}: {size:,} bytes, verified, in {time.monotonic() - began:.1f} s"
        )
        self._remove()

    def _look_at_copies(self, *, verify: bool) -> None:
        """Withdraw damaged copies, and copies of iterations that were computed again."""
        line = self._line()
        for name, copy in mirror.read_copies(self._place).items():
            why = mirror.copy_fault(self._place, copy)
            if why is None and verify:
                found, _ = copy_faults(self._place / name, copy.as_commit(self._place), hashes=copy.hashes)
                why = found[0] if found else None
                self.done.lines += [f"verified iteration {copy.iteration}"] * (why is None)
            if why is not None:
                self.done.complaints.append(f"the copy of iteration {copy.iteration} is damaged: {why}")
                destination.withdraw(self._place, copy, why, to=".damaged")
            elif name in line and not copy.is_of(line[name]):  # training went back and saved it anew
                destination.withdraw(self._place, copy, "the iteration was computed again")

    def _remove(self) -> None:
        """Remove copies that no rule keeps, but never the newest that counts; nothing if that copy is not whole. Copies
        that no longer count after a rollback stay until the copies that count are beyond them."""
        every = mirror.copies_newest_first(mirror.read_copies(self._place))
        counting = self._counting(every)
        if not counting or mirror.copy_fault(self._place, counting[0]) is not None:
            return
        stays = self._kept({copy.iteration for copy in counting}) | {counting[0].iteration}
        for copy in every:
            if copy.iteration not in stays if copy in counting else copy.iteration < counting[0].iteration:
                destination.withdraw(self._place, copy, "newer ones are kept")
                self.done.lines.append(f"removed iteration {copy.iteration}")
        self._tidy()

    def _counting(self, copies: Iterable[CheckpointCopy]) -> list[CheckpointCopy]:
        """Return the copies that hold a checkpoint of the run's line, in their order."""
        line = self._line()
        return [copy for copy in copies if copy.name in line and copy.is_of(line[copy.name])]

    def _tidy(self) -> None:
        destination.tidy(self._place, set(self._line()), {copy_name(commit) for commit in self._missing()})


def _open_destination(run: Run, policy: MirrorPolicy) -> None:
    """Make the second place this run's. Raises RelayrunError if it belongs to another run, or is away."""
    last, place = MirrorPass.read(run.mirror_pass), Path(policy.folder)
    if last is not None and (last.copies or last.iteration is not None) and mirror.read_owner(place) is None:
        what = "copies were" if last.iteration is None else f"iteration {last.iteration} was copied"
        raise RunDirError(
            f"the second place is away, or was emptied: {what} there",
            where=place,
            hint=f"mount it again; to begin anew, remove {run.mirror / 'last.json'}",
        )
    check_owner(run, policy)
    if not place.parents[1].is_dir():
        raise RunDirError("there is no such folder", where=place.parents[1], hint="make it, or mount it")
    place.mkdir(parents=True, exist_ok=True)
    destination.refuse_place_of_others(place)
    (place / ".staging").mkdir(exist_ok=True)
    remove_leftovers(place)
    MirrorOwner(id=policy.id, run=str(run.path)).write(place / "mirror.json")


def check_owner(run: Run, policy: MirrorPolicy) -> None:
    """Raise RunDirError if the copies in the second place belong to another run."""
    owner = mirror.read_owner(Path(policy.folder))
    if owner is None:
        return
    elsewhere = owner.run != str(run.path) and is_still_mirrored(Run(Path(owner.run)), owner.id)
    if owner.id != policy.id or elsewhere:
        raise RunDirError(
            f"this place holds the copies of another run, {owner.run}",
            where=policy.folder,
            hint="set checkpoint.mirror.path to another place",
        )


def is_still_mirrored(run: Run, name: str) -> bool:
    """Return whether a run still copies under this id."""
    with contextlib.suppress(RunDirError, OSError):
        policy = MirrorPolicy.read(run.mirror_policy)
        return policy is not None and policy.id == name
    return False


@contextlib.contextmanager
def mirror_lock(run: Run) -> Iterator[None]:
    """Exclude other processes from copying or restoring checkpoints of the run. Raises RunDirError if one does."""
    refusal = RunDirError("another process copies the checkpoints of this run now", where=run.path)
    # without locks: all copies are verified anyway
    lock = exclusive_lock(open_lock(run.mirror / "lock"), refusal, optional=True)
    with lock, on_interrupt(lambda: "what is copied is kept; the same command goes on"):
        yield


if __name__ == "__main__":
    sys.exit(run_main(main))
