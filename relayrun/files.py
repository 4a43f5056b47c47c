"""Files that survive a kill: whole files and folders appear at once, appended files hold whole lines.

A whole file is written under a temporary name in its own folder, synced, then renamed. An appended file has one writer,
each record is one `write` of one line, and a torn last line (the writer was killed) is ignored on read. The standard
library, `errors` and `leftovers` only: this module also runs on a bare host Python.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import resource
import stat
import tempfile
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from relayrun.errors import RelayrunError, nearest_existing
from relayrun.leftovers import rename_no_replace, surely_remove, temporary_prefix


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
    """Make renames inside `path` durable. Raises OSError."""
    fsync_file(path, flags=os.O_DIRECTORY)


def fsync_tree(folder: Path, *, mode: int | None = None) -> None:
    """Sync all files and folders below `folder`, and give the files this mode. Raises OSError."""
    for directory, _, names in os.walk(folder):
        for path in (os.path.join(directory, name) for name in names):
            if os.path.islink(path):  # its target is another's
                continue
            fsync_file(path, mode=mode)
        fsync_directory(directory)


def fsync_file(path: str | os.PathLike[str], *, mode: int | None = None, flags: int = 0) -> None:
    """Sync a file, opened with `flags`, and give it this mode. Raises OSError, which names the file."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        if mode is not None:
            os.fchmod(fd, mode)
        os.fsync(fd)
    except OSError as error:
        error.filename = os.fspath(path)
        raise
    finally:
        os.close(fd)


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


def write_atomic(
    path: str | os.PathLike[str], data: str | bytes, *, mode: int = 0o666, durable: bool = True, new: bool = False
) -> None:
    """Write `data` to `path` whole or not at all; the file gets `mode` less the umask. `durable` syncs it to disk.
    `new`: nothing is replaced; raises FileExistsError."""
    path = Path(path)
    with (
        _temporary_file_for(path, mode=mode, durable=durable, new=new) as (fd, _),
        os.fdopen(fd, "wb", closefd=False) as file,
    ):
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
def _temporary_file_for(path: Path, *, mode: int, durable: bool, new: bool = False) -> Iterator[tuple[int, Path]]:
    """Yield an open temporary file beside `path` and its name; after an exit without error it replaces `path`."""
    fd, temporary = -1, ""
    try:
        fd, temporary = tempfile.mkstemp(dir=path.parent, prefix=temporary_prefix())
        os.fchmod(fd, mode & ~umask())
        yield fd, Path(temporary)
        if durable:
            os.fsync(fd)
        (rename_no_replace if new else os.replace)(temporary, path)
    except OSError as error:
        if error.filename is None or temporary_prefix() in os.fsdecode(error.filename):
            error.filename, error.filename2 = os.fspath(path), None
        raise
    finally:
        if temporary:
            os.close(fd)
            surely_remove(temporary)


def write_json(path: str | os.PathLike[str], value: Any, *, durable: bool = True) -> None:
    """Write `value` as readable JSON, atomically. Floats keep full precision; NaN is written as NaN."""
    write_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n", durable=durable)


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read a JSON file. Raises FileNotFoundError and json.JSONDecodeError as they come."""
    return json.loads(read_bytes(path).decode())


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Read a small file. Raises OSError as it comes."""
    return read_with_identity(path)[0]


FileIdentity = tuple[int, int, int]
"""Size, time of a change in nanoseconds, and inode: they differ for a file that is written or replaced."""


def read_with_identity(path: str | os.PathLike[str]) -> tuple[bytes, FileIdentity]:
    """Read a small file; return its identity too, see `file_identity`. Raises OSError. A look at a thousand runs reads
    ten files of each, for which `open` takes twice as long."""
    fd, found = open_for_reading(path)
    try:
        return read_descriptor(fd, found.st_size), (found.st_size, found.st_mtime_ns, found.st_ino)
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


def stat_of(
    path: str | os.PathLike[str], *, follow_symlinks: bool = True, dir_fd: int | None = None
) -> os.stat_result | None:
    """Return the status of a file or folder; None if there is none. Raises OSError for other errors."""
    try:  # cheaper than a context: a look at many runs asks for the files of thousands of attempts
        return os.stat(path, follow_symlinks=follow_symlinks, dir_fd=dir_fd)
    except (FileNotFoundError, NotADirectoryError):
        return None


def text_of(path: str | os.PathLike[str]) -> str | None:
    """Return the text of a small file; None if there is none. Raises OSError for other errors."""
    with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return None


def readable_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a small file; empty if it cannot be read."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def file_identity(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> FileIdentity | None:
    """Return the identity of the file that has this name now, or None. Raises OSError."""
    found = stat_of(path, dir_fd=dir_fd)
    return None if found is None else (found.st_size, found.st_mtime_ns, found.st_ino)


def file_identities(folder: str | os.PathLike[str], names: Iterable[str]) -> list[FileIdentity | None]:
    """Return the identities of many files by their paths below a folder: each costs half. Raises OSError."""
    top = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return [file_identity(name, dir_fd=top) for name in names]
    finally:
        os.close(top)


