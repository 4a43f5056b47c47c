"""A long text that is put together piece by piece, and lies in a file where it is very long."""

from __future__ import annotations

import contextlib
import mmap
import tempfile
import weakref
from collections.abc import Iterator
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.errors import RelayrunError

MAX_BYTES_IN_MEMORY = 16 << 20
"""Bytes of a text that is kept in memory."""

_mapped: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()
"""Texts that lie in files, by their address."""


class LongText:
    """The bytes of one text, above `MOST_IN_MEMORY` in a file without a name, which is gone when nobody reads it."""

    def __init__(self, folder: str | None) -> None:
        """`folder` gets the file; None: the text stays in memory, whatever its length."""
        self._folder = folder
        self._memory = bytearray()
        self._file: IO[bytes] | None = None

    def add(self, data: bytes) -> None:
        """Raises RelayrunError when the disk is full."""
        self._memory += data
        if self._folder is not None and (self._file is not None or len(self._memory) > MAX_BYTES_IN_MEMORY):
            with _explain_full_disk(self._folder):
                if self._file is None:
                    self._file = tempfile.TemporaryFile(dir=self._folder, prefix=".text-")  # noqa: SIM115
                    weakref.finalize(self, self._file.close)  # also of a text that nobody asks for
                self._file.write(self._memory)
                self._file.flush()
            self._memory = bytearray()

    def text(self) -> pa.Array:
        """A large_string array of this one text, not copied; nothing may be added any more. Raises as `add` does."""
        data: bytearray | mmap.mmap = self._memory
        if self._file is not None:
            with _explain_full_disk(self._folder), self._file:
                data = mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ)
            _mapped[_address(np.frombuffer(data, np.uint8))] = data
        offsets = pa.py_buffer(np.array([0, len(data)], np.int64))
        return pa.LargeStringArray.from_buffers(1, offsets, pa.py_buffer(data))


@contextlib.contextmanager
def _explain_full_disk(folder: object) -> Iterator[None]:
    """An error of the file is not one of the input."""
    try:
        yield
    except OSError as error:
        raise RelayrunError(f"no room for a long text: {error.strerror}", where=folder) from None


def release_pages(data: npt.NDArray[np.uint8]) -> None:
    """Tell the kernel that a text is read up to the end of `data`: what lies in a file need not stay in memory."""
    begin = _address(data)
    for place, mapped in _mapped.items():
        if place <= begin < place + len(mapped):
            # from the beginning: the kernel brings pages around a place that is read, and so some behind it once more
            mapped.madvise(mmap.MADV_DONTNEED, 0, begin - place + data.size)


def _address(data: npt.NDArray[np.uint8]) -> int:
    return int(data.__array_interface__["data"][0])
