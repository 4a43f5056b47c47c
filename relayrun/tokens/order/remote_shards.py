"""Token shards below URLs: which there are, as a manifest has them, and the cache that they are read through."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from relayrun.config.sections.data import DataSection
from relayrun.errors import ConfigError, InputError
from relayrun.tokens.order.block_cache import BlockCache
from relayrun.tokens.shards.manifest import DatasetManifest, ShardEntry
from relayrun.tokens.shards.prefixes import SHARD_SUFFIXES, expand_paths
from relayrun.tokens.stores import stores


def freeze_shards(paths: Sequence[str]) -> DatasetManifest:
    """The shards that folders, prefixes, and URLs of either lead to, in the order of the list.

    The index of each shard below a URL is read whole, once. Raises InputError as `ShardEntry.build`, and for a URL that
    leads to nothing or to half a shard.
    """
    shards: list[ShardEntry] = []
    for path in paths:
        if stores.is_url(path):
            shards += [
                _remote_entry(prefix, sizes[0])
                for prefix, sizes in _remote_prefixes(stores.absolute_path(path)).items()
            ]
        else:
            shards += [ShardEntry.build(prefix) for prefix in expand_paths([path])]
    return DatasetManifest(shards=tuple(shards))


def open_block_cache(data: DataSection, shards: DatasetManifest) -> BlockCache | None:
    """The cache of a run's shards; None where all are local. Raises ConfigError where it cannot be made."""
    if not any(stores.is_url(shard.prefix) for shard in shards.shards):
        return None
    if data.shard_cache_dir is None:
        raise ConfigError("token shards below a URL need data.shard_cache_dir", where=shards.shards[0].prefix)
    return _cached_block_cache(data.shard_cache_dir, int(data.shard_cache_gb * 1e9))


@lru_cache
def _cached_block_cache(folder: str, size: int) -> BlockCache:
    return BlockCache(Path(folder), size)


def _remote_prefixes(url: str) -> dict[str, tuple[int, int]]:
    """Prefixes at or below a URL, sorted, with the bytes of their .bin and .idx."""
    try:
        files = {stores.join_path(url, name): size for name, size in stores.list_url(url)}
    except stores.MissingInput:
        files = {}
    files = {name: size for name, size in files.items() if name.endswith(SHARD_SUFFIXES)}
    if not files:  # not a folder: a shard without its suffix
        try:
            files = {url + suffix: stores.stat_url(url + suffix)[0] for suffix in SHARD_SUFFIXES}
        except stores.MissingInput:
            raise InputError(
                "there is neither a folder with .bin and .idx files nor a shard of this name",
                where=url,
                hint="give a folder, or a shard without its suffix; patterns are for local folders",
            ) from None
    prefixes = sorted({name.rpartition(".")[0] for name in files})
    for prefix in prefixes:
        for suffix in SHARD_SUFFIXES:
            if prefix + suffix not in files:
                raise InputError(
                    "a shard needs both its .bin and its .idx file; this one is missing", where=prefix + suffix
                )
    return {prefix: (files[prefix + ".bin"], files[prefix + ".idx"]) for prefix in prefixes}


def _remote_entry(prefix: str, bin_bytes: int) -> ShardEntry:
    """A shard below a URL: its index is copied, and looked at beside an empty .bin of the right size."""
    with tempfile.TemporaryDirectory(prefix="relayrun-index-") as folder:
        copy = Path(folder, "shard")
        with stores.open_input(prefix + ".idx") as remote, copy.with_suffix(".idx").open("wb") as local:
            shutil.copyfileobj(remote, local, 1 << 22)
        with copy.with_suffix(".bin").open("wb") as tokens:
            tokens.truncate(bin_bytes)
        try:
            return replace(ShardEntry.build(copy), prefix=prefix)
        except InputError as error:
            raise InputError(error.message, where=prefix, hint=error.hint) from None
