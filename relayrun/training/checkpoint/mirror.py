"""Copies the checkpoints of a run to a second place, and back. It knows nothing of torch.

A pass copies what is missing, the newest first: into `.staging` there, at most so many bytes a second, on from where
a killed pass has stopped. Then every byte of the copy is read back and compared with the hashes of its commit, or,
where a program saves without any, with the file that was copied. Only then does it get its name, and behind that its
line in `copies.jsonl`, which is the claim (`relayrun.rundir.mirror`). So a kill at any point leaves no false claim.

The newest copy is removed by no rule, and an older one only while that is whole.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.errors import InputError, RelayrunError, RunDirError, run_main
from relayrun.files import free_name, fsync_directory, read_json, sizes, write_json
from relayrun.rundir import lineage, mirror
from relayrun.rundir.lineage import Lineage
from relayrun.rundir.mirror import Copy, LastPass, MirrorPolicy, Owner
from relayrun.rundir.records import Commit
from relayrun.rundir.run import Run
from relayrun.shards.checksum import checksum_of
from relayrun.training.checkpoint import checksums

PIECE = 8 << 20
"""Bytes that are copied at a time."""
TRIES = 2
"""How often a checkpoint is copied in a pass before it is left for the next one."""


class NotCopied(RelayrunError):
    """A checkpoint could not be copied; the text says why."""


@dataclass
class Pace:
    """Keeps copying below so many bytes a second, on average since it began.

    `sleep` and `clock` are those of `time`, but in tests.
    """

    bytes_per_second: float | None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    _began: float | None = None
    _bytes: int = 0

    def spend(self, count: int) -> None:
        """Wait until so many more bytes may have been copied."""
        if self.bytes_per_second is None:
            return
        self._began = self.clock() if self._began is None else self._began
        self._bytes += count
        wait = self._began + self._bytes / self.bytes_per_second - self.clock()
        if wait > 0:
            self.sleep(wait)


@dataclass
class Done:
    """What a pass did, in words, and what it could not do."""

    lines: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def tell(self) -> int:
        """Print it; return the exit code, 1 where something was not copied."""
        for line in self.lines or ["nothing to copy"] * (not self.complaints):
            print(line)
        for complaint in self.complaints:
            print(f"error: {complaint}", file=sys.stderr)
        return int(bool(self.complaints))


def sync(run: Run, *, verify: bool = False, pace: Pace | None = None) -> Done:
    """Bring the copies of a run up to date; return what was done.

    `verify`: read all copies back in full, too. Raises RelayrunError where the run has no mirror, its place is away or
    another run's, and where another process copies now.
    """
    policy = mirror.read_policy(run)
    if policy is None:
        raise RunDirError(
            "the checkpoints of this run are not copied to a second place",
            where=run.path,
            hint="set checkpoint.mirror in its config and submit it again",
        )
    mirror.folder(run).mkdir(exist_ok=True)
    with _alone(run):
        rate = policy.megabytes_per_second
        work = _Pass(run, policy, pace or Pace(None if rate is None else rate * 1e6))
        try:
            return work.all(verify=verify)
        except OSError as error:
            complaint = f"{error.filename or policy.folder}: {error.strerror or error}"
            work.done.complaints.append(complaint)
            return work.done
        except RelayrunError as error:
            work.done.complaints.append(str(error))
            raise
        finally:
            work.note()


class _Pass:
    """One pass over the checkpoints of a run."""

    def __init__(self, run: Run, policy: MirrorPolicy, pace: Pace) -> None:
        self._run = run
        self._policy = policy
        self._pace = pace
        self._place = Path(policy.folder)
        self.done = Done()

    def all(self, *, verify: bool) -> Done:
        _open(self._run, self._policy)
        mirror.write_copying(self._run, None, now=time.time())  # of a pass that was killed
        self._tidy()
        self._look_at_copies(verify=verify)
        failed: set[int] = set()
        while (commit := self._next(failed)) is not None:
            mirror.write_copying(self._run, commit.iteration, now=time.time())
            try:
                self._copy(commit)
            except NotCopied as error:
                failed.add(commit.iteration)
                self.done.complaints.append(str(error))
            finally:
                mirror.write_copying(self._run, None, now=time.time())
        self._remove()
        return self.done

    def note(self) -> None:
        """Leave word for people of how it ended."""
        iteration, behind = None, 0
        with contextlib.suppress(RelayrunError, OSError):
            before = mirror.read_last(self._run)
            iteration = None if before is None else before.iteration  # where the place is away
            behind = len(self._missing())
            if (self._place / "mirror.json").exists():
                newest = mirror.newest_first(mirror.copies(self._place))
                iteration = newest[0].iteration if newest else None
        last = LastPass(
            time=time.time(), iteration=iteration, behind=behind, complaint="; ".join(self.done.complaints) or None
        )
        with contextlib.suppress(OSError):
            mirror.write_last(self._run, last)

    def _line(self) -> dict[str, Commit]:
        """The run's own commits that count, by the names of their copies."""
        own = [counted.commit for counted in Lineage(self._run).backwards() if counted.published]
        return {os.path.basename(commit.path): commit for commit in own}

    def _missing(self) -> list[Commit]:
        """Whole checkpoints that should be copied and are not, the newest first."""
        line, copied = self._line(), mirror.copies(self._place)
        whole = {name: commit for name, commit in line.items() if lineage.fault(commit) is None}
        there = {copy.iteration for name, copy in copied.items() if name in line and copy.is_of(line[name])}
        wanted = self._kept({commit.iteration for commit in whole.values()} | there)
        found = [commit for commit in whole.values() if commit.iteration in wanted - there]
        return sorted(found, key=lambda commit: commit.iteration, reverse=True)

    def _kept(self, iterations: set[int]) -> set[int]:
        return mirror.kept(iterations, keep_last=self._policy.keep_last, keep_every=self._policy.keep_every)

    def _next(self, failed: set[int]) -> Commit | None:
        return next((commit for commit in self._missing() if commit.iteration not in failed), None)

    def _copy(self, commit: Commit) -> None:
        """Copy a checkpoint, verify it, give it its name, claim it. Raises NotCopied; OSError where the place fails."""
        name = os.path.basename(commit.path)
        staged, final = self._place / ".staging" / name, self._place / name
        if mirror.exists(final) and not mirror.exists(staged):  # a kill came between name and claim
            os.rename(final, staged)
        began = time.monotonic()
        faults: list[str] = []
        for _ in range(TRIES):
            _stage(commit, staged, self._pace)
            faults, hashes = _faults(staged, commit)
            if not faults:
                break
            _remove_tree(staged)
            if known := _source_faults(commit):
                raise NotCopied(f"it is damaged: {known[0]}", where=commit.path, hint="verify it, and those before it")
        else:
            raise NotCopied(f"its copy is not what was saved, {TRIES} times: {faults[0]}", where=staged)
        self._publish(commit, staged, final, hashes)
        mirror.note_verified(self._run, commit, now=time.time())
        size = sum(commit.files.values())
        self.done.lines.append(
            f"copied iteration {commit.iteration}: {size:,} bytes, verified, in {time.monotonic() - began:.1f} s"
        )
        self._remove()

    def _publish(self, commit: Commit, staged: Path, final: Path, hashes: dict[str, str]) -> None:
        if mirror.exists(final):  # unclaimed: what a kill left, or of another commit of this iteration
            self._put_away(final, ".removing")
        os.rename(staged, final)
        fsync_directory(self._place)
        copy = Copy(
            name=final.name,
            iteration=commit.iteration,
            files=commit.files,
            checksum=commit.checksum,
            hashes=hashes,
            saved=commit.time,
            time=time.time(),
        )
        mirror.claim(self._place, copy)
        staged.with_name(f"{staged.name}.json").unlink(missing_ok=True)

    def _look_at_copies(self, *, verify: bool) -> None:
        """Take back what is claimed and is not so."""
        line = self._line()
        for name, copy in mirror.copies(self._place).items():
            why = copy.fault(self._place)
            if why is None and verify:
                found, _ = _faults(self._place / name, copy.as_commit(self._place), hashes=copy.hashes)
                why = found[0] if found else None
                self.done.lines += [f"verified iteration {copy.iteration}"] * (why is None)
            if why is not None:
                mirror.take_back(self._place, copy, why, now=time.time())
                self.done.complaints.append(f"the copy of iteration {copy.iteration} is damaged: {why}")
                if mirror.exists(self._place / name):
                    self._put_away(self._place / name, ".damaged")
            elif name in line and not copy.is_of(line[name]):  # training went back and saved it anew
                mirror.take_back(self._place, copy, "the iteration was computed again", now=time.time())
                self._put_away(self._place / name, ".removing")

    def _remove(self) -> None:
        """Remove what no rule keeps; never the newest that counts, and nothing where that is not whole.

        What does not count any more, since training went back, stays until the copies that count are beyond it.
        """
        line = self._line()
        every = mirror.newest_first(mirror.copies(self._place))
        counting = [copy for copy in every if copy.name in line and copy.is_of(line[copy.name])]
        if not counting or counting[0].fault(self._place) is not None:
            return
        stays = self._kept({copy.iteration for copy in counting}) | {counting[0].iteration}
        for copy in every:
            if copy.iteration not in stays if copy in counting else copy.iteration < counting[0].iteration:
                mirror.take_back(self._place, copy, "newer ones are kept", now=time.time())
                self._put_away(self._place / copy.name, ".removing")
                self.done.lines.append(f"removed iteration {copy.iteration}")
        self._tidy()

    def _put_away(self, path: Path, where: str) -> None:
        folder = self._place / where
        folder.mkdir(exist_ok=True)
        os.rename(path, free_name(folder, path.name))
        fsync_directory(self._place)

    def _tidy(self) -> None:
        """Remove what a rule or a kill has left for it: nothing that is claimed, or that is still to be copied."""
        missing = {os.path.basename(commit.path) for commit in self._missing()}
        claimed = mirror.copies(self._place)
        for name in {*self._line(), *mirror.withdrawn(self._place)} - claimed.keys() - missing:
            if mirror.exists(self._place / name):
                self._put_away(self._place / name, ".removing")
        shutil.rmtree(self._place / ".removing", ignore_errors=True)
        for entry in (self._place / ".staging").iterdir():
            if entry.name.removesuffix(".json") not in missing:
                _remove_tree(entry)


