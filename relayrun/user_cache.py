"""The user's cache: values that are quick to read and slow to compute, each of a kind, in a folder of its own.

A file begins with the hash of the rest: a damaged file is ignored. `RELAYRUN_CACHE` names the folder (default:
`relayrun` in the user's cache folder); if it is empty, or not writable, nothing is kept. Values unused for a month are
removed. Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import time
from pathlib import Path

from relayrun.files import write_atomic
from relayrun.trust import UntrustedError, read_trusted

_MAX_AGE_SECONDS = 30 * 24 * 3600


def read_cache(kind: str, name: str) -> bytes | None:
    """Return the value of this name; None if it is missing, damaged, or somebody else can have written it."""
    with contextlib.suppress(OSError, RuntimeError, UntrustedError):
        if (folder := _cache_folder(kind)) is not None:
            known, _, value = read_trusted(folder, name).partition(b"\n")
            if hashlib.sha256(value).hexdigest().encode() == known:
                if os.stat(folder / name).st_mtime < time.time() - _MAX_AGE_SECONDS / 30:
                    os.utime(folder / name)
                return value
    return None


def write_cache(kind: str, name: str, value: bytes) -> None:
    """Keep a value, if the cache is writable."""
    with contextlib.suppress(OSError, RuntimeError):
        if (folder := _cache_folder(kind)) is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _remove_unused(folder)
            head = hashlib.sha256(value).hexdigest().encode() + b"\n"
            write_atomic(folder / name, head + value, mode=0o600, durable=False)


def _cache_folder(kind: str) -> Path | None:
    named = os.environ.get("RELAYRUN_CACHE")
    if named is None:
        named = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "relayrun")
    return Path(named, kind) if named else None


@functools.cache  # once in a process: there may be a file of each of thousands of runs
def _remove_unused(folder: Path) -> None:
    for file in folder.iterdir():
        if file.stat().st_mtime < time.time() - _MAX_AGE_SECONDS:
            file.unlink()
