"""Temporary names and their owners, locks, and leftovers of killed processes.

    .tmp-OWNER-...                 a file or folder that gets another name later, or was replaced
    .tmp-OWNER-...-formerly-NAME   a former NAME, which gets its name back if a kill left the name without a file

OWNER is machine, number and start of a process. Standard library alone: this also runs on a bare host Python.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

TEMPORARY_PREFIX = ".tmp-"
"""Prefix of the names of files and folders that will get another name, or were replaced."""
_ORIGINAL_NAME_MARK = "-formerly-"
"""The former name of a replaced file or folder stands behind it, if a kill could leave that name without one."""
_LOCK_NAME = re.compile(r"\..+\.lock")
"""Locks of `publishing.output_lock`."""


def temporary_prefix() -> str:
    """Return the prefix of a temporary name, which identifies the owning process and its machine."""
    return f"{TEMPORARY_PREFIX}{process_identity()}-"


def temporary_name(target: Path, *, formerly: bool = False) -> Path:
    """Return a name beside `target` that no other process uses; `formerly`: for `target` itself, which makes way."""
    unique = f"{temporary_prefix()}{secrets.token_hex(8)}"
    return target.with_name(f"{unique}{_ORIGINAL_NAME_MARK}{target.name}" if formerly else unique + target.suffix)


def process_identity() -> str:
    """Return machine, number and start of this process: no other process ever has the same."""
    return f"{_machine()}-{os.getpid()}-{_state_and_start(os.getpid())[1]}"


_OWNER = r"([0-9a-f]{8}-[0-9]+)-([0-9]+)-([0-9]+)"
_OWNED = re.compile(rf"{re.escape(TEMPORARY_PREFIX)}({_OWNER})-.+")
LEFTOVER_SECONDS = 86_400.0
"""Seconds without a change after which a temporary file is a leftover, if its owner cannot be examined."""


def remove_leftovers(folder: str | os.PathLike[str], *, shared: bool = False) -> list[str]:
    """Remove temporary files, folders and locks in `folder` that killed processes left; log and return their names. A
    file or folder that was set aside gets its name back if nothing has the name since. Whatever a process has open
    under a lock stays. `shared`: in a folder such as /tmp only files of this user count."""
    removed, moved = [], []
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # gone, or not ours to remove
            if shared and entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            if (name := _OWNED.fullmatch(entry.name)) is not None:
                owner = name[1]
            elif _LOCK_NAME.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
                owner = str(json.loads(Path(entry.path).read_bytes())["owner"])
            else:
                continue
            with _sole_user(entry.path) as sole:
                if not sole or owner_may_live(owner, entry.path):
                    continue
                if former := entry.name.partition(_ORIGINAL_NAME_MARK)[2]:
                    with contextlib.suppress(FileExistsError):
                        rename_no_replace(entry.path, os.path.join(folder, former))
                        moved.append(former)
                        continue
                remove_path(entry.path)
                removed.append(entry.name)
    for what, names in (("removed what a killed command left", removed), ("put back what was to be replaced", moved)):
        if names:
            log.info("%s: %s", what, ", ".join(os.path.join(folder, name) for name in names))
    return removed


def remove_path(path: str | os.PathLike[str]) -> None:
    """Remove a file, a link, or a folder with its content, if it is there. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        else:
            os.unlink(path)


def surely_remove(path: str | os.PathLike[str]) -> None:
    """Remove a file or folder, if it is there, even if the signal that ends the command comes just then."""
    try:
        with contextlib.suppress(OSError):
            remove_path(path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_path(path)
        raise


def owner_may_live(owner: str, path: str | os.PathLike[str]) -> bool:
    """Return whether the process with this `process_identity`, which owns `path`, lives: by its number in this boot and
    namespace of processes; for any other, perhaps on another node, by a change of `path` within a day."""
    if (found := re.fullmatch(_OWNER, owner)) is None:
        return True
    if found[1] != _machine():
        return _changed_lately(path)
    state, start = _state_and_start(int(found[2]))  # nothing of another user's process that cannot be examined
    return is_process_alive(int(found[2])) and state != "Z" and start in (found[3], "0")


@contextlib.contextmanager
def _sole_user(path: str) -> Iterator[bool]:
    """Yield whether no other process, perhaps on another node, holds a lock on a file or folder; hold it meanwhile."""
    if os.path.islink(path):
        yield True
        return
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        sole = True
        with contextlib.suppress(OSError):  # a file system without locks
            sole = try_lock(fd)
        yield sole
    finally:
        os.close(fd)


def try_lock(fd: int) -> bool:
    """Lock an open file or folder until it is closed; return False if another process has it. Raises OSError on a file
    system without locks."""
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def exclusive_lock(fd: int, refusal: Exception, *, optional: bool = False) -> Iterator[None]:
    """Hold the lock of an open file or folder, and close it. Raises `refusal` if another process has it, and OSError on
    a file system without locks, unless it is `optional` there."""
    try:
        with contextlib.suppress(*[OSError] * optional):
            if not try_lock(fd):
                raise refusal
        yield
    finally:
        os.close(fd)


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Return whether a process has this lock file; False if there is none, or it cannot be known."""
    try:
        with open(open_lock(path, os.O_RDONLY), "rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    return False


@functools.cache
def _machine() -> str:
    """Return boot, eight hexadecimal digits, and process namespace of this machine."""
    boot, namespace = "0" * 8, 0
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}-{namespace}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """Return a process's state (`Z`: it has ended) and its start in ticks since the boot; empty and 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (OSError, IndexError):
        return "", "0"


def is_process_alive(pid: int) -> bool:
    """Return whether a process with this id exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _changed_lately(path: str | os.PathLike[str]) -> bool:
    """Return whether a file, or anything inside a folder, changed within `LEFTOVER_SECONDS`."""
    times = [os.lstat(path).st_mtime]
    for folder, folders, names in os.walk(path):
        times += [os.lstat(os.path.join(folder, name)).st_mtime for name in (*folders, *names)]
    return time.time() - max(times) < LEFTOVER_SECONDS


def open_lock(path: str | os.PathLike[str], flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a lock file of its owner, made if it is missing. Nothing is truncated, and a link, which somebody may have
    put there, is not followed. Raises OSError."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)


@contextlib.contextmanager
def folder_lock(folder: Path, *, patience: float = 20.0) -> Iterator[bool]:
    """Hold the file `lock` of a folder; yield whether it was acquired within `patience` seconds. Raises OSError."""
    fd = open_lock(folder / "lock")
    try:
        deadline = time.monotonic() + patience
        while not (held := try_lock(fd)) and time.monotonic() < deadline:
            time.sleep(0.1)
        yield held
    finally:
        os.close(fd)


_NO_REPLACE, _EXCHANGE = 1, 2
"""Flags of renameat2(2)."""


def _rename(source: str | os.PathLike[str], target: str | os.PathLike[str], flag: int) -> bool:
    """Call renameat2(2); return False if the C library, the kernel or the file system lacks it."""
    try:
        import ctypes  # a Python may have been built without it

        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (ImportError, OSError, AttributeError):
        return False
    here = -100  # AT_FDCWD
    if call(here, os.fsencode(source), here, os.fsencode(target), flag) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), os.fspath(target))


def rename_no_replace(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file or folder a name that does not exist. Raises FileExistsError if it exists, and OSError."""
    if not _rename(source, target, _NO_REPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
        os.rename(source, target)


def exchange_names(one: str | os.PathLike[str], other: str | os.PathLike[str]) -> bool:
    """Give two files or folders each other's name at once; return False if this file system cannot. Raises OSError."""
    return _rename(one, other, _EXCHANGE)
