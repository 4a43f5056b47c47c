"""Outputs of commands: an output appears whole under its name, or not at all, and nothing of others is touched.

    .NAME.lock            says who makes NAME; the kernel frees it when that process ends
    .tmp-OWNER-...        the output while it is made, beside NAME
    .relayrun-made.json   in a folder: what it was made from, and its files; the same command knows it again

The output is synced and gets its name in one step, which fails if another process has put something there meanwhile. A
command first removes leftovers of killed ones beside its output (`leftovers.remove_leftovers`).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from relayrun import files, leftovers
from relayrun.errors import InputError, RelayrunError, command_name, on_interrupt

log = logging.getLogger(__name__)

MADE_RECORD = ".relayrun-made.json"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITES_FAIL = (*_NO_ROOM, errno.EROFS, errno.EIO)

Check = Callable[[Path], None]
"""Raises RelayrunError if what has this path must not be replaced."""


@contextlib.contextmanager
def output_lock(
    final: Path, kept: Callable[[], str] = lambda: "nothing is kept; the same command begins again"
) -> Iterator[None]:
    """Let this process alone make `final`, and remove what killed commands left beside it. `kept`: the last words of a
    command that a signal ends. Raises InputError, which names the process that makes `final`, and OSError."""
    lock = final.with_name(f".{final.name}.lock")
    with on_interrupt(kept):
        final.parent.mkdir(parents=True, exist_ok=True)
        fd = _acquire(lock, final)
        try:
            leftovers.remove_leftovers(final.parent, shared=True)
            yield
        finally:
            leftovers.surely_remove(lock)
            os.close(fd)


def _acquire(lock: Path, final: Path) -> int:
    """Return the descriptor that holds the lock, with this process on record."""
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            if (refusal := _refusal(fd, lock, final)) is not None:
                raise refusal
            with contextlib.suppress(FileNotFoundError):  # who had it has removed it
                if os.path.samestat(os.stat(lock), os.fstat(fd)):
                    _record_holder(fd)
                    return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _refusal(fd: int, lock: Path, final: Path) -> InputError | None:
    """Return an error that names the process that makes `final`; None, with the lock held, if there is none."""
    hint = "wait for it, or choose another output"
    record: dict[str, Any] = {}
    with contextlib.suppress(ValueError, TypeError):
        record = dict(json.loads(os.pread(fd, 4096, 0)))
    try:
        if leftovers.try_lock(fd):
            return None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        if not record or _has_ended(record, lock):
            return None
        job = f" (`squeue -j {str(record['job'])!a}` shows no job)" if record.get("job") else ""
        hint += f"; this file system has no locks: if that process has ended{job}, remove {lock}"
    words = "another process makes this"
    with contextlib.suppress(ValueError, KeyError, TypeError):
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record["since"]))
        words += f": {record['command']!a}, process {int(record['pid'])} on {record['host']!a}, since {since}"
    return InputError(words, where=final, hint=hint)


def _has_ended(record: Mapping[str, Any], lock: Path) -> bool:
    """Return whether the holder ran before the boot of this machine, in an earlier start of this job, or has ended."""
    now, owner = _holder(), str(record.get("owner"))
    same_job = now["job"] is not None and all(record.get(name) == now[name] for name in ("job", "cluster"))
    if same_job and str(record.get("start")).isdigit() and int(record["start"]) < int(now["start"]):
        return True
    rebooted = record.get("host") == now["host"] != "localhost" and owner[:8] != now["owner"][:8]
    return rebooted or not leftovers.owner_may_live(owner, lock)


def _holder() -> dict[str, Any]:
    return {
        "owner": leftovers.process_identity(),
        "command": command_name(),
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "job": os.environ.get("SLURM_JOB_ID"),
        "cluster": os.environ.get("SLURM_CLUSTER_NAME"),
        "start": os.environ.get("SLURM_RESTART_COUNT", "0"),
        "since": time.time(),
    }


def _record_holder(fd: int) -> None:
    with contextlib.suppress(OSError):  # a full disk: the lock is held all the same
        os.ftruncate(fd, 0)
        os.pwrite(fd, json.dumps(_holder()).encode(), 0)


@contextlib.contextmanager
def published_folder(final: Path, *, replaces: Check | None = None, read: InputFiles | None = None) -> Iterator[Path]:
    """Yield an empty folder to fill; after an exit without error it is synced and becomes `final`, links followed.
    `replaces`: checks a folder that `final` is already, which is replaced then; None: nothing may exist there. `read`:
    what the folder is made from, which must not change meanwhile, and is put on record for `InputFiles.was_made`.
    Raises InputError if something else stands at `final` now or at the end, or if another process makes it."""
    with _published(final, replaces) as made:
        made.mkdir()
        yield made
        if read is not None:
            read.check()
            read.write_record(made)
        files.fsync_tree(made, mode=made.stat().st_mode & 0o666)  # safetensors makes its files 0600


@contextlib.contextmanager
def published_file(final: Path) -> Iterator[Path]:
    """Yield a name for a file to write; after an exit without error it is synced and becomes, or replaces, `final`.
    Raises InputError if `final` is no file or changes meanwhile, or another process makes it."""
    if os.path.exists(final) and not os.path.isfile(final):
        raise InputError("this is no file", where=final, hint="choose another output")
    before = files.file_identity(final)

    def unchanged(found: Path) -> None:
        if files.file_identity(found) != before:
            raise _came_meanwhile(final)

    with _published(final, None if before is None else unchanged) as made:
        yield made
        files.fsync_file(made, mode=0o666 & ~files.umask())


@contextlib.contextmanager
def _published(final: Path, replaces: Check | None) -> Iterator[Path]:
    """Yield a name beside `final` for a file or folder, which takes the place of `final` at the end."""
    if replaces is None:
        refuse_existing(final)
    final = Path(os.path.realpath(final))
    left = made = leftovers.temporary_name(final)
    published = False

    def state() -> str:
        return f"{final} is made" if published else f"{final} is as it was; the same command begins again"

    with blaming_output(final, made), output_lock(final, state):
        if replaces is None:
            refuse_existing(final)
        try:
            yield made
            left = _name(made, final, replaces)
            published = True
            files.fsync_directory(final.parent)
        finally:
            leftovers.surely_remove(left)


@contextlib.contextmanager
def work_folder(place: str | os.PathLike[str] | None = None) -> Iterator[Path]:
    """Yield a temporary folder in `place` (default: TMPDIR), which is removed at the end, as are those of killed
    commands at the beginning. Raises OSError. An error that names a file in it names `place` instead."""
    leftovers.remove_leftovers(place or tempfile.gettempdir(), shared=True)
    folder = Path(tempfile.mkdtemp(dir=place, prefix=f"{leftovers.temporary_prefix()}work-"))
    try:
        yield folder
    except RelayrunError as error:
        if error.where is None or not error.where.startswith(str(folder)):
            raise
        raise RelayrunError(f"a temporary file {error.message}", where=folder.parent, hint=error.hint) from None
    finally:
        leftovers.surely_remove(folder)


def refuse_existing(final: Path) -> None:
    """Raise InputError if `final` exists."""
    if os.path.lexists(final):
        raise InputError("this exists already", where=final, hint="move it away, or choose another output")


def _came_meanwhile(final: Path) -> InputError:
    words = "another process has put something here meanwhile, which stays as it is"
    return InputError(words, where=final, hint="move it away, or choose another output, and call this again")


def _name(made: Path, final: Path, replaces: Check | None) -> Path:
    """Rename `made` to `final`; return the new name of what it replaces, which has passed `replaces` there."""
    if replaces is None or not os.path.lexists(final):
        try:
            leftovers.rename_no_replace(made, final)
        except FileExistsError:
            raise _came_meanwhile(final) from None
        return made
    if not leftovers.exchange_names(made, final):
        return _replace_in_two_steps(made, final, replaces)
    try:
        replaces(made)
    except BaseException:
        leftovers.exchange_names(made, final)
        raise
    return made


def _replace_in_two_steps(made: Path, final: Path, replaces: Check) -> Path:
    """Replace `final` on a file system that cannot exchange two names; `remove_leftovers` puts it back after a kill."""
    old = leftovers.temporary_name(final, formerly=True)
    try:
        os.rename(final, old)
        replaces(old)
        leftovers.rename_no_replace(made, final)
    except BaseException:
        with contextlib.suppress(OSError):
            leftovers.rename_no_replace(old, final)
        raise
    return old


def fails_to_write(error: OSError, made: Path | None) -> bool:
    """True for an error about a file below `made`, or, without a file, about a disk."""
    return error.errno in _WRITES_FAIL if error.filename is None else _is_below(error.filename, made)


def _is_below(name: str | bytes, folder: Path | None) -> bool:
    return folder is not None and Path(os.fsdecode(name)).is_relative_to(folder)


@contextlib.contextmanager
def blaming_output(final: Path, made: Path | None = None) -> Iterator[None]:
    """Name the output, and the room that is left, in an error about a file below `made`, or about a disk that is full,
    broken or read-only."""
    try:
        yield
    except RelayrunError as error:
        if error.where is not None and _is_below(error.where, made):
            error.where = str(final)
        raise
    except OSError as error:
        if not fails_to_write(error, made):
            raise
        free = f"; {files.free_space(final.parent):,} bytes are free there" if error.errno in _NO_ROOM else ""
        words = f"cannot be written: {os.strerror(error.errno or 0)}{free}"
        raise RelayrunError(words, where=final, hint="see that there is room, and that you may write there") from None


class InputFiles:
    """The inputs of an output: arguments of a command, and files as they were when it began to read them."""

    def __init__(self, paths: Iterable[str | os.PathLike[str]], arguments: Mapping[str, Any] | None = None) -> None:
        self._arguments = arguments or {}
        self._seen: dict[str, files.FileIdentity | None] = {}
        self.add(paths)

    def add(self, paths: Iterable[str | os.PathLike[str]]) -> None:
        """Take more files, as they are before they are read; a missing one is to stay so."""
        self._seen |= {os.fspath(path): files.file_identity(path) for path in paths}

    def add_folder(self, folder: Path) -> None:
        """Take the files below a folder."""
        self.add(path for path in folder.rglob("*") if path.is_file())

    def check(self) -> None:
        """Raise InputError that names the first file that changed or vanished since."""
        for path, before in self._seen.items():
            if (now := files.file_identity(path)) != before:
                what = "was removed" if now is None else "changed"
                raise InputError(f"this file {what} while it was read", where=path, hint="call the command again")

    def write_record(self, folder: Path) -> None:
        """Put on record what the files of a folder were made from. Raises OSError."""
        record = {"recipe": self._recipe(), "files": files.file_sizes(folder)}
        files.write_atomic(folder / MADE_RECORD, json.dumps(record))

    def _recipe(self) -> dict[str, Any]:
        """Return the arguments, and a hash of all paths, sizes and times."""
        known = sorted((os.path.abspath(path), *(seen or ())[:2]) for path, seen in self._seen.items())
        digest = hashlib.sha256(json.dumps(known).encode()).hexdigest()
        return {"arguments": {name: str(value) for name, value in self._arguments.items()}, "inputs": digest}

    def was_made(self, final: Path) -> bool:
        """Return whether `published_folder` has made `final` of the same inputs, and all its files are there; log it.
        What a command left that was killed after that is removed."""
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            record = files.read_json(final / MADE_RECORD)
            sizes = files.file_sizes(final)
            if record["recipe"] == self._recipe() and record["files"].items() <= sizes.items():
                leftovers.remove_leftovers(final.parent, shared=True)
                log.info("%s: this is done already", final)
                return True
        return False
