"""Moves a run directory to another place, and removes the original when every byte of the copy was read back.

Inside one file system it is one rename. Elsewhere a copy grows beside the target:

    .relayrun-moving-NAME/moving.json    whose copy it is
    .relayrun-moving-NAME/run/           the copy
    .relayrun-moving-NAME/proven.jsonl   a line for each file that was copied, synced, read back and found equal

A call that is killed goes on with the files that have no line yet. Then the original is compared with those lines once
more, the copy gets its name, the original is renamed to `.relayrun-moved-NAME` and removed. So a kill at any point
leaves the whole original, or the whole copy under its name, or both.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.control.rundir.plan import Plan, chain_job_name
from relayrun.control.rundir.run import PLAN_NAME, Run
from relayrun.errors import InputError, RunDirError, on_interrupt
from relayrun.files import append_line, free_space, fsync_directory, read_json, read_json_lines, write_json
from relayrun.leftovers import exclusive_lock, open_lock, remove_leftovers, rename_no_replace
from relayrun.progress import Progress, count
from relayrun.tokens.stores.direct_io import HashingFile, file_checksum
from relayrun.trust import write_owned

CHUNK_BYTES = 8 << 20
"""Bytes that are copied at a time."""


@dataclass(frozen=True, kw_only=True)
class RunDirEntry:
    """A file, folder or link of a run directory, as it was when it was looked at."""

    kind: str
    """`file`, `folder`, `link`, or `other`: a socket or pipe, which is nobody's without its process."""
    size: int = 0
    changed: int = 0
    """Time of a file's last write, in nanoseconds since 1970."""
    mode: int = 0
    target: str = ""
    """Target of a link."""

    def is_same(self, line: dict[str, Any]) -> bool:
        """Return True if a line of `proven.jsonl` describes this file as it is now."""
        return (self.kind, self.size, self.changed) == ("file", line["size"], line["changed"])


