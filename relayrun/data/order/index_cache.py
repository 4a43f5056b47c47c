"""Indices of `order: megatron` that are built once and kept in `data.data_cache_dir`, for all ranks and attempts.

    HASH-document.npy  HASH-sample.npy  HASH-shuffle.npy    each synced, then renamed
    HASH-checksums.json                                     bytes and XXH3-128 of each, written last
    HASH.lock                                               held by who reads (shared) or builds (alone)

A wrong index gives wrong samples without an error. So every opening compares the files with their checksums; where one
does not fit, all are built anew, which gives the same bytes.
"""

from __future__ import annotations

import fcntl
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
import xxhash

from relayrun.files import read_json, whole_file, write_json

log = logging.getLogger(__name__)

NAMES = ("document", "sample", "shuffle")

Indices = Sequence[npt.NDArray[Any]]


class IndexCache:
    """The indices of one epoch of one data set."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name`: the hash of everything that the indices depend on."""
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = folder / f"{name}.lock"
        self._paths = [folder / f"{name}-{part}.npy" for part in NAMES]
        self._record = folder / f"{name}-checksums.json"

    def read_or_build(self, build: Callable[[], Indices]) -> list[npt.NDArray[Any]]:
        """Return the indices, mapped into memory; the first to come builds them, and the others wait for it."""
        with self._lock.open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
            if self._fault() is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)  # it lets go in between: another one may have built them
                if (fault := self._fault()) is not None:
                    if any(path.exists() for path in self._paths):
                        log.warning("the index cache is built anew: %s", fault)
                    self._build(build)
            return [np.load(path, mmap_mode="r", allow_pickle=False) for path in self._paths]

    def _fault(self) -> str | None:
        """What is wrong with the files; None: they are those that were built."""
        try:
            record = read_json(self._record)
            for path in self._paths:
                if _sum(np.memmap(path, np.uint8, "r")) != record[path.name]:
                    return f"{path} is not what was built"
        except FileNotFoundError as error:
            return f"{error.filename} is missing"
        except (ValueError, KeyError, TypeError):  # of an empty file, too
            return f"{self._record} does not fit its files"
        return None

    def _build(self, build: Callable[[], Indices]) -> None:
        record = {}
        self._record.unlink(missing_ok=True)  # it vouches for none of what comes
        for path, index in zip(self._paths, build(), strict=True):
            with whole_file(path) as temporary, temporary.open("wb") as file:
                hashed = _Hashed(file)
                np.save(hashed, index, allow_pickle=False)
            record[path.name] = {"bytes": hashed.bytes, "xxh3_128": hashed.digest.hexdigest()}
        write_json(self._record, record)


class _Hashed:
    """A file that is hashed as it is written."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.digest = xxhash.xxh3_128()
        self.bytes = 0

    def write(self, data: bytes) -> int:
        self.digest.update(data)
        self.bytes += len(data)
        return self._file.write(data)


def _sum(data: npt.NDArray[np.uint8]) -> dict[str, int | str]:
    return {"bytes": data.nbytes, "xxh3_128": xxhash.xxh3_128_hexdigest(data.data)}
