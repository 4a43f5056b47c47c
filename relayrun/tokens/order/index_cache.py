"""Indices that are built once and kept in a folder, for all ranks and attempts.

    HASH-document.npy  HASH-sample.npy  HASH-shuffle.npy    of `order: megatron`; each synced, then renamed
    HASH-rows.npy                                           of `order: document-window`: the rows before each block
    HASH-checksums.json                                     bytes and XXH3-128 of each, written last
    HASH-checked.json                                       openings that verified the files, with size and time
    HASH.lock                                               shared for reading, exclusive to verify and build

A wrong index gives wrong samples without an error, so the files are compared with their checksums on opening; a
mismatch rebuilds all, which gives the same bytes. The ranks of an attempt share an opening: the first rank compares and
records it in HASH-checked.json; the others verify on their own only if size or time differ.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.files import atomic_file, read_json, write_json
from relayrun.tokens.stores.direct_io import HashingFile, file_checksum

log = logging.getLogger(__name__)

INDEX_NAMES = ("document", "sample", "shuffle")
KEPT_OPENINGS = 8
"""Number of most recent openings on record: several runs may share a cache."""

Indices = Sequence[npt.NDArray[Any]]


class IndexCache:
    """The indices of a data set, or of one of its epochs."""

    def __init__(
        self, folder: Path, name: str, *, opening: str | None = None, parts: Sequence[str] = INDEX_NAMES
    ) -> None:
        """`name`: the hash of everything that the indices depend on. `parts`: the name of each index. `opening`: the
        identity of the ranks that open the cache together; None for a single process."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = folder / f"{name}.lock"
        self._paths = [folder / f"{name}-{part}.npy" for part in parts]
        self._record = folder / f"{name}-checksums.json"
        self._checked = folder / f"{name}-checked.json"
        self._opening = opening

    def read_or_build(self, build: Callable[[], Indices]) -> list[npt.NDArray[Any]]:
        """Return the indices, mapped into memory. The first process builds them while the others wait."""
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if not self._is_verified() and (self._opening is not None or self._fault() is not None):
                # the upgrade releases the lock in between: another process may build first
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not self._is_verified():
                    if (fault := self._fault()) is not None:
                        if any(path.exists() for path in self._paths):
                            log.warning("the index cache is built anew: %s", fault)
                        self._build(build)
                    if self._opening is not None:
                        openings = {**self._openings(), self._opening: self._stamps()}
                        with contextlib.suppress(OSError):  # on a full disk each process verifies for itself
                            write_json(self._checked, dict([*openings.items()][-KEPT_OPENINGS:]), durable=False)
            return [np.load(path, mmap_mode="r", allow_pickle=False) for path in self._paths]

    def _is_verified(self) -> bool:
        """True if a process of this opening has verified the present files."""
        if self._opening is None:
            return False
        stamps = self._stamps()
        return stamps is not None and self._openings().get(self._opening) == stamps

    def _openings(self) -> dict[str, Any]:
        """Return size and time of change (ns) of the verified files by opening, oldest first."""
        try:
            found = read_json(self._checked)
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _stamps(self) -> list[list[int]] | None:
        """Return size and time of change (ns) of the present files; None if a file is missing."""
        try:
            return [[found.st_size, found.st_mtime_ns] for found in map(os.stat, (*self._paths, self._record))]
        except FileNotFoundError:
            return None

    def _fault(self) -> str | None:
        """Return the defect of the files; None: they equal what was built."""
        try:
            record = read_json(self._record)
            for path in self._paths:
                if {"bytes": path.stat().st_size, "xxh3_128": file_checksum(path)} != record[path.name]:
                    return f"{path} is not what was built"
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
        except (ValueError, KeyError, TypeError):
            return f"{self._record} does not fit its files"
        return None

    def _build(self, build: Callable[[], Indices]) -> None:
        record = {}
        self._record.unlink(missing_ok=True)  # it would vouch for old files
        for path, index in zip(self._paths, build(), strict=True):
            with atomic_file(path) as temporary, temporary.open("wb") as file:
                hashed = HashingFile(file)
                np.save(hashed, index, allow_pickle=False)
            record[path.name] = {"bytes": hashed.bytes, "xxh3_128": hashed.hexdigest()}
        write_json(self._record, record)