def list_entries(top: Path, *, on_error: Callable[[OSError], None] | None = None) -> dict[str, RunDirEntry]:
    """Return all that lies in a folder, by its path below it, folders before what is in them; links are not followed.
    `on_error`: called with the error of an entry that cannot be looked at; None: OSError is raised."""
    found: dict[str, RunDirEntry] = {}

    def failed(error: OSError) -> None:
        if on_error is None:
            raise error
        on_error(error)

    def look(folder: str, prefix: str) -> None:
        with os.scandir(folder) as listed:
            here = sorted(listed, key=lambda entry: entry.name)
        for each in here:
            name = f"{prefix}{each.name}"
            try:
                info = each.stat(follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    found[name] = RunDirEntry(kind="folder", mode=stat.S_IMODE(info.st_mode))
                    look(each.path, f"{name}/")
                elif stat.S_ISLNK(info.st_mode):
                    found[name] = RunDirEntry(kind="link", target=os.readlink(each.path))
                elif stat.S_ISREG(info.st_mode):
                    mode = stat.S_IMODE(info.st_mode)
                    found[name] = RunDirEntry(kind="file", size=info.st_size, changed=info.st_mtime_ns, mode=mode)
                else:
                    found[name] = RunDirEntry(kind="other")
            except OSError as error:
                failed(error)

    try:
        look(str(top), "")
    except OSError as error:
        failed(error)
    return found


def move_run_directory(run: Run, target: Path) -> None:
    """Move the directory of a run whose chain has ended to `target`, which does not exist yet; an earlier call's copy
    goes on. Prints each step. Raises InputError for an impossible target, RunDirError if the run changes meanwhile or
    cannot be moved: the original is there as before, or the error says that the copy is whole."""
    source = Path(os.path.realpath(run.path))
    target = Path(os.path.realpath(target.parent)) / target.name
    try:
        _move(source, target)
    except OSError as error:
        words = f"it is not moved: {error.filename or target}: {error.strerror or error}"
        hint = "nothing is removed from the original; the same command goes on where it was"
        raise RunDirError(words, where=source, hint=hint) from None


def finish_move(source: Path, target: Path) -> list[str]:
    """Remove what a killed call has left of an original whose copy has its name; return what is done, in words."""
    rest, staging = renamed_source(source), _staging(target)
    left = [path for path in (rest, staging) if path.is_dir()]
    if os.path.lexists(source) or not (target / PLAN_NAME).is_file():
        return []
    if left and (_is_staging_of(staging, source) or not any(staging.glob("*"))):
        _remove(left, target)
        return [f"removed what was left of {source}; the run is in {target}"]
    plan = Plan.load(Run(target))
    project, _, name = plan.run.partition("/")
    if not left and plan.job_name == chain_job_name(project, name, source):
        return [f"this is done already: the run is in {target}"]
    return []


@on_interrupt(lambda: "the run is whole; the same command goes on")
def _move(source: Path, target: Path) -> None:
    staging = _staging(target)
    # a call was killed after it gave the copy its name
    published = (target / "plan.json").is_file() and (staging / "proven.jsonl").exists()
    published = published and _is_staging_of(staging, source) and not (staging / "run").exists()
    if target == source or source in target.parents:
        raise InputError("a run cannot be moved into itself", where=target)
    if os.path.lexists(target) and not published:
        raise InputError("something is there already", where=target, hint="name another place")
    target.parent.mkdir(parents=True, exist_ok=True)
    refusal = RunDirError("another process submits or moves this run now", where=source)
    # without locks what changes meanwhile is found
    with exclusive_lock(open_lock(source / ".submit.lock"), refusal, optional=True):
        if not published:
            found = list_entries(source)
            _refuse_links(source, found, target)
            if not staging.exists():
                try:
                    rename_no_replace(source, target)
                    fsync_directory(target.parent)
                    fsync_directory(source.parent)
                    print(f"renamed to {target}: it is the same file system")
                    _report_absolute_links(found, source)
                    return
                except OSError as error:
                    if error.errno != errno.EXDEV:
                        raise
            _copy(source, target, staging, found)
        if (target / PLAN_NAME).is_file():
            remove_leftovers(target)  # of a call that was killed in the next line
            write_owned(target / PLAN_NAME, read_json(target / PLAN_NAME))
        try:
            _unchanged(source, _proven(staging))
        except RunDirError as error:
            hint = f"{target} holds the run as it was: keep one of the two"
            raise RunDirError(error.message, where=source, hint=hint) from None
        found = list_entries(target)
        files = [entry.size for entry in found.values() if entry.kind == "file"]
        print(f"{len(files):,} files, {sum(files):,} bytes are in {target}, each read back: the copy is whole")
        aside = renamed_source(source)
        if aside.exists():  # of an earlier run of this name, which was proven, too
            shutil.rmtree(aside)
        os.rename(source, aside)
        fsync_directory(source.parent)
    _remove([aside, staging], target)
    print(f"{source} is removed")
    _report_absolute_links(found, source)


def _remove(paths: list[Path], target: Path) -> None:
    """Remove what is left of an original. Raises RunDirError, which says that the copy is whole."""
    for path in paths:
        try:
            (path / "proven.jsonl").unlink(missing_ok=True)  # the last file tells whose copy it was
            shutil.rmtree(path)
        except OSError as error:
            why = error.strerror or error
            words = f"the run is whole in {target}; what is left of the original cannot be removed: {why}"
            raise RunDirError(words, where=error.filename or path, hint="the same command goes on with that") from None


def _refuse_links(source: Path, found: dict[str, RunDirEntry], target: Path) -> None:
    """Raise RunDirError if a relative link would lead elsewhere from the target."""
    if target.parent == source.parent:
        return
    for name, entry in found.items():
        if entry.kind != "link" or os.path.isabs(entry.target):
            continue
        if Path(os.path.normpath(os.path.join(os.path.dirname(name), entry.target))).parts[:1] == ("..",):
            words = f"a relative link leads out of the run directory: {name} -> {entry.target}"
            raise RunDirError(words, where=source, hint="make it an absolute one: ln -sfn")


def _report_absolute_links(found: dict[str, RunDirEntry], source: Path) -> None:
    """Report absolute links, which lead to their former targets."""
    for name, entry in found.items():
        if os.path.isabs(entry.target):
            if source in (Path(entry.target), *Path(entry.target).parents):
                print(f"{name} is a link into {source}, where nothing is any more: {entry.target}")
            else:
                print(f"{name} is a link, as it was: what it leads to is not copied")


def _copy(source: Path, target: Path, staging: Path, found: dict[str, RunDirEntry]) -> None:
    """Copy all files that are not proven yet, prove them, and give the copy its name."""
    _open_staging(staging, source)
    proven = _proven(staging)
    todo = {
        name: entry
        for name, entry in found.items()
        if entry.kind == "file" and not (name in proven and entry.is_same(proven[name]))
    }
    needed, free = sum(entry.size for entry in todo.values()), free_space(staging)
    if needed > free:
        raise InputError(
            f"{needed:,} bytes are to be copied, and {free:,} are free", where=target.parent, hint="make room there"
        )
    copy = staging / "run"
    _remove_others(copy, found)
    for name, entry in found.items():
        if entry.kind == "folder":
            (copy / name).mkdir(exist_ok=True)
        elif entry.kind == "link" and not os.path.lexists(copy / name):
            os.symlink(entry.target, copy / name)
    with Progress("copying and reading back", 2 * needed):
        for name, entry in todo.items():
            digest = _copy_file(source / name, copy / name, entry)
            line = {"name": name, "size": entry.size, "changed": entry.changed, "xxh3_128": digest}
            append_line(staging / "proven.jsonl", line)
    for name, entry in reversed(found.items()):
        if entry.kind == "folder":  # behind what is in it: it may be one that nobody may write into
            os.chmod(copy / name, entry.mode)
            fsync_directory(copy / name)
    os.chmod(copy, stat.S_IMODE(source.stat().st_mode))
    _unchanged(source, _proven(staging))
    there = list_entries(copy)
    if {name: entry.size for name, entry in there.items()} != {
        name: entry.size for name, entry in found.items() if entry.kind != "other"
    }:
        raise RunDirError("the copy has other files than the run", where=copy, hint="somebody writes there")
    rename_no_replace(copy, target)
    fsync_directory(target.parent)


def _copy_file(source: Path, target: Path, entry: RunDirEntry) -> str:
    """Copy one file and read it back; return its hash. Raises RunDirError if it is not the same."""
    target.unlink(missing_ok=True)
    fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(source, "rb", buffering=0) as read, os.fdopen(fd, "wb") as file:
        written = HashingFile(file)
        while piece := read.read(CHUNK_BYTES):
            written.write(piece)
            count(len(piece))
        os.fsync(written.fileno())
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the check reads from the disk
    digest = written.hexdigest()
    if written.bytes != entry.size:
        raise RunDirError(f"it changes while it is moved: {source}", where=source, hint="who writes there?")
    if file_checksum(target) != digest:
        raise RunDirError(
            f"what was read back is not what was written: {target}", where=source, hint="the place loses bytes"
        )
    os.chmod(target, entry.mode)
    os.utime(target, ns=(entry.changed, entry.changed))
    return digest


def _unchanged(source: Path, proven: dict[str, dict[str, Any]]) -> None:
    """Raise RunDirError unless every file of the original was proven as it is now."""
    for name, entry in list_entries(source).items():
        if entry.kind == "file" and not (name in proven and entry.is_same(proven[name])):
            hint = "find out who writes there; then call the same command again: nothing is removed"
            raise RunDirError(f"it changed since it was copied: {name}", where=source, hint=hint)


def _remove_others(copy: Path, found: dict[str, RunDirEntry]) -> None:
    """Remove what an earlier call has copied and the run has no more, or has as something else."""
    copy.mkdir(exist_ok=True)
    for name, entry in list_entries(copy).items():
        path = copy / name
        if name in found and (found[name].kind, found[name].target) == (entry.kind, entry.target):
            continue
        if entry.kind == "folder":
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _staging(target: Path) -> Path:
    return target.parent / f".relayrun-moving-{target.name}"


def renamed_source(source: Path) -> Path:
    """Return the path of an original while it is removed."""
    return source.parent / f".relayrun-moved-{source.name}"


def _open_staging(staging: Path, source: Path) -> None:
    """Make the folder of the copy, or go on with it. Raises InputError if another run's copy is there."""
    staging.mkdir(exist_ok=True)
    if not (staging / "moving.json").exists():
        write_json(staging / "moving.json", {"source": str(source)})
    elif not _is_staging_of(staging, source):
        hint = "finish that one first, or remove the folder"
        raise InputError("another run is being moved to this place", where=staging, hint=hint)


def _is_staging_of(staging: Path, source: Path) -> bool:
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
        return bool(read_json(staging / "moving.json")["source"] == str(source))
    return False


def _proven(staging: Path) -> dict[str, dict[str, Any]]:
    return {line["name"]: line for line in read_json_lines(staging / "proven.jsonl")}
