"""Large files written once past the page cache (O_DIRECT), and checksums of files.

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

from relayrun.progress import count

_HASH_BYTES = 1 << 20
"""Bytes read at a time, which stay in the processor's cache."""


def file_checksum(path: str | os.PathLike[str], begin: int = 0, end: int | None = None) -> str:
    """Return the xxh3-128 of a file, or of its bytes from `begin` to `end`, 32 hexadecimal digits. Raises OSError."""
    with open(path, "rb", buffering=0) as file:
        file.seek(begin)
        return open_file_checksum(file, None if end is None else end - begin)


def open_file_checksum(file: Any, left: int | None = None) -> str:
    """Return the xxh3-128 of the rest of an open file (with `readinto`), 32 hexadecimal digits; `left`: of at most so
    many bytes. Raises as it does."""
    digest, buffer = xxhash.xxh3_128(), memoryview(bytearray(_HASH_BYTES))
    while read := file.readinto(buffer if left is None else buffer[:left]):
        digest.update(buffer[:read])
        count(read)
        left = None if left is None else left - read
    return str(digest.hexdigest())


class HashingFile:
    """A file open for writing, hashed while it is written from the beginning."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = xxhash.xxh3_128()
        self.bytes = 0
        """Bytes written so far."""

    def write(self, data: Any) -> int:
        """Write bytes or a contiguous buffer; return its size in bytes."""
        self._digest.update(data)
        self.bytes += memoryview(data).nbytes
        return self._file.write(data)

    def fileno(self) -> int:
        """Flush, and return the descriptor, so that a sync of the descriptor covers all writes."""
        self._file.flush()
        return self._file.fileno()

    def hexdigest(self) -> str:
        """Return the xxh3-128 of the bytes written so far, 32 hexadecimal digits."""
        return str(self._digest.hexdigest())


BLOCK_BYTES = 8 << 20
"""Bytes of a write. There are two blocks: one fills up while the other is written."""

ALIGNMENT = 4096
"""Direct writes begin and end at multiples of it: no device asks for more (open(2), O_DIRECT)."""

MAX_RESERVE_BYTES = BLOCK_BYTES - ALIGNMENT
"""Most bytes that `DirectFile.reserve` returns: a block may begin with up to `ALIGNMENT` bytes of the previous one."""


class DirectFile(io.RawIOBase):
    """A file for writing that stays out of the page cache.

    A thread writes each block of memory straight to disk, behind the caller. So checkpoints and shards do not evict the
    training data from memory, the sync causes no burst of writes, and the kernel neither copies nor searches pages,
    which is most of the CPU time of an ordinary write. On a file system without O_DIRECT the kernel is told early to
    write and to drop pages instead. A later call raises the error of a write: `fileno` or `close` at the latest.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # both begin at a page, as direct writes must
        self._block, self._other = mmap.mmap(-1, BLOCK_BYTES), mmap.mmap(-1, BLOCK_BYTES)
        self._begin = self._filled = 0
        """File offset of the current block, and bytes in it."""
        self._dirty = False
        """True while some of the block is only in memory."""
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
        """Return the descriptor when all writes are in the file, so that a sync of the descriptor covers them."""
        self._checkClosed()
        self._hand_over()
        return self._fd

    def flush(self) -> None:
        """Do nothing: torch flushes after every tensor, and each flush would write the last block again."""

    def tell(self) -> int:
        return self._begin + self._filled

    def write(self, data: Any) -> int:
        """Write all of `data`, bytes or a contiguous buffer of any type; return its size in bytes."""
        self._checkClosed()
        view = memoryview(data)
        if not view.nbytes:
            return 0  # Python cannot cast an empty view to bytes
        source = np.frombuffer(view.cast("B"), np.uint8)
        begin = 0
        while begin < len(source):
            piece = source[begin : begin + BLOCK_BYTES - self._filled]
            # numpy releases the lock while it copies, a copy between memoryviews does not
            self.reserve(len(piece))[:] = piece
            self.commit(len(piece))
            begin += len(piece)
        return len(source)

    def reserve(self, size: int) -> npt.NDArray[np.uint8]:
        """Return memory for the next `size` bytes, shape [size], to fill before `commit`; at most MAX_RESERVE_BYTES."""
        if self._filled + size > BLOCK_BYTES:
            self._pass_on()
        assert self._filled + size <= BLOCK_BYTES
        return np.frombuffer(self._block, np.uint8)[self._filled : self._filled + size]

    def commit(self, size: int) -> None:
        """Append the first `size` bytes of the reserved memory to the file."""
        self._checkClosed()
        self._filled += size
        self._dirty = True
        if self._filled == BLOCK_BYTES:
            self._pass_on()

    def truncate(self, size: int | None = None) -> int:
        """Cut the file off at `size` bytes; the next write continues there."""
        size = self.tell() if size is None else size
        if not 0 <= size <= self.tell():
            raise ValueError(f"there are {self.tell()} bytes, not {size}")
        self._wait()  # else a pending write could be cut off, or restore what is cut
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
        """Write the rest and close the file. Raises OSError for a write that failed in the background."""
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
        self._wait()
        if self._dirty:
            whole = self._filled // ALIGNMENT * ALIGNMENT
            self._write_at(memoryview(self._block)[:whole], self._begin)
            # the block keeps the rest too, for the next writes
            self._cached(memoryview(self._block)[whole : self._filled], self._begin + whole)
            self._dirty = False

    def _pass_on(self) -> None:
        """Write the block in the background, except for an unaligned rest, and continue in the other block."""
        self._wait()
        whole = self._filled // ALIGNMENT * ALIGNMENT
        rest = self._filled - whole
        self._other[:rest] = self._block[whole : self._filled]
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="write-behind")
        self._behind = self._thread.submit(self._write_at, memoryview(self._block)[:whole], self._begin)
        self._block, self._other = self._other, self._block
        self._begin, self._filled = self._begin + whole, rest

    def _wait(self) -> None:
        """Wait for the background write. A failed write raises every time."""
        if self._behind is not None:
            self._behind.result()
            self._behind = None

    def _write_at(self, block: memoryview, place: int) -> None:
        if self._direct:
            try:
                _write_all(self._fd, block, place)
                return
            except OSError as error:
                if error.errno != errno.EINVAL:  # some file systems open for direct writes, and refuse them
                    raise
                self._direct = False
        self._cached(block, place)

    def _cached(self, data: memoryview, place: int) -> None:
        with self._through_the_cache():
            _write_all(self._fd, data, place)
        # starts writing this block, and drops the written pages of the previous one (Linux, mm/fadvise.c)
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
