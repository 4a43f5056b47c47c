"""What was found out about a tokenizer on this machine, kept so that the next start need not find it out again.

A value lies in a file whose name is the hash of all that it depends on: what it is made from, this package's code, the
libraries as they are installed, Python's tables of Unicode, and the processor. The file begins with the hash of what
follows: a damaged one is as good as none. `RELAYRUN_CACHE` names the folder (default: `relayrun` in the user's folder
for caches); where it is empty, or nothing can be written, nothing is kept. What was not used for a month goes.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import time
import unicodedata
from collections.abc import Iterable
from pathlib import Path

from relayrun.files import write_atomic

_MAX_AGE_SECONDS = 30 * 24 * 3600
_CODE_FOLDER = Path(__file__).resolve().parents[1]


def cache_key(what: str, parts: Iterable[bytes], packages: Iterable[str]) -> str:
    """The name of a value that depends on `parts`, and on the packages of these names, besides this code."""
    known = hashlib.sha256()
    for part in (what.encode(), _code_and_machine(), *map(_package_record, sorted(packages)), *parts):
        known.update(len(part).to_bytes(8, "little") + part)
    return known.hexdigest()


def read_cache(name: str) -> bytes | None:
    """The value that was kept under this name; None where there is none, or a damaged one."""
    with contextlib.suppress(OSError, RuntimeError):
        if (folder := _cache_folder()) is not None:
            file = folder / name
            known, _, value = file.read_bytes().partition(b"\n")
            if hashlib.sha256(value).hexdigest().encode() == known:
                os.utime(file)
                return value
    return None


def write_cache(name: str, value: bytes) -> None:
    """Keep a value, if that can be done."""
    with contextlib.suppress(OSError, RuntimeError):
        if (folder := _cache_folder()) is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            head = hashlib.sha256(value).hexdigest().encode() + b"\n"
            write_atomic(folder / name, head + value, mode=0o600, durable=False)
            for file in folder.iterdir():
                if file.stat().st_mtime < time.time() - _MAX_AGE_SECONDS:
                    file.unlink()


def _cache_folder() -> Path | None:
    named = os.environ.get("RELAYRUN_CACHE")
    if named is None:
        named = os.path.join(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "relayrun")
    return Path(named, "tokenizers") if named else None


@functools.cache
def _code_and_machine() -> bytes:
    """The code of tokenization, Python's tables and the processor."""
    known = hashlib.sha256()
    for file in sorted(_CODE_FOLDER.rglob("*.py")):
        known.update(file.relative_to(_CODE_FOLDER).as_posix().encode() + b"\0" + file.read_bytes())
    processor = f"{unicodedata.unidata_version} {platform.machine()} {platform.python_version()}"
    with contextlib.suppress(OSError):  # other systems have no such file
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").split("\n\n", 1)[0].splitlines()
        processor += "".join(line for line in lines if line.split("\t")[0] in ("model name", "flags", "Features"))
    return known.digest() + processor.encode()


@functools.cache
def _package_record(package: str) -> bytes:
    """What is installed: the hashes of its files, as its record lists them, and its version."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return b"none"
    return f"{found.version} {found.read_text('RECORD')}".encode()