def restore(run: Run, iteration: int | None, *, pace: Pace | None = None) -> list[str]:
    """Put a copy back where the run's records say that it was; return what was done, in words.

    `iteration`: None for the newest one that counts and is missing or torn in the run. No job of the run may live.
    Raises RelayrunError where there is no such copy, or none that is what was saved.
    """
    policy = mirror.read_policy(run)
    if policy is None:
        raise RunDirError("this run has no second place", where=run.path, hint="see checkpoint.mirror")
    place = Path(policy.folder)
    _check_owner(run, policy)
    copied = mirror.newest_first(mirror.copies(place))
    line = {commit.iteration: commit for commit in Lineage(run).line()}
    candidates = [copy for copy in copied if copy.iteration in line and copy.is_of(line[copy.iteration])]
    chosen = [copy for copy in candidates if iteration in (None, copy.iteration)]
    have = ", ".join(str(copy.iteration) for copy in reversed(candidates)) or "none"
    if not chosen:
        what = "no checkpoint of this run that counts" if iteration is None else f"no copy of iteration {iteration}"
        raise InputError(f"the second place has {what}", where=place, hint=f"copies that count: {have}")
    said: list[str] = []
    for copy in chosen:
        commit = line[copy.iteration]
        if lineage.fault(commit) is None:
            if said or iteration is not None:
                return [*said, f"iteration {copy.iteration} is whole in the run: {commit.path}"]
            raise InputError(
                f"the newest copy, of iteration {copy.iteration}, is whole in the run: there is nothing to restore",
                where=commit.path,
                hint="name an iteration as RUN:N, or look at the bytes with `relayrun checkpoint verify`",
            )
        try:
            said.append(_put_back(run, place, copy, commit, pace or Pace(None)))
        except NotCopied as error:
            if iteration is not None or copy is chosen[-1]:
                raise
            said.append(f"not restored: {error}")
            continue
        return said
    return said


