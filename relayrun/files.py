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
    """Have on disk what has been written to a file, by whomever; a missing one has nothing. Raises OSError."""
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
    """The umask of this process: asking for it by setting it would change it for other threads."""
    with open("/proc/self/status", "rb") as status:
        return next((int(line.split()[1], 8) for line in status if line.startswith(b"Umask:")), 0o022)


def write_atomic(path: str | os.PathLike[str], data: str | bytes, *, mode: int = 0o666, durable: bool = True) -> None:
    """Write `data` to `path` whole or not at all; the file gets `mode` less the umask. `durable` syncs it to disk."""
    path = Path(path)
    with _temporary_file_for(path, mode=mode, durable=durable) as (fd, _), os.fdopen(fd, "wb", closefd=False) as file:
        file.write(data.encode() if isinstance(data, str) else data)
    if durable:
        fsync_directory(path.parent)


@contextlib.contextmanager
def atomic_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a name to write a file under, beside `path`; on leaving without an error it is synced and becomes `path`.

    For content that does not fit into memory. Raises RelayrunError, naming `path`, where it cannot be written.
    """
    try:
        with _temporary_file_for(Path(path), mode=0o666, durable=True) as (_, temporary):
            yield temporary
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RelayrunError(f"cannot be written: {reason}", where=path) from None


@contextlib.contextmanager
def _temporary_file_for(path: Path, *, mode: int, durable: bool) -> Iterator[tuple[int, Path]]:
    """A temporary file beside `path`, open and by name, which takes its place on leaving without an error."""
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
"""Names of folders begin so that are to replace others, or were replaced."""
_ORIGINAL_NAME_MARK = "-formerly-"
"""Behind it stands the name that such a folder had, where a kill could leave it without a successor."""


def temporary_prefix() -> str:
    """What the name of a temporary file or folder begins with: it tells which process owns it, and on which machine."""
    return f".tmp-{_owner()}-"


def _owner() -> str:
    return f"{_machine()}-{os.getpid()}-{_state_and_start(os.getpid())[1]}"


_OWNED = re.compile(rf"(?:\.tmp-|{re.escape(REPLACED_PREFIX)})([0-9a-f]{{8}}-[0-9]+)-([0-9]+)-([0-9]+)-.+")
_FORMER, _FORMER_ASIDE = re.compile(r"\.tmp-[a-z0-9_]{8}"), re.compile(rf"{re.escape(REPLACED_PREFIX)}[0-9a-f]{{16}}")
"""Names of earlier versions, which tell no owner."""

LEFTOVER_SECONDS = 86_400.0
"""After so long without a change a temporary file belongs to nobody, where its owner cannot be looked at."""


def remove_leftovers(folder: str | os.PathLike[str], *, shared: bool = False) -> list[str]:
    """Remove temporary files and folders in `folder` that killed processes left; return their names.

    A folder that was set aside, and whose name nothing has since, gets its name back.

    The owner is looked at where it ran on this machine (since its last boot, in this namespace of processes).
    Elsewhere, perhaps on another node that shares the file system, a file is left alone until it has not changed for a
    day; so is one of an earlier version, which names no owner. `shared`: in a folder such as /tmp, which other programs
    and other people write into, only what is of this user, and certainly of relayrun, is looked at.
    """
    removed = []
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return []
    for entry in entries:
        owner = _OWNED.fullmatch(entry.name)
        former = _FORMER_ASIDE.fullmatch(entry.name) or (not shared and _FORMER.fullmatch(entry.name))
        if owner is None and not former:
            continue
        with contextlib.suppress(OSError):  # gone, or not ours to remove
            if shared and entry.stat(follow_symlinks=False).st_uid != os.geteuid():
                continue
            here = owner is not None and owner[1] == _machine()
            if _is_alive(int(owner[2]), owner[3]) if owner is not None and here else _changed_lately(entry.path):
                continue
            if name := entry.name.partition(_ORIGINAL_NAME_MARK)[2]:
                with contextlib.suppress(FileExistsError):
                    rename_to_unused_name(entry.path, os.path.join(folder, name))
                    continue
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)
            removed.append(entry.name)
    return removed


@functools.cache
def _machine() -> str:
    """The boot of this machine's kernel and the namespace of process numbers, in hexadecimal and decimal digits."""
    boot, namespace = "0" * 8, 0
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")[:8]
        namespace = os.stat("/proc/self/ns/pid").st_ino
    return f"{boot}-{namespace}"