def leads_out(name: str) -> bool:
    """Return whether a path of a record or a setting can lead out of the folder that it belongs to."""
    return name.startswith("/") or ".." in name.split("/")


def open_for_reading(path: str | os.PathLike[str]) -> tuple[int, os.stat_result]:
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
        file = open(open_for_reading(path)[0], encoding="utf-8", errors="replace")  # noqa: SIM115 - closed below
    except FileNotFoundError:  # and no other error: a file system that is away for a moment does not empty a record
        return
    with file:
        for line in file:
            if line.endswith("\n") and (value := parse_record(line)) is not None:
                yield value


def file_size(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a file; 0 if it does not exist. Raises OSError."""
    found = stat_of(path)
    return 0 if found is None else found.st_size


def file_sizes(path: str | os.PathLike[str]) -> dict[str, int]:
    """Return the bytes of every file below a folder, by relative name; of a single file under the name `.`."""
    top = Path(path)
    if top.is_file():
        return {".": top.stat().st_size}
    return {str(found.relative_to(top)): found.stat().st_size for found in sorted(top.rglob("*")) if found.is_file()}


def names_in(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder, in their order; a missing folder has none. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(folder))
    return []


READ_BLOCK = 65_536
"""Maximum bytes per read of a file from its end."""
FIRST_READ_BLOCK = 4096
"""Bytes of the first read: most callers want the last line."""
MAX_MEAN_LINE = 2048
"""Mean bytes of a line beyond which `last_lines` returns fewer lines."""


def last_lines(path: str | os.PathLike[str], count: int) -> tuple[bytes, int]:
    """Return the last lines of a file and its size; nothing of a missing file. Only its end is read, at most
    `MAX_MEAN_LINE` bytes per line and 256 KiB: a file need not have lines."""
    try:
        fd, found = open_for_reading(path)
    except FileNotFoundError:
        return b"", 0
    size = found.st_size
    try:
        blocks, ends, floor = [], 0, size - (1 << 18) - count * MAX_MEAN_LINE
        for at, block in _blocks_backwards(fd, size):
            blocks.append(block)
            ends += block.count(b"\n")
            if ends > count or at < floor:
                break
    finally:
        os.close(fd)
    return b"".join(io.BytesIO(b"".join(blocks[::-1])).readlines()[-count:] if count else []), size


def last_bytes(path: str | os.PathLike[str], most: int, *, since: int = 0) -> bytes:
    """Return at most the last `most` bytes of a file, and nothing before byte `since`. Raises OSError."""
    with open(path, "rb") as file:
        file.seek(max(since, file.seek(0, os.SEEK_END) - most))
        return file.read()


def read_json_lines_backwards(
    path: str | os.PathLike[str], *, end: int | None = None
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete records of a file written by `append_line`, newest first, each with the byte where it ends;
    reads only as much as needed. A missing file has none. `end`: as if the file had only this many bytes."""
    try:
        fd, found = open_for_reading(path)
    except FileNotFoundError:
        return
    size = found.st_size
    try:
        rest: list[bytes] = []  # parts, the last first, of a line that begins in a block before
        torn = True  # behind the last newline
        for at, block in _blocks_backwards(fd, size if end is None else min(end, size)):
            rest.append(block)
            if at and b"\n" not in block and not torn:
                continue  # joined once: a file system that crashed leaves megabytes without a newline
            data = b"".join(reversed(rest))
            if torn:
                data = data[: data.rfind(b"\n") + 1]
                torn = not data
            lines = [line + b"\n" for line in data.split(b"\n")[:-1]]
            rest = [lines.pop(0)] if lines and at else []
            behind = at + sum(map(len, rest)) + sum(map(len, lines))
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


MIN_FREE_BYTES = 1 << 16
"""A file system with less free space for this user is full."""


def free_space(path: str | os.PathLike[str]) -> int:
    """Return the bytes that this user may still write to the file system of a path, which need not exist."""
    found = os.statvfs(nearest_existing(path))
    return found.f_bavail * found.f_frsize


def write_error(folder: Path) -> OSError | None:
    """Return the error of writing a small file into a folder, None if it succeeds: `statvfs` knows no quota."""
    try:
        fd, name = tempfile.mkstemp(dir=folder, prefix=temporary_prefix())
    except OSError as error:
        return error
    try:
        os.write(fd, bytes(4096))
        os.fsync(fd)
        return None
    except OSError as error:
        return error
    finally:
        with contextlib.suppress(OSError):
            os.close(fd)
            os.unlink(name)


def raise_open_file_limit() -> int:
    """Raise this process' soft limit of open files, often 1,024, to the hard limit; return that."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def unused_name(folder: Path, name: str) -> Path:
    """Return a path in `folder` that does not exist: `name`, or `name` with `-2`, `-3`, ... appended."""
    candidates = (folder / (name if number == 1 else f"{name}-{number}") for number in count(1))
    return next(path for path in candidates if not os.path.lexists(path))