def _put_back(run: Run, place: Path, copy: Copy, commit: Commit, pace: Pace) -> str:
    source = copy.as_commit(place)
    staged = run.checkpoints / ".staging" / "restore" / copy.name
    try:
        _stage(source, staged, pace)
    except OSError as error:
        raise NotCopied(f"the copy cannot be put back: {error.strerror or error}", where=source.path) from None
    faults, _ = _faults(staged, commit, hashes=copy.hashes)
    if faults:
        _remove_tree(staged)
        raise NotCopied(f"the copy of iteration {copy.iteration} is damaged: {faults[0]}", where=source.path)
    final = Path(commit.path)
    if mirror.exists(final):
        aside = run.checkpoints / ".superseded"
        aside.mkdir(exist_ok=True)
        os.rename(final, free_name(aside, f"{final.name}-torn"))
    os.rename(staged, final)
    fsync_directory(final.parent)
    staged.with_name(f"{staged.name}.json").unlink(missing_ok=True)
    mirror.note_verified(run, commit, now=time.time())
    return f"restored iteration {copy.iteration}: {sum(copy.files.values()):,} bytes, verified: {final}"


def _open(run: Run, policy: MirrorPolicy) -> None:
    """Make the second place this run's, or see that it is. Raises RelayrunError where it is another's."""
    place = Path(policy.folder)
    last = mirror.read_last(run)
    if last is not None and last.iteration is not None and not (place / "mirror.json").exists():
        raise RunDirError(
            f"the second place is away, or was emptied: iteration {last.iteration} was copied there",
            where=place,
            hint=f"mount it again; to begin anew, remove {mirror.folder(run) / 'last.json'}",
        )
    if not place.parents[1].is_dir():
        raise RunDirError("there is no such folder", where=place.parents[1], hint="make it, or mount it")
    place.mkdir(parents=True, exist_ok=True)
    _check_owner(run, policy)
    (place / ".staging").mkdir(exist_ok=True)
    Owner(id=policy.id, run=str(run.path)).write(place / "mirror.json")


