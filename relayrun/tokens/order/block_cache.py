"""Blocks of remote files on a node's own disk: a cache of bounded size that processes share without a lock.

The cache is so many slots, files of one block each, in sets of eight. A block's name tells its set; it lies in any slot
of the set, behind its name and its checksum. A block that is fetched takes the slot of its set that was used longest
ago, by a rename over it. So the bound holds whatever happens, no process counts or waits, and a reader sees a whole
block, an older one, or none. What is torn (a node that lost its power) does not have its checksum: it is fetched again.

Rejected: fsspec's own caches of files (without a bound, or whole files); a count of bytes in a file of its own, which a
process that is killed leaves wrong.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import xxhash

from relayrun.errors import ConfigError

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 18
"""Bytes of a block, 256 KiB: a few windows of tokens."""
SLOTS_PER_SET = 8
"""Slots of a set."""
_NAME_BYTES, _CHECKSUM_BYTES = 32, 16
SLOT_BYTES = _NAME_BYTES + _CHECKSUM_BYTES + BLOCK_BYTES
"""Bytes of a slot's file, at most."""
MIN_CACHE_BYTES = SLOTS_PER_SET * SLOT_BYTES
"""Bytes of the smallest cache."""
_STALE_SECONDS = 600.0
"""A file that is being written is this old only where its process has ended."""


class BlockCache:
    """Blocks by name, below a folder. Threads and processes may share it, also with other lifetimes."""

    def __init__(self, folder: Path, size: int) -> None:
        """`size`: bytes that all slots have together, at most. Raises ConfigError for a folder that cannot be used."""
        if size < MIN_CACHE_BYTES:
            raise ConfigError(f"a cache needs {MIN_CACHE_BYTES:,} bytes or more, not {size:,}", where=folder)
        self._sets = size // MIN_CACHE_BYTES
        self._folder = folder / f"blocks-{self._sets}"
        self._tmp = self._folder / "tmp"
        self._full = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            self._tmp.mkdir(mode=0o700, exist_ok=True)
            if os.stat(self._folder).st_uid != os.geteuid():
                raise ConfigError("another user made this folder", where=self._folder, hint="give a folder of your own")
            for number in range(256):
                (self._folder / f"{number:02x}").mkdir(mode=0o700, exist_ok=True)
            self._remove_others(folder)
        except OSError as error:
            raise ConfigError(
                f"the cache of shards cannot be made: {error.strerror}",
                where=error.filename or folder,
                hint="set data.shard_cache_dir to a folder of each node's own disk",
            ) from None

    def get(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the block called `name`; what `fetch` gives where it is not here. Raises what `fetch` raises."""
        digest = hashlib.sha256(name.encode()).digest()
        slots = self._slots(digest)
        for slot in slots:
            if (data := _read_slot(slot, digest)) is not None:
                return data
        data = fetch()
        self._write(slots, digest, data)
        return data

    def _slots(self, digest: bytes) -> list[Path]:
        number = int.from_bytes(digest[:8], "big") % self._sets
        return [self._folder / f"{number % 256:02x}" / f"{number:x}-{way}" for way in range(SLOTS_PER_SET)]

    def _write(self, slots: list[Path], digest: bytes, data: bytes) -> None:
        """Put a block into the slot that was used longest ago. A disk that takes it not is told of once."""
        temporary = self._tmp / f"{os.getpid()}-{threading.get_ident()}"
        try:
            with temporary.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(digest + xxhash.xxh3_128_digest(data) + data)
            os.replace(temporary, min(slots, key=_mark_used))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not self._full:
                log.warning("%s: blocks of shards are not kept: %s", self._folder, error.strerror)
            self._full = True

    def _remove_others(self, folder: Path) -> None:
        """Remove caches of another size, which nothing bounds any more, and what killed processes left."""
        for other in folder.glob("blocks-*"):
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)
        for left in self._tmp.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    left.unlink()


def _read_slot(slot: Path, digest: bytes) -> bytes | None:
    """The block in a slot, if it is the one; its time of use is set."""
    try:
        with slot.open("rb", buffering=0) as file:
            if file.read(_NAME_BYTES) != digest:
                return None
            rest = file.read(_CHECKSUM_BYTES + BLOCK_BYTES)
            data = rest[_CHECKSUM_BYTES:]
            if xxhash.xxh3_128_digest(data) != rest[:_CHECKSUM_BYTES]:
                return None
            os.utime(file.fileno())
            return data
    except OSError:
        return None


def _mark_used(slot: Path) -> float:
    """When a slot was used last; an empty one comes first."""
    try:
        return slot.stat().st_mtime
    except OSError:
        return 0.0
