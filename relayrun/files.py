"""Files that survive a kill: whole files and folders appear at once, appended files hold whole lines.

A whole file is written under a temporary name in its own folder, synced, then renamed; a reader sees
the old content or the new, never a part. An appended file has one writer, each record is one
`write` of one line, and a torn last line (the writer was killed) is ignored on read.
The standard library and `errors` only: this module also runs on a bare host Python.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from relayrun.errors import RelayrunError


def sync_data(path: str | os.PathLike[str]) -> None:
    """Sync a file that any process has written to disk; a missing file has nothing to sync. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        os.fdatasync(fd)
    finally:
        os.close(fd)


def fsync_directory(path: str | os.PathLike[str]) -> None:
    """Make renames inside `path` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def fsync_tree(folder: Path, *, mode: int | None = None) -> None:
    """Sync all files and folders below `folder`, and give the files this mode. Raises OSError."""
    for directory, _, names in os.walk(folder):
        for name in names:
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            try:
                if mode is not None:
                    os.fchmod(fd, mode)
                os.fsync(fd)
            finally:
                os.close(fd)
        fsync_directory(directory)


class RealPathCache:
    """`os.path.realpath` that resolves each folder once: many files stand in few folders."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        folder, name = os.path.split(path)
        if os.path.islink(path):
            return os.path.realpath(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        return os.path.join(self._folders[folder], name)


def umask() -> int:
    """Return the umask of this process; a query by `os.umask` would change it for other threads."""
    with open("/proc/self/status", "rb") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith(b"Umask:")), 0o022)


@contextlib.contextmanager
def writable_by_owner_alone() -> Iterator[None]:
    """Withhold write permission from group and others for all that this process makes in a `with` block."""
    before = os.umask(0o022)
    os.umask(before | 0o022)
    try:
        yield
    finally:
        os.umask(before)


def write_atomic(path: str | os.PathLike[str], data: str | bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write `data` to `path` whole or not at all; the file gets `mode` less the umask. `durable` syncs it to disk."""
    path = Path(path)
    with _temporary_file_for(path, mode=mode, durable=durable) as (fd, _), os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data.encode() if isinstance(data, str) else data)
    if durable:
        fsync_directory(path.parent)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a name to write a file under, beside `path`; after an exit without error it is synced and becomes `path`.
    For content that does not fit into memory. Raises RelayrunError, naming `path`, if it cannot be written."""
    try:
        with _temporary_file_for(Path(path), mode=0o666, durable=True) as (_, temporary):
            yield temporary
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RelayrunError(f"cannot be written: {reason}", where=path) from None


@contextlib.contextmanager
def _temporary_file_for(path: Path, *, mode: int, durable: bool) -> Iterator[tuple[int, Path]]:
    """Yield an open temporary file beside `path` and its name; after an exit without error it replaces `path`."""
    fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=temporary_prefix())
    try:
        os.fchmod(fd, mode & ~umask())
        yield fd, Path(temporary)
        if durable:
            os.fsync(fd)
        os.replace(temporary, path)
    finally:
        os.close(fd)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


REPLACED_PREFIX = ".relayrun-aside-"
"""Prefix of the names of folders that will replace others, or were replaced."""
_ORIGINAL_NAME_MARK = "-formerly-"
"""The former name of such a folder stands behind it, if a kill could leave that name without a folder."""


def temporary_prefix() -> str:
    """Return the prefix of a temporary name, which identifies the owning process and its machine."""
    return f".tmp-{_owner()}-"


def _owner() -> str:
    return f"{_machine()}-{os.getpid()}-{_state_and_start(os.getpid())[1]}"


_OWNED = re.compile(rf"(?:\.tmp-|{re.escape(REPLACED_PREFIX)})([0-9a-f]{{8}}-[0-9]+)-([0-9]+)-([0-9]+)-.+")
LEFTOVER_SECONDS = 86_400.0
"""Seconds without a change after which a temporary file is a leftover, if its owner cannot be examined."""


