"""Decides whether files of a run directory are trusted: only those start a program, name an address or lead a write.

A file is trusted if this user or root owns it and every folder from the run directory down, and nobody else may write
them. Links are not followed: each part of the path is opened below the descriptor of its folder, and the caller reads
the descriptor that was judged. A group that may write a folder above the run directory can only exchange run
directories, whose files it does not own; a folder above in which everybody may rename is refused. Standard library
only.

The user's cache keeps values that are slow to compute, each kind in a folder of its own. A file begins with the hash of
the rest, and one that is damaged or not trusted is ignored. `RELAYRUN_CACHE` names the folder (default: `relayrun` in
the user's cache folder); if it is empty, or not writable, nothing is kept. Values unused for a month are removed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import hashlib
import json
import os
import shlex
import stat
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from relayrun.errors import RunDirError, user_name
from relayrun.files import read_descriptor, write_atomic, write_json

_FLAGS = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK

_AT_FDCWD, _STATX_BTIME = -100, 0x800
_NETWORK_FILE_SYSTEMS = (0x6969, 0x0BD00BD0, 0x47504653, 0xC36400, 0x19830326, 0xAAD7AAEA, 0xFE534D42, 0x65735546)
"""Magic numbers of NFS, Lustre, GPFS, Ceph, BeeGFS, PanFS, SMB and FUSE: one host tells a birth, another does not."""

_CACHE_SECONDS = 30 * 86400.0
OTHER_OWNER_HINT = "submit a config of your own; with --take-over its run goes on from the checkpoints of this one"


class UntrustedError(RunDirError):
    """Another user can have written a file on which a program, an address or a write depends."""


def read_cache(kind: str, name: str) -> bytes | None:
    """Return the value of this name; None if it is missing, damaged, or somebody else can have written it."""
    with contextlib.suppress(OSError, RuntimeError, UntrustedError):
        if (folder := _cache_folder(kind)) is not None:
            known, _, value = read_trusted(folder, name).partition(b"\n")
            if hashlib.sha256(value).hexdigest().encode() == known:
                os.utime(folder / name)
                return value
    return None


def write_cache(kind: str, name: str, value: bytes) -> None:
    """Keep a value, if the cache is writable."""
    with contextlib.suppress(OSError, RuntimeError):
        if (folder := _cache_folder(kind)) is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            head = hashlib.sha256(value).hexdigest().encode() + b"\n"
            write_atomic(folder / name, head + value, mode=0o600, durable=False)
            _remove_unused(folder)


def _cache_folder(kind: str) -> Path | None:
    named = os.environ.get("RELAYRUN_CACHE")
    if named is None:
        named = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "relayrun")
    return Path(named, kind) if named else None


@functools.cache  # once in a process: there may be a file of each of thousands of runs
def _remove_unused(folder: Path) -> None:
    for file in folder.iterdir():
        if file.stat().st_mtime < time.time() - _CACHE_SECONDS:
            file.unlink()


def read_trusted(folder: Path | str, name: str) -> bytes:
    """Return the bytes of a trusted file below `folder`. Raises UntrustedError, and OSError as `open` does."""
    with _opened(folder) as (top, path), _opened_below(top, path, name, path) as fd:
        return read_descriptor(fd, os.fstat(fd).st_size)


def refuse_untrusted(
    folder: Path | str, names: Iterable[str], *, trees: Sequence[str] = (), shared: bool = False
) -> None:
    """Raise UntrustedError unless `folder` and the files and folders of these names below it, if any, are trusted.

    `trees`: folders with all that lies in them. `shared`: this user names `folder`, which others may own and write, as
    project storage.
    """
    with _opened(folder, shared=shared) as (top, path):
        for name in (*names, *trees):
            own = f"{path}/{name.partition('/')[0]}" if shared else path
            with contextlib.suppress(FileNotFoundError), _opened_below(top, path, name, own) as fd:
                if name in trees:
                    _refuse_below(fd, f"{path}/{name}", own)


def _refuse_below(top: int, folder: str, own: str) -> None:
    """Judge all that lies in an open folder. Links are left out: only who may write their folder makes them."""
    for name in os.listdir(top):
        try:
            found = os.lstat(name, dir_fd=top)
            if stat.S_ISLNK(found.st_mode):
                continue
            _refuse(found, f"{folder}/{name}", own)
            if not stat.S_ISDIR(found.st_mode):
                continue
            below = os.open(name, _FLAGS, dir_fd=top)
        except FileNotFoundError:  # Python renames each file that it compiles
            continue
        try:
            _refuse_below(below, f"{folder}/{name}", own)
        finally:
            os.close(below)


def read_owned(folder: Path | str, name: str) -> Any:
    """Return the JSON object of anybody's plan.json or campaign.json. `owner`: another user if the file or `folder` is
    another user's; None for a copy of `folder`, whose text somebody else may have written; else as the file says."""
    text, owner = read_with_owner(folder, name)
    entry = json.loads(text.decode())
    if not isinstance(entry, dict):
        return entry  # its reader says what is wrong
    if owner != os.geteuid():
        entry["owner"] = owner
    elif not _is_folder(entry.get("directory"), folder):
        entry["owner"] = None
    elif entry["owner"] is None:
        entry["owner"] = owner
    return entry


