"""Token shards below URLs: found at the submit, and read by ranks through a cache of blocks.

`freeze_shards` makes a manifest. `open_cached_shard_file` opens a local or remote file. `BlockCache` keeps blocks of
remote files on a node's disk: bounded in size, shared by processes without a lock.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import xxhash

from relayrun.config.sections.data import DataSection
from relayrun.errors import ConfigError, FatalTrainingError, InputError
from relayrun.tokens.shards.manifest import DatasetManifest, ShardEntry
from relayrun.tokens.shards.prefixes import SHARD_SUFFIXES, expand_paths
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import retry_transient

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 18
"""Bytes of a block, 256 KiB: a few windows of tokens."""
SLOTS_PER_SET = 8
_NAME_BYTES, _CHECKSUM_BYTES = 32, 16
SLOT_BYTES = _NAME_BYTES + _CHECKSUM_BYTES + BLOCK_BYTES
"""Maximum bytes of a slot's file."""
MIN_CACHE_BYTES = SLOTS_PER_SET * SLOT_BYTES
"""Bytes of the smallest cache."""
_STALE_SECONDS = 600.0
"""A temporary file of this age belongs to a dead process."""


class BlockCache:
    """Blocks by name, below a folder. Threads and processes of different lifetimes may share it."""

    def __init__(self, folder: Path, size: int) -> None:
        """`size`: maximum bytes of all slots. Raises ConfigError for an unusable folder."""
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
            words = f"the cache of shards cannot be made: {error.strerror}"
            hint = "set data.shard_cache_dir to a folder of each node's own disk"
            raise ConfigError(words, where=error.filename or folder, hint=hint) from None

    def get(self, name: str, fetch: Callable[[], bytes]) -> bytes:
        """Return the block `name`, from the cache or from `fetch`. Raises errors of `fetch`."""
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
        """Put a block into the least recently used slot. A full disk is logged once."""
        temporary = self._tmp / f"{os.getpid()}-{threading.get_ident()}"
        try:
            with temporary.open("wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(digest + xxhash.xxh3_128_digest(data) + data)
            os.replace(temporary, min(slots, key=_last_used))
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not self._full:
                log.warning("%s: blocks of shards are not kept: %s", self._folder, error.strerror)
            self._full = True

    def _remove_others(self, folder: Path) -> None:
        """Remove caches of another size, which are no longer bounded, and files of killed processes."""
        for other in folder.glob("blocks-*"):
            if other != self._folder:
                shutil.rmtree(other, ignore_errors=True)
        for left in self._tmp.iterdir():
            with suppress(FileNotFoundError):
                if time.time() - left.stat().st_mtime > _STALE_SECONDS:
                    left.unlink()


def _read_slot(slot: Path, digest: bytes) -> bytes | None:
    """Return the block in a slot if it is `digest`, and update its time of use."""
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


def _last_used(slot: Path) -> float:
    """Return the time of last use; an empty slot comes first."""
    try:
        return slot.stat().st_mtime
    except OSError:
        return 0.0


def freeze_shards(paths: Sequence[str]) -> DatasetManifest:
    """Return the shards of folders, prefixes, and URLs of either, in this order. Below a URL each index is read whole,
    once. Raises InputError like `ShardEntry.build`, and for a URL without shards or with half a shard."""
    shards: list[ShardEntry] = []
    for path in paths:
        if urls.is_url(path):
            shards += [
                _remote_entry(prefix, sizes[0]) for prefix, sizes in _remote_prefixes(urls.absolute_path(path)).items()
            ]
        else:
            shards += [ShardEntry.build(prefix) for prefix in expand_paths([path])]
    return DatasetManifest(shards=tuple(shards))


def open_block_cache(data: DataSection, shards: DatasetManifest) -> BlockCache | None:
    """Return the cache of a run's shards; None if all are local. Raises ConfigError if it cannot be made."""
    if not any(urls.is_url(shard.prefix) for shard in shards.shards):
        return None
    if data.shard_cache_dir is None:
        raise ConfigError("token shards below a URL need data.shard_cache_dir", where=shards.shards[0].prefix)
    return _cached_block_cache(data.shard_cache_dir, int(data.shard_cache_gb * 1e9))


@lru_cache
def _cached_block_cache(folder: str, size: int) -> BlockCache:
    return BlockCache(Path(folder), size)


def _remote_prefixes(url: str) -> dict[str, tuple[int, int]]:
    """Return prefixes at or below a URL, sorted, with the bytes of their .bin and .idx."""
    try:
        files = {urls.join_path(url, name): size for name, size in urls.list_url(url)}
    except urls.MissingInput:
        files = {}
    files = {name: size for name, size in files.items() if name.endswith(SHARD_SUFFIXES)}
    if not files:  # not a folder, but a shard without its suffix
        try:
            files = {url + suffix: urls.stat_url(url + suffix)[0] for suffix in SHARD_SUFFIXES}
        except urls.MissingInput:
            words = "there is neither a folder with .bin and .idx files nor a shard of this name"
            hint = "give a folder, or a shard without its suffix; patterns are for local folders"
            raise InputError(words, where=url, hint=hint) from None
    prefixes = sorted({name.rpartition(".")[0] for name in files})
    for prefix in prefixes:
        for suffix in SHARD_SUFFIXES:
            if prefix + suffix not in files:
                raise InputError(
                    "a shard needs both its .bin and its .idx file; this one is missing", where=prefix + suffix
                )
    return {prefix: (files[prefix + ".bin"], files[prefix + ".idx"]) for prefix in prefixes}


def _remote_entry(prefix: str, bin_bytes: int) -> ShardEntry:
    """Return the entry of a shard below a URL: a copy of its index is checked beside an empty .bin of that size."""
    with tempfile.TemporaryDirectory(prefix="relayrun-index-") as folder:
        copy = Path(folder, "shard")
        urls.fetch_file(prefix + ".idx", copy.with_suffix(".idx"))
        with copy.with_suffix(".bin").open("wb") as tokens:
            tokens.truncate(bin_bytes)
        try:
            return replace(ShardEntry.build(copy), prefix=prefix)
        except InputError as error:
            raise InputError(error.message, where=prefix, hint=error.hint) from None


def open_cached_shard_file(
    path: str, size: int, fingerprint: str, blocks: BlockCache | None
) -> LocalShardFile | RemoteShardFile:
    """Open a local or remote file of a shard.

    `size` of the file and `fingerprint` of the shard when the run began, which name the blocks in the cache. A URL
    needs `blocks`. Raises OSError for a local file, and InputError for a URL that has changed or cannot be read.
    """
    if not urls.is_url(path):
        return LocalShardFile(path)
    if blocks is None:
        raise FatalTrainingError("this shard lies below a URL, and there is no cache", where=path)
    return RemoteShardFile(path, size, fingerprint, blocks)


class LocalShardFile:
    """A local file that several threads may read. The last reference closes it."""

    def __init__(self, path: str) -> None:
        self._fd = -1
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def pread(self, count: int, at: int) -> bytes:
        """Return `count` bytes from offset `at` on; fewer only at the end of the file."""
        return os.pread(self._fd, count, at)

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


class RemoteShardFile:
    """A file below a URL. Failed reads are retried by `retry_transient`."""

    def __init__(self, url: str, size: int, fingerprint: str, blocks: BlockCache) -> None:
        import fsspec

        self._url, self._size, self._blocks = url, size, blocks
        self._name = f"{url}\n{size}\n{fingerprint}\n"
        now, _ = urls.stat_url(url)
        if now != size:
            raise InputError(
                f"this file has {now:,} bytes, had {size:,} when the run began", where=url, hint="put it back as it was"
            )
        self._store, self._path = fsspec.core.url_to_fs(url)

    def pread(self, count: int, at: int) -> bytes:
        """Return as `LocalShardFile.pread`."""
        end = min(at + count, self._size)
        parts = []
        while at < end:
            number, first = divmod(at, BLOCK_BYTES)
            parts.append(self._block(number)[first : first + end - at])
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