def remove_leftovers(folder: str | os.PathLike[str], *, shared: bool = False) -> list[str]:
    """Remove temporary files and folders in `folder` that killed processes left; return their names.

    A folder that was set aside gets its name back if nothing has the name since. The owner is examined if it ran on
    this machine (since its last boot, in this namespace of processes). Elsewhere, perhaps on another node that shares
    the file system, a file is kept until it has not changed for a day. `shared`: in a folder such as /tmp only files of
    this user count.
    """
    removed = []
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        if (owner := _OWNED.fullmatch(entry.name)) is None:
            continue
        with contextlib.suppress(OSError):  # gone, or not ours to remove
            if shared and entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            if _is_alive(int(owner[2]), owner[3]) if owner[1] == _machine() else _changed_lately(entry.path):
                continue
            if name := entry.name.partition(_ORIGINAL_NAME_MARK)[2]:
                with contextlib.suppress(FileExistsError):
                    rename_no_replace(entry.path, os.path.join(folder, name))
                    continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
            removed.append(entry.name)
    return removed


@functools.cache
def _machine() -> str:
    """Return boot and process namespace of this machine, in hexadecimal and decimal digits."""
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


def _is_alive(pid: int, started: str) -> bool:
    """Return whether the process that began at `started` lives, or another user's process that cannot be examined."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    state, start = _state_and_start(pid)
    return state != "Z" and start in (started, "0")


def _changed_lately(path: str) -> bool:
    """Return whether a file, or an entry directly inside a folder, changed within `LEFTOVER_SECONDS`."""
    times = [os.lstat(path).st_mtime]
    if os.path.isdir(path):
        times += [entry.stat(follow_symlinks=False).st_mtime for entry in os.scandir(path)]
    return time.time() - max(times) < LEFTOVER_SECONDS


def write_json(path: str | os.PathLike[str], value: Any, *, durable: bool = True) -> None:
    """Write `value` as readable JSON, atomically. Floats keep full precision; NaN is written as NaN."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file. Raises FileNotFoundError and json.JSONDecodeError as they come."""
    return json.loads(read_bytes(path).decode())


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a small file. Raises OSError as it comes."""
    return read_with_identity(path)[0]


FileIdentity = tuple[int, int]
"""Inode and time of a change in nanoseconds: they differ for a file that replaces another."""


def read_with_identity(path: str | os.PathLike[str]) -> tuple[bytes, FileIdentity]:
    """Read a small file; return its identity too, see `file_identity`. Raises OSError. A look at a thousand runs reads
    ten files of each, for which `open` takes twice as long."""
    fd, found = _open_for_reading(path)
    try:
        return read_descriptor(fd, found.st_size), (found.st_ino, found.st_mtime_ns)
    finally:
        os.close(fd)


def read_descriptor(fd: int, size: int) -> bytes:
    """Read a file of `size` bytes, as its status says, from the start. Raises OSError."""
    text = os.read(fd, size)
    while len(text) != size or not text:  # a part, or a file that does not tell its size
        if not (part := os.read(fd, READ_BLOCK)):
            break
        text += part
    return text


def file_identity(path: str | os.PathLike[str]) -> FileIdentity:
    """Return the identity of the file that has this name now. Raises OSError."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _open_for_reading(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """Return an open descriptor, which the caller closes, and its status. Raises OSError as `open` does, and for a pipe
    or a device, which another user may put into a run directory: a reader would wait or read for ever."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    found = os.fstat(fd)
    if not stat.S_ISREG(found.st_mode):
        os.close(fd)
        number = errno.EISDIR if stat.S_ISDIR(found.st_mode) else errno.EINVAL
        raise OSError(number, os.strerror(number), os.fspath(path))
    return fd, found


