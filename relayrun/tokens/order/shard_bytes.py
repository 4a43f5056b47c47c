"""The bytes of a shard's file: of one on a local disk, or below a URL, through a cache of its blocks."""

from __future__ import annotations

import os
from typing import Protocol

from relayrun.errors import FatalTrainingError, InputError
from relayrun.tokens.order.block_cache import BLOCK_BYTES, BlockCache
from relayrun.tokens.stores import stores
from relayrun.tokens.stores.remote import retry_transient


class ShardFile(Protocol):
    """An open file. Several threads may read it."""

    def pread(self, count: int, at: int) -> bytes:
        """Return `count` bytes from place `at` on; fewer only behind the end of the file."""
        ...


def open_shard_file(path: str, size: int, fingerprint: str, blocks: BlockCache | None) -> ShardFile:
    """Open a file of a shard, a local one or one below a URL.

    `size`, `fingerprint`: of the file and of its shard when the run began, which name its blocks. `blocks`: needed for
    a URL. Raises OSError for a local file, and InputError for a URL that has changed or cannot be read.
    """
    if not stores.is_url(path):
        return LocalShardFile(path)
    if blocks is None:
        raise FatalTrainingError("this shard lies below a URL, and there is no cache", where=path)
    return RemoteShardFile(path, size, fingerprint, blocks)


class LocalShardFile:
    """A local file. Closed when the last user lets go of it, so that one thread cannot close it on another."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pread(self, count: int, at: int) -> bytes:
        return os.pread(self._fd, count, at)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class RemoteShardFile:
    """A file below a URL. Reads that fail are tried again, as `readers.remote.again` does."""

    def __init__(self, url: str, size: int, fingerprint: str, blocks: BlockCache) -> None:
        import fsspec

        self._url, self._size, self._blocks = url, size, blocks
        self._name = f"{url}\n{size}\n{fingerprint}\n"
        now, _ = stores.stat_url(url)
        if now != size:
            raise InputError(
                f"this file has {now:,} bytes, had {size:,} when the run began", where=url, hint="put it back as it was"
            )
        self._store, self._path = fsspec.core.url_to_fs(url)

    def pread(self, count: int, at: int) -> bytes:
        end = min(at + count, self._size)
        parts = []
        while at < end:
            number, first = divmod(at, BLOCK_BYTES)
            block = self._block(number)
            parts.append(block[first : first + end - at])
            at += len(parts[-1])
        return b"".join(parts)

    def _block(self, number: int) -> bytes:
        start, end = number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, self._size)

        def fetch() -> bytes:
            data = bytes(self._store.cat_file(self._path, start=start, end=end))
            if len(data) > end - start:
                raise InputError("the server gives no parts of files", where=self._url, hint="take a store that does")
            if len(data) < end - start:
                raise OSError(f"the connection ended at {start + len(data):,} of {end:,} bytes")
            return data

        return self._blocks.get(f"{self._name}{number}", lambda: retry_transient(fetch, self._url))