def _state_and_start(pid: int) -> tuple[str, str]:
    """A process's state (`Z`: it has ended) and when it began, in ticks since the boot; empty and 0 if unknown."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0].decode(), fields[19].decode()
    except (OSError, IndexError):
        return "", "0"


def _is_alive(pid: int, started: str) -> bool:
    """Whether the process that began at `started` lives; also where only somebody else may look at it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    state, start = _state_and_start(pid)
    return state != "Z" and start in (started, "0")


def _changed_lately(path: str) -> bool:
    """Whether a file, or what is directly inside a folder, changed within `LEFTOVER_SECONDS`."""
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
"""Inode and time of a change, in nanoseconds: what tells one file from another that was put in its place."""


def read_with_identity(path: str | os.PathLike[str]) -> tuple[bytes, FileIdentity]:
    """Read a small file, and tell which one it was; see `file_identity`. Raises OSError as it comes.

    A look at a thousand runs reads ten of each, for which `open` takes twice as long.
    """
    fd, found = _open_for_reading(path)
    try:
        text = os.read(fd, found.st_size)
        while len(text) != found.st_size or not text:  # a part, or a file that does not tell its size
            if not (part := os.read(fd, READ_BLOCK)):
                break
            text += part
    finally:
        os.close(fd)
    return text, (found.st_ino, found.st_mtime_ns)


def file_identity(path: str | os.PathLike[str]) -> FileIdentity:
    """Which file it is now. Raises OSError as it comes."""
    found = os.stat(path)
    return found.st_ino, found.st_mtime_ns


def _open_for_reading(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
    """A descriptor to read from, which who asks closes, and what it is of. Raises OSError as `open` does."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    found = os.fstat(fd)
    if stat.S_ISDIR(found.st_mode):
        os.close(fd)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    return fd, found


def path_exists(path: str | os.PathLike[str]) -> bool:
    """Whether there is such a file or folder. Raises OSError for another reason, which `os.path.exists` hides."""
    try:
        os.stat(path)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        return False
    return True


def append_line(path: str | os.PathLike[str], record: dict[str, Any], *, durable: bool = True) -> None:
    """Append one record as one JSON line with one write. `durable` syncs it to disk.

    Where the last writer was killed inside a line, a newline is put first, so that the torn line
    stays alone and the new one whole.
    """
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


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """Yield the whole records of a file written by `append_line`; a missing file has none.

    A line that is not whole JSON is skipped: it is what a killed writer left.
    """
    try:
        file = open(path, encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below, where the generator is
    except FileNotFoundError:  # and no other error: a file system that is away for a moment does not empty a record
        return
    with file:
        for line in file:
            if line.endswith("\n"):
                with contextlib.suppress(json.JSONDecodeError):
                    value = json.loads(line)
                    if isinstance(value, dict):
                        yield value


def file_sizes(path: str | os.PathLike[str]) -> dict[str, int]:
    """Bytes of every file below a folder, by its name relative to it; of a single file under the name `.`."""
    top = Path(path)
    if top.is_file():
        return {".": top.stat().st_size}
    return {str(found.relative_to(top)): found.stat().st_size for found in sorted(top.rglob("*")) if found.is_file()}


READ_BLOCK = 65_536
"""Bytes that are taken at a time, at most, where a file is read from its end."""
FIRST_READ_BLOCK = 4096
"""Bytes that are taken first: most who ask want the last line."""


def last_lines(path: str | os.PathLike[str], count: int) -> tuple[bytes, int]:
    """The last lines of a file and its size; nothing of one that is not there. Only its end is read."""
    try:
        fd, found = _open_for_reading(path)
    except FileNotFoundError:
        return b"", 0
    size = found.st_size
    try:
        text = b""
        for _, block in _blocks_backwards(fd, size):
            text = block + text
            if text.count(b"\n") > count:
                break
    finally:
        os.close(fd)
    return b"".join(text.splitlines(keepends=True)[-count:] if count else []), size


def last_bytes(path: str | os.PathLike[str], most: int, *, since: int = 0) -> bytes:
    """The end of a file, at most so many bytes, and nothing before byte `since`. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - most))
        return file.read()


