"""The checksum of files: XXH3 with 128 bits, which finds torn, swapped and flipped bytes at the speed of memory."""

from __future__ import annotations

import os
from typing import Any, BinaryIO

import xxhash

_HASH_BYTES = 1 << 20
"""Bytes that are read at a time: they stay in the processor's cache."""


def file_checksum(path: str | os.PathLike[str]) -> str:
    """The xxh3-128 of a whole file, 32 hexadecimal digits. Raises OSError as it comes."""
    with open(path, "rb", buffering=0) as file:
        return open_file_checksum(file)


def open_file_checksum(file: Any) -> str:
    """The xxh3-128 of what is left of an open file (with `readinto`), 32 hexadecimal digits. Raises as reading does."""
    digest, buffer = xxhash.xxh3_128(), bytearray(_HASH_BYTES)
    while read := file.readinto(buffer):
        digest.update(memoryview(buffer)[:read])
    return str(digest.hexdigest())


class HashingFile:
    """A file, open for writing, that is hashed as it is written from its begin on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.bytes = 0
        """Written up to now."""

    def write(self, data: Any) -> int:
        """Write bytes or a contiguous buffer; return how many bytes it has."""
        self._digest.update(data)
        self.bytes += memoryview(data).nbytes
        return self._file.write(data)

    def fileno(self) -> int:
        """Return the descriptor when everything is in the kernel's hands: whoever syncs by it syncs everything."""
        self._file.flush()
        return self._file.fileno()

    def hexdigest(self) -> str:
        """The xxh3-128 of what was written up to now, 32 hexadecimal digits."""
        return str(self._digest.hexdigest())
