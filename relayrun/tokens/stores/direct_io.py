"""Large files written once past the page cache (O_DIRECT), and the checksums of files.

A checksum is XXH3 with 128 bits: it finds torn, swapped and flipped bytes at the speed of memory. `HashingFile`
computes it while a file is written.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import io
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
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


BLOCK_BYTES = 8 << 20
"""Bytes of a write. There are two blocks: one fills up while the other is written."""

ALIGNMENT = 4096
"""Direct writes begin and end at multiples of it: no device asks for more (open(2), O_DIRECT)."""

MAX_RESERVE_BYTES = BLOCK_BYTES - ALIGNMENT
"""Most bytes that `DirectFile.reserve` gives at once: a block may begin with up to `ALIGNMENT` bytes of the one
before."""


class DirectFile(io.RawIOBase):
    """A file for writing that stays out of the page cache.

    The bytes go from a block of memory straight to the disk, in a thread that writes behind. So checkpoints and
    shards do not push the data that training reads out of memory, the disk has no burst at the sync, and the kernel
    neither copies nor looks for pages, which is most of the CPU time of an ordinary write. On a file system without
    direct writes (O_DIRECT) the kernel is told early to write and to forget instead.

    What goes wrong behind is raised by a later call: by `fileno` or `close` at the latest.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._block, self._other = (
            mmap.mmap(-1, BLOCK_BYTES),
            mmap.mmap(-1, BLOCK_BYTES),
        )  # begin at a page, as direct writes must
        self._begin = self._filled = 0
        """Where the block that fills up stands in the file, and how much of it there is."""
        self._dirty = False
        """Whether some of it is in memory alone."""
        self._behind: Future[None] | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._fd = -1
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        try:
            self._fd = os.open(path, flags | os.O_DIRECT, 0o666)
            self._direct = True
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            self._fd, self._direct = os.open(path, flags, 0o666), False

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        """Return the descriptor when all that was written is in the file, so that whoever syncs by it syncs
        everything."""
        self._checkClosed()
        self._hand_over()
        return self._fd

    def flush(self) -> None:
        """Do nothing: torch asks for it behind every tensor, and the last block would be written again each time."""

    def tell(self) -> int:
        return self._begin + self._filled

    def write(self, data: Any) -> int:
        """Write all of `data`, bytes or a contiguous buffer of whatever type; return how many bytes it has."""
        self._checkClosed()
        view = memoryview(data)
        if not view.nbytes:
            return 0  # Python cannot look at nothing as bytes
        source = np.frombuffer(view.cast("B"), np.uint8)
        begin = 0
        while begin < len(source):
            piece = source[begin : begin + BLOCK_BYTES - self._filled]
            # numpy lets other threads run meanwhile, a copy between memoryviews does not
            self.reserve(len(piece))[:] = piece
            self.commit(len(piece))
            begin += len(piece)
        return len(source)

    def reserve(self, size: int) -> npt.NDArray[np.uint8]:
        """Return memory for the next `size` bytes, shape [size], to be filled before `commit`; at most
        `MAX_RESERVE_BYTES`."""
        if self._filled + size > BLOCK_BYTES:
            self._pass_on()
        assert self._filled + size <= BLOCK_BYTES
        return np.frombuffer(self._block, np.uint8)[self._filled : self._filled + size]

    def commit(self, size: int) -> None:
        """Make the first `size` bytes of the memory that `reserve` gave the next bytes of the file."""
        self._checkClosed()
        self._filled += size
        self._dirty = True
        if self._filled == BLOCK_BYTES:
            self._pass_on()

    def truncate(self, size: int | None = None) -> int:
        """Cut off what was written behind `size`; writing goes on there."""
        size = self.tell() if size is None else size
        if not 0 <= size <= self.tell():
            raise ValueError(f"there are {self.tell()} bytes, not {size}")
        self._wait()  # or what is on its way would be cut off, or come back
        begin, tail = self._begin, b""
        if size < begin:
            begin = size // ALIGNMENT * ALIGNMENT
            with self._through_the_cache():
                tail = os.pread(self._fd, size - begin, begin)
            if len(tail) != size - begin:
                raise OSError(errno.EIO, f"{len(tail)} bytes at {begin}, not {size - begin}")
        os.ftruncate(self._fd, min(size, os.fstat(self._fd).st_size))
        self._block[: len(tail)] = tail
        self._begin, self._filled = begin, size - begin
        return size

    def close(self) -> None:
        """Write what is left and close the file. Raises OSError for a write that failed behind."""
        if self.closed or self._fd < 0:
            return
        try:
            self._hand_over()
        finally:
            super().close()
            try:
                if self._thread is not None:
                    self._thread.shutdown()
            finally:
                with contextlib.suppress(OSError):  # advice alone
                    os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(self._fd)
                self._fd = -1

    def _hand_over(self) -> None:
        """Everything is in the kernel's hands."""
        self._wait()
        if self._dirty:
            whole = self._filled // ALIGNMENT * ALIGNMENT
            self._write_at(memoryview(self._block)[:whole], self._begin)
            # the rest is kept in the block too, for a file that goes on
            self._cached(memoryview(self._block)[whole : self._filled], self._begin + whole)
            self._dirty = False

    def _pass_on(self) -> None:
        """The block is written behind, but for what ends between two places of a direct write; the other fills up."""
        self._wait()
        whole = self._filled // ALIGNMENT * ALIGNMENT
        rest = self._filled - whole
        self._other[:rest] = self._block[whole : self._filled]
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._behind = self._thread.submit(self._write_at, memoryview(self._block)[:whole], self._begin)
        self._block, self._other = self._other, self._block
        self._begin, self._filled = self._begin + whole, rest

    def _wait(self) -> None:
        """For the block behind. What failed once fails every time."""
        if self._behind is not None:
            self._behind.result()
            self._behind = None

    def _write_at(self, block: memoryview, place: int) -> None:
        if self._direct:
            try:
                _write_all(self._fd, block, place)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # opened for direct writes, and refuses them
                    raise
                self._direct = False
        self._cached(block, place)

    def _cached(self, data: memoryview, place: int) -> None:
        """Through the page cache."""
        with self._through_the_cache():
            _write_all(self._fd, data, place)
        # begins to write this, and drops what is written of the block before (Linux, mm/fadvise.c)
        with contextlib.suppress(OSError):  # advice alone
            begin = max(place - BLOCK_BYTES, 0)
            os.posix_fadvise(self._fd, begin, place + len(data) - begin, os.POSIX_FADV_DONTNEED)

    @contextlib.contextmanager
    def _through_the_cache(self) -> Iterator[None]:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
        try:
            yield
        finally:
            if self._direct:
                fcntl.fcntl(self._fd, fcntl.F_SETFL, flags)


def _write_all(fd: int, data: memoryview, place: int) -> None:
    while data:
        written = os.pwrite(fd, data, place)
        data, place = data[written:], place + written