def read_lines_backwards(
    path: str | os.PathLike[str], *, end: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the whole records of a file written by `append_line`, the last one first, each with where it ends (bytes).

    Only as much is read as is asked for. A line that is not whole JSON is skipped, a missing file has none.
    `end`: as if the file had only this many bytes.
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
                value = _parsed(line)
                if value is not None:
                    yield behind, value
                behind -= len(line)
    finally:
        os.close(fd)


def _blocks_backwards(fd: int, at: int) -> Iterator[tuple[int, bytes]]:
    """The bytes before `at`, block by block from the end, each with where it begins."""
    size = min(FIRST_READ_BLOCK, READ_BLOCK)
    while at:
        start = max(0, at - size)
        size = min(4 * size, READ_BLOCK)
        data = os.pread(fd, at - start, start)
        while len(data) < at - start and (more := os.pread(fd, at - start - len(data), start + len(data))):
            data += more
        at = start
        yield at, data


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The record of a line; None where it is what a killed writer left."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def free_space(path: str | os.PathLike[str]) -> int:
    """Bytes that this user may still write to the file system on which a path lies, or would lie."""
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    found = os.statvfs(place)
    return found.f_bavail * found.f_frsize


def unused_name(folder: Path, name: str) -> Path:
    """A path in `folder` that is not taken: `name`, or `name` with `-2`, `-3`, ... behind it."""
    candidates = (folder / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in candidates if not os.path.lexists(path))


@contextlib.contextmanager
def folder_lock(folder: Path, *, patience: float = 20.0) -> Iterator[bool]:
    """Hold the file `lock` of a folder; yield whether it was acquired within `patience` seconds. Raises OSError."""
    fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
    """Yield whether this process alone makes `final`: as long as it does, others get False. Raises OSError.

    Meanwhile `.NAME.lock` stands beside `final`. On a file system without locks everybody gets True.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    lock, held = final.with_name(f".{final.name}.lock"), True
    while True:
        fd = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
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
    """Call renameat2(2); return False where the C library, the kernel or the file system has no such call."""
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


def rename_to_unused_name(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Give a file or folder a name that nothing has. Raises FileExistsError where something has it, and OSError."""
    if not _rename(source, target, _NO_REPLACE):
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(target))
        os.rename(source, target)


@contextlib.contextmanager
def replaced_folder(final: Path, *, new: bool = False) -> Iterator[Path]:
    """Yield an empty folder to fill; on leaving without an error it replaces `final`.

    A kill leaves the old folder or the new one, never a mix of both; where the file system cannot exchange two names
    at once, the old one may stand aside until the next run beside it gives its name back. What a killed run
    left aside is removed by the next run beside it; `shards.prefixes.find_prefixes` never looks into it.
    The caller has made sure that what stands at `final` may be deleted. `new`: nothing may stand there, and
    FileExistsError is raised where something came meanwhile. Links in the path of `final`
    are followed, so that a link to a folder keeps pointing to it. Raises OSError as it comes.
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
            rename_to_unused_name(building, final)
            fsync_directory(final.parent)
        else:
            _swap(building, final)
    except BaseException:
        shutil.rmtree(building, ignore_errors=True)
        raise


def _swap(building: Path, final: Path) -> None:
    """Rename `building` to `final`, then delete what stood there."""
    old = building
    if not os.path.lexists(final):
        rename_to_unused_name(building, final)
    elif not _rename(building, final, _EXCHANGE):
        old = final.parent / f"{REPLACED_PREFIX}{_owner()}-{secrets.token_hex(4)}{_ORIGINAL_NAME_MARK}{final.name}"
        try:
            os.rename(final, old)
            rename_to_unused_name(building, final)
        except BaseException:
            with contextlib.suppress(OSError):
                rename_to_unused_name(old, final)
            raise
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)