def path_exists(path: str | os.PathLike[str]) -> bool:
    """Return whether a file or folder exists. Raises OSError for other errors, which `os.path.exists` hides."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def append_line(path: str | os.PathLike[str], record: dict[str, Any], *, durable: bool = True) -> None:
    """Append one record as one JSON line with one write. `durable` syncs it to disk. If the last writer was killed
    inside a line, a newline comes first, so that the torn line stays alone."""
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        written = os.write(fd, line)
        if written != len(line):  # a full disk can take a part; say so, the reader drops the torn line
            raise OSError(28, os.strerror(28), str(path))
        if durable:
            os.fsync(fd)
    finally:
        os.close(fd)


def read_json_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the complete records of a file written by `append_line`; a missing file has none. A line that is not valid
    JSON is skipped: a killed writer left it."""
    try:
        file = open(_open_for_reading(path)[0], encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    except FileNotFoundError:  # and no other error: a file system that is away for a moment does not empty a record
        return
    with file:
        for line in file:
            if line.endswith("\n") and (value := parse_record(line)) is not None:
                yield value


def file_size(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a file; 0 if it does not exist. Raises OSError."""
    try:
        return os.path.getsize(path)
    except FileNotFoundError:
        return 0


def file_sizes(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the bytes of every file below a folder, by relative name; of a single file under the name `.`."""
    top = Path(path)
    if top.is_file():
        return {".": top.stat().st_size}
    return {str(found.relative_to(top)): found.stat().st_size for found in sorted(top.rglob("*")) if found.is_file()}


READ_BLOCK = 65_536
"""Maximum bytes per read of a file from its end."""
FIRST_READ_BLOCK = 4096
"""Bytes of the first read: most callers want the last line."""
MAX_MEAN_LINE = 2048
"""Mean bytes of a line beyond which `last_lines` returns fewer lines."""


def last_lines(path: str | os.PathLike[str], count: int) -> tuple[bytes, int]:
    """Return the last lines of a file and its size; nothing of a missing file. Only its end is read, at most
    `MAX_MEAN_LINE` bytes per line and 256 KiB: a file need not have lines. `\\r` ends a line of a progress bar."""
    try:
        fd, found = _open_for_reading(path)
    except FileNotFoundError:
        return b"", 0
    size = found.st_size
    try:
        blocks, ends, floor = [], 0, size - (1 << 18) - count * MAX_MEAN_LINE
        for at, block in _blocks_backwards(fd, size):
            blocks.append(block)
            ends += block.count(b"\n") + block.count(b"\r") - block.count(b"\r\n") - block.startswith(b"\n")
            if ends > count or at < floor:
                break
    finally:
        os.close(fd)
    return b"".join(b"".join(blocks[::-1]).splitlines(keepends=True)[-count:] if count else []), size


def last_bytes(path: str | os.PathLike[str], most: int, *, since: int = 0) -> bytes:
    """Return at most the last `most` bytes of a file, and nothing before byte `since`. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - most))
        return file.read()


def read_json_lines_backwards(
    path: str | os.PathLike[str], *, end: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete records of a file written by `append_line`, newest first, each with the byte where it ends.

    Only as much is read as needed. An invalid line is skipped, a missing file has none. `end`: as if the file had only
    this many bytes.
    """
    try:
        fd, found = _open_for_reading(path)
    except FileNotFoundError:
        return
    size = found.st_size
    try:
        rest, torn = b"", True  # the end of a line that begins in the block before; behind the last newline it is torn
        for at, block in _blocks_backwards(fd, size if end is None else min(end, size)):
            data = block + rest
            if torn:
                data = data[: data.rfind(b"\n") + 1]
                torn = not data
            lines = [line + b"\n" for line in data.split(b"\n")[:-1]]
            rest = lines.pop(0) if lines and at else b""
            behind = at + len(rest) + sum(map(len, lines))
            for line in reversed(lines):
                value = parse_record(line)
                if value is not None:
                    yield behind, value
                behind -= len(line)
    finally:
        os.close(fd)


def _blocks_backwards(fd: int, at: int) -> Iterator[tuple[int, bytes]]:
    """Yield the bytes before `at`, block by block from the end, each with its position."""
    size = min(FIRST_READ_BLOCK, READ_BLOCK)
    while at:
        start = max(0, at - size)
        size = min(4 * size, READ_BLOCK)
        data = os.pread(fd, at - start, start)
        while len(data) < at - start and (more := os.pread(fd, at - start - len(data), start + len(data))):
            data += more
        at = start
        yield at, data


def parse_record(line: str | bytes) -> dict[str, Any] | None:
    """Return the record in a line; None if a killed writer left it."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def free_space(path: str | os.PathLike[str]) -> int:
    """Return the bytes that this user may still write to the file system of a path, which need not exist."""
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def unused_name(folder: Path, name: str) -> Path:
    """Return a path in `folder` that does not exist: `name`, or `name` with `-2`, `-3`, ... appended."""
    candidates = (folder / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in candidates if not os.path.lexists(path))


def open_lock(path: str | os.PathLike[str], flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Open a lock file, made if it is missing. Nothing is truncated, and a link, which somebody may have put there, is
    not followed. Raises OSError."""
    return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


@contextlib.contextmanager
def folder_lock(folder: Path, *, patience: float = 20.0) -> Iterator[bool]:
    """Hold the file `lock` of a folder; yield whether it was acquired within `patience` seconds. Raises OSError."""
    fd = open_lock(folder / "lock")
    try:
        deadline, held = time.monotonic() + patience, False
        while not held:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = True
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.1)
        yield held
    finally:
        os.close(fd)


@contextlib.contextmanager
def exclusive_maker(final: Path) -> Iterator[bool]:
    """Yield whether this process alone makes `final`; meanwhile other processes get False. Raises OSError. Meanwhile
    `.NAME.lock` lies beside `final`. On a file system without locks every process gets True."""
    final.parent.mkdir(parents=True, exist_ok=True)
    lock, held = final.with_name(f".{final.name}.lock"), True
    while True:
        fd = open_lock(lock)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            held = False
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                os.close(fd)
                raise
        with contextlib.suppress(FileNotFoundError):
            if not held or os.path.samestat(os.stat(lock), os.fstat(fd)):
                break
        os.close(fd)  # who had it has removed it
    try:
        yield held
    finally:
        with contextlib.suppress(FileNotFoundError):
            if held:
                os.unlink(lock)
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


@contextlib.contextmanager
def replaced_folder(final: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; after an exit without error it replaces `final`.

    A kill leaves the old folder or the new one, never a mix. If the file system cannot exchange two names at once, the
    old folder may stand aside until the next call beside it gives its name back; that call also removes leftovers of
    killed ones, and `shards.prefixes.find_prefixes` never reads them. The caller has checked that `final` may be
    deleted. `new`: nothing may exist there, and FileExistsError is raised if something has come meanwhile. Links in the
    path of `final` are followed, so that a link to a folder keeps pointing to it. Raises OSError.
    """
    final = Path(os.path.realpath(final))
    final.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(final.parent, shared=True)
    building = final.parent / f"{REPLACED_PREFIX}{_owner()}-{secrets.token_hex(8)}"
    building.mkdir()
    try:
        yield building
        fsync_directory(building)
        if new:
            rename_no_replace(building, final)
            fsync_directory(final.parent)
        else:
            _swap(building, final)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _swap(building: Path, final: Path) -> None:
    """Rename `building` to `final`, then delete the old folder."""
    old = building
    if not os.path.lexists(final):
        rename_no_replace(building, final)
    elif not _rename(building, final, _EXCHANGE):
        old = final.parent / f"{REPLACED_PREFIX}{_owner()}-{secrets.token_hex(4)}{_ORIGINAL_NAME_MARK}{final.name}"
        try:
            os.rename(final, old)
            rename_no_replace(building, final)
        except BaseException:
            with contextlib.suppress(OSError):
                rename_no_replace(old, final)
            raise
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)