def write_owned(path: Path, entry: dict[str, Any]) -> None:
    """Write a file that `read_owned` reads, and with it the identity of its folder, which no copy has."""
    write_json(path, entry | {"directory": folder_identity(path.parent)})


def folder_identity(folder: Path | str) -> list[int | None]:
    """Return the inode number of a folder, which can be guessed, and the nanosecond of its birth, which nobody can
    choose or foresee; None where the file system tells none."""
    buffer = ctypes.create_string_buffer(256)
    statx = getattr(ctypes.CDLL(None), "statx", None)  # glibc 2.28 and newer
    known = statx is not None and statx(_AT_FDCWD, os.fsencode(folder), 0, _STATX_BTIME, buffer) == 0
    seconds, nanoseconds = struct.unpack_from("qI", buffer, 80)
    known = known and bool(struct.unpack_from("I", buffer)[0] & _STATX_BTIME)
    return [os.stat(folder).st_ino, seconds * 10**9 + nanoseconds if known else None]


def _is_folder(recorded: object, folder: Path | str) -> bool:
    """True if this is the folder's identity. Where either host tells no birth, the number alone counts. On a file
    system of this machine alone no host can have told none, and who planted the plan of a copy writes what he wants."""
    own = folder_identity(folder)
    if recorded == own or not isinstance(recorded, list) or recorded[:1] != own[:1]:
        return recorded == own
    return own[1] is None or (recorded[1:] == [None] and _file_system(folder) in _NETWORK_FILE_SYSTEMS)


def _file_system(folder: Path | str) -> int:
    buffer = ctypes.create_string_buffer(256)
    ctypes.CDLL(None).statfs(os.fsencode(folder), buffer)
    return int(struct.unpack_from("I", buffer)[0])


def read_with_owner(folder: Path | str, name: str) -> tuple[bytes, int]:
    """Return the bytes of a file of anybody, and its owner: another user if the file or `folder` is another user's."""
    try:
        fd = os.open(f"{folder}/{name}", _FLAGS)
    except OSError as error:
        raise _link_error(error, f"{folder}/{name}") from None
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UntrustedError("this is no file", where=f"{folder}/{name}")
        others = {found.st_uid, os.stat(folder).st_uid} - {os.geteuid()}
        return read_descriptor(fd, found.st_size), max(others, default=os.geteuid())
    finally:
        os.close(fd)


def group_writable_parent(folder: Path | str) -> str | None:
    """Return the nearest folder above `folder` that its group may write."""
    above = Path(os.path.realpath(folder)).parents
    return next((str(each) for each in above if os.stat(each).st_mode & stat.S_IWGRP), None)


@contextlib.contextmanager
def _opened(folder: Path | str, *, shared: bool = False) -> Iterator[tuple[int, str]]:
    path = os.path.realpath(folder)
    for above in [*[Path(path)] * shared, *Path(path).parents]:
        mode = os.stat(above).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise UntrustedError(
                "everybody may rename what lies here", where=above, hint=f"chmod o-w {shlex.quote(str(above))}"
            )
    fd = os.open(path, _FLAGS)
    try:
        if not shared:
            _refuse(os.fstat(fd), path, path)
        yield fd, path
    finally:
        os.close(fd)


@contextlib.contextmanager
def _opened_below(top: int, folder: str, name: str, own: str) -> Iterator[int]:
    fd, path = os.dup(top), folder
    try:
        for part in name.split("/"):
            path = f"{path}/{part}"
            try:
                below = os.open(part, _FLAGS, dir_fd=fd)
            except OSError as error:
                raise _link_error(error, path) from None
            os.close(fd)
            fd = below
            _refuse(os.fstat(fd), path, own)
        yield fd
    finally:
        os.close(fd)


def _refuse(found: os.stat_result, path: str, folder: str) -> None:
    """Raise UntrustedError, with the command that mends it, unless this file or folder is trusted."""
    if found.st_uid not in (os.geteuid(), 0):
        words = f"this belongs to {user_name(found.st_uid)}: nothing that it names is started or written to"
        raise UntrustedError(words, where=path, hint=OTHER_OWNER_HINT)
    if not (stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)):
        raise UntrustedError("this is no file and no folder", where=path, hint=f"rm {shlex.quote(path)}")
    if writers := found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        who = "everybody" if writers & stat.S_IWOTH else "its group"
        words = f"{who} may write this, so that nothing that it names is started or written to"
        raise UntrustedError(words, where=path, hint=f"look at it, then: chmod -R go-w {shlex.quote(folder)}")


def _link_error(error: OSError, path: str) -> Exception:
    """Return the error for a part of a path that cannot be opened: a link is not trusted."""
    if error.errno != errno.ELOOP:
        return OSError(error.errno, error.strerror, path)
    return UntrustedError("this is a link, which is not followed", where=path, hint="put the file itself there")