def _check_owner(run: Run, policy: MirrorPolicy) -> None:
    place = Path(policy.folder)
    owner = Owner.read(place / "mirror.json")
    if owner is None:
        return
    elsewhere = owner.run != str(run.path) and _is_mirrored(Run(Path(owner.run)), owner.id)
    if owner.id != policy.id or elsewhere:
        raise RunDirError(
            f"this folder holds the copies of another run, {owner.run}",
            where=place,
            hint="set checkpoint.mirror.path to another folder",
        )


def _is_mirrored(run: Run, name: str) -> bool:
    """Whether a run is still there that copies under this id."""
    with contextlib.suppress(RunDirError, OSError):
        policy = mirror.read_policy(run)
        return policy is not None and policy.id == name
    return False


@contextlib.contextmanager
def _alone(run: Run) -> Iterator[None]:
    with open(mirror.folder(run) / "lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError("another process copies the checkpoints of this run now", where=run.path) from None
        except OSError:  # a file system without locks: what two of them write is verified all the same
            pass
        yield


def _stage(commit: Commit, staged: Path, pace: Pace) -> None:
    """Copy what is missing of a checkpoint; on from what an earlier try of the same commit has left.

    Raises NotCopied where the checkpoint is away or changes, OSError where the target cannot be written.
    """
    identity = {"iteration": commit.iteration, "checksum": commit.checksum, "time": commit.time, "files": commit.files}
    marker = staged.with_name(f"{staged.name}.json")
    try:
        same = read_json(marker) == identity
    except (FileNotFoundError, ValueError):
        same = False
    if not same:
        _remove_tree(staged)
        staged.parent.mkdir(parents=True, exist_ok=True)
        write_json(marker, identity)
    for name, size in commit.files.items():
        source = Path(commit.path) if name == "." else Path(commit.path) / name
        target = staged if name == "." else staged / name
        target.parent.mkdir(parents=True, exist_ok=True)
        _copy_file(source, target, size, pace)
    folders = [staged, *(path for path in staged.rglob("*") if path.is_dir())] if staged.is_dir() else []
    for folder in [*folders, staged.parent]:
        fsync_directory(folder)


def _copy_file(source: Path, target: Path, size: int, pace: Pace) -> None:
    with open(target, "ab", buffering=0) as out:
        done = out.tell()
        if done > size:
            out.truncate(0)
            done = 0
        try:
            read = open(source, "rb", buffering=0)  # noqa: SIM115 - closed below
        except OSError as error:
            raise NotCopied(f"it cannot be read: {error.strerror}", where=source) from None
        with read:
            read.seek(done)
            while done < size:
                try:
                    piece = read.read(min(PIECE, size - done))
                except OSError as error:
                    raise NotCopied(f"it cannot be read: {error.strerror}", where=source) from None
                if not piece:
                    raise NotCopied(f"it has {done} bytes, not {size}", where=source)
                view = memoryview(piece)
                while view:
                    view = view[out.write(view) :]
                done += len(piece)
                pace.spend(len(piece))
        os.fsync(out.fileno())
        os.posix_fadvise(out.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # what is verified comes from the disk


def _faults(folder: Path, commit: Commit, *, hashes: dict[str, str] | None = None) -> tuple[list[str], dict[str, str]]:
    """Read a copy back in full: what is wrong with it, and the hash of each file where its commit has no root.

    `hashes`: what the files must have where there is no root; without them they are compared with the commit's own.
    """
    if sizes(folder) != commit.files:
        return ["its files have not the names and sizes that were saved"], {}
    if commit.checksum is not None:
        return checksums.verify(folder, commit.checksum)[1], {}
    found = _hashes(folder, commit)
    expected = _hashes(Path(commit.path), commit) if hashes is None else hashes
    return [f"{name} is not the one that was saved" for name in found if found[name] != expected.get(name)], found


def _hashes(path: Path, commit: Commit) -> dict[str, str]:
    return {name: checksum_of(path if name == "." else path / name) for name in commit.files}


def _source_faults(commit: Commit) -> list[str]:
    """What is wrong with a checkpoint itself, where its copy was not right."""
    if (torn := lineage.fault(commit)) is not None:
        return [torn]
    return [] if commit.checksum is None else checksums.verify(Path(commit.path), commit.checksum)[1]


def _remove_tree(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def main() -> int:
    """Make one pass for a run directory, as the supervisor of a job starts it."""
    parser = argparse.ArgumentParser(prog="relayrun.training.checkpoint.mirror")
    parser.add_argument("run", type=Path)
    return sync(Run(parser.parse_args().run)).tell()


if __name__ == "__main__":
    sys.exit(run_main(main))
