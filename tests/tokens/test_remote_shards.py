"""Token shards below URLs through a cache of bounded size: exact bytes, after failures, for several processes."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.data import DataSection, DocumentWindowSection
from relayrun.errors import ConfigError, InputError
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture.build_datasets import training_order
from relayrun.tokens.order import remote_shards
from relayrun.tokens.order.datasets import WindowOrder
from relayrun.tokens.order.document_packing import DocumentWindowOrder
from relayrun.tokens.order.remote_shards import MIN_CACHE_BYTES, SLOT_BYTES, SLOTS_PER_SET, BlockCache
from relayrun.tokens.shards.manifest import DatasetManifest
from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.stores import urls as stores_urls
from relayrun.tokens.stores.urls import StoreError
from tests.tokens.test_remote_files import Server
from tests.workspace import Workspace

LENGTHS = np.random.default_rng(7).integers(1, 900, 900)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_urls, "RETRY_PAUSES", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two shards of 900 documents, 0.8 MB each: three and a half blocks."""
    made = tmp_path_factory.mktemp("shards")
    for name in ("a", "b"):
        writer = ShardWriter(made / "tokens" / name, np.uint16)
        writer.add(np.random.default_rng(len(name)).integers(0, 300, LENGTHS.sum()), LENGTHS)
        writer.finish()
    return made


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    pytest.importorskip("aiohttp")
    found = Server(folder)
    yield found
    found.close()


def urls(server: Server) -> list[str]:
    return [f"{server.url}/tokens/a", f"{server.url}/tokens/b"]


def local(folder: Path) -> DatasetManifest:
    return DatasetManifest.build([folder / "tokens" / name for name in ("a", "b")])


def size_of(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of aiohttp, about connections that a test has cut
def test_samples_are_those_of_local_shards_through_failures(server: Server, folder: Path, tmp_path: Path) -> None:
    server.faults = [None, 500]
    frozen, here = remote_shards.freeze_shards(urls(server)), local(folder)
    assert frozen.fingerprint == here.fingerprint
    assert frozen.differences() == []
    blocks = BlockCache(tmp_path, 2 * MIN_CACHE_BYTES)
    server.faults = [None, 503, "cut", None, 429]
    expected = WindowOrder(here, seq_length=512, seed=1, split=0.1)
    found = WindowOrder(frozen, seq_length=512, seed=1, split=0.1, blocks=blocks)
    assert len(found) == len(expected) > 1000
    for epoch in (0, 1):
        for i in range(0, len(found), 7):
            assert np.array_equal(found.read(epoch, i), expected.read(epoch, i))
    assert server.faults == []
    asked = server.requests
    found.read(0, 5)
    assert server.requests == asked  # all eight blocks fit the sixteen slots
    for i in (0, 100):
        ours, theirs = found.origins(0, i), expected.origins(0, i)
        assert [(o.document, o.offset, o.tokens) for o in ours] == [(o.document, o.offset, o.tokens) for o in theirs]
    cut = DocumentWindowSection(window=256, overlap=16, bos=1)
    kept = [DocumentWindowOrder(part, cut, seq_length=512, seed=1, name="a", blocks=blocks) for part in (frozen, here)]
    assert len(kept[0]) == len(kept[1])
    for i in range(0, len(kept[0]), 11):
        assert np.array_equal(kept[0].read(0, i), kept[1].read(0, i))


@pytest.mark.slow
def test_a_full_cache_evicts_and_stays_within_its_bound(server: Server, folder: Path, tmp_path: Path) -> None:
    blocks = BlockCache(tmp_path, MIN_CACHE_BYTES)
    for number in range(40):
        content = bytes([number]) * remote_shards.BLOCK_BYTES
        assert blocks.get(f"block {number}", lambda content=content: content) == content  # type: ignore[misc]
        assert size_of(tmp_path) <= MIN_CACHE_BYTES
    fetched: list[int] = []

    def fetch(number: int) -> bytes:
        fetched.append(number)
        return bytes([number]) * remote_shards.BLOCK_BYTES

    for number in range(40 - SLOTS_PER_SET, 40):
        blocks.get(f"block {number}", lambda number=number: fetch(number))  # type: ignore[misc]
    assert fetched == []  # the newest are there
    blocks.get("block 0", lambda: fetch(0))
    assert fetched == [0]
    again = BlockCache(tmp_path, MIN_CACHE_BYTES)
    assert again.get("block 0", lambda: fetch(0)) == bytes(remote_shards.BLOCK_BYTES)
    assert fetched == [0]
    BlockCache(tmp_path, 3 * MIN_CACHE_BYTES)  # one of another size takes the place of this one
    assert size_of(tmp_path) == 0
    assert blocks.get("block 0", lambda: fetch(0)) == bytes(remote_shards.BLOCK_BYTES)


def test_what_is_torn_is_fetched_again(tmp_path: Path) -> None:
    blocks = BlockCache(tmp_path, MIN_CACHE_BYTES)
    blocks.get("x", lambda: b"some bytes")
    (slot,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    for torn in (slot.read_bytes()[:-1], slot.read_bytes()[:60], b"", slot.read_bytes()[:-1] + b"?"):
        slot.write_bytes(torn)
        assert blocks.get("x", lambda: b"some bytes") == b"some bytes"
        assert blocks.get("x", lambda: b"never") == b"some bytes"


def _reader(prefixes: list[str], cache: str, seed: int, results: Any) -> None:
    blocks = BlockCache(Path(cache), MIN_CACHE_BYTES)
    order = WindowOrder(remote_shards.freeze_shards(prefixes), seq_length=512, seed=1, blocks=blocks)
    here = np.random.default_rng(seed).integers(0, len(order), 150)
    results.put([(int(i), int(order.read(0, int(i)).sum())) for i in here])


@pytest.mark.slow
def test_processes_share_a_cache_that_is_too_small(
    server: Server, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight slots for what three processes read of two files, whose indices do not fit beside them."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    readers = [context.Process(target=_reader, args=(urls(server), str(tmp_path), seed, results)) for seed in range(3)]
    for reader in readers:
        reader.start()
    found = [results.get(timeout=600) for _ in readers]
    for reader in readers:
        reader.join(300)
        assert reader.exitcode == 0
    expected = WindowOrder(local(folder), seq_length=512, seed=1)
    for pairs in found:
        assert all(int(expected.read(0, i).sum()) == total for i, total in pairs)
    assert size_of(tmp_path) <= MIN_CACHE_BYTES
    assert len([path for path in tmp_path.rglob("*-*") if path.is_file()]) <= SLOTS_PER_SET
    assert SLOT_BYTES * SLOTS_PER_SET == MIN_CACHE_BYTES


@pytest.mark.slow
def test_a_store_that_stays_away_or_changes_is_an_error_that_names_it(
    server: Server, folder: Path, tmp_path: Path
) -> None:
    frozen = remote_shards.freeze_shards(urls(server)[:1])
    order = WindowOrder(frozen, seq_length=512, seed=1, blocks=BlockCache(tmp_path, MIN_CACHE_BYTES))
    server.faults = [None, *[500] * 8]
    with pytest.raises(StoreError, match="the store does not answer"):
        order.read(0, 0)
    server.faults = []
    changed = DatasetManifest(shards=tuple(shard for shard in frozen.shards))
    object.__setattr__(changed.shards[0], "bin_bytes", frozen.shards[0].bin_bytes - 2)
    late = WindowOrder(changed, seq_length=512, seed=1, blocks=BlockCache(tmp_path, MIN_CACHE_BYTES))
    with pytest.raises(InputError, match=r"bytes, had .* when the run began"):
        late.read(0, 0)
    for path, words in (("tokens/none", "neither a folder with .bin and .idx files nor a shard"),):
        with pytest.raises(InputError, match=words):
            remote_shards.freeze_shards([f"{server.url}/{path}"])


@pytest.fixture
def stored(folder: Path) -> Iterator[str]:
    store = MemoryFileSystem()
    for path in (folder / "tokens").iterdir():
        store.pipe(f"/kept/tokens/{path.name}", path.read_bytes())
    yield "memory://kept/tokens"
    store.rm("/kept", recursive=True)


def test_a_folder_below_a_url_is_all_its_shards(stored: str, folder: Path) -> None:
    found = remote_shards.freeze_shards([stored, str(folder / "tokens" / "a")])
    assert [shard.prefix for shard in found.shards][:2] == [f"{stored}/a", f"{stored}/b"]
    assert found.shards[0].fingerprint == found.shards[2].fingerprint
    MemoryFileSystem().rm("/kept/tokens/b.idx")
    with pytest.raises(InputError, match=r"needs both its \.bin and its \.idx file"):
        remote_shards.freeze_shards([stored])


def test_a_config_with_a_url_gives_the_samples_of_the_local_one(stored: str, folder: Path, tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    config = yaml_file.read_yaml(workspace.config("run")).values
    config["data"] |= {"datasets": [str(folder / "tokens")]}
    here = RunConfig.model_validate_json(json.dumps(config))
    config["data"] |= {"datasets": [stored], "shard_cache_dir": str(tmp_path / "cache"), "shard_cache_gb": 0.01}
    there = RunConfig.model_validate_json(json.dumps(config))
    orders = [training_order(each, build_manifest(each)) for each in (here, there)]
    assert orders[0].parts.keys() == orders[1].parts.keys()
    for k in range(0, 3000, 97):
        assert np.array_equal(orders[0].row(k).tokens, orders[1].row(k).tokens)
    assert size_of(tmp_path / "cache") <= 10_000_000


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"datasets": ["s3://bucket/web"]}, "set data.shard_cache_dir"),
        (
            {"datasets": ["s3://b/web"], "order": "a:b", "shard_cache_dir": "/scratch"},
            "order a:b reads local shards, and s3://b/web is a URL",
        ),
        ({"datasets": ["a"], "validation": {"v": ["s3://b/v"]}}, "validation sets are read from local folders"),
    ],
)
def test_what_cannot_be_read_below_a_url_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        DataSection.model_validate({"tokenizer": "t", **values})


def test_a_cache_that_cannot_be_made_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the cache of shards cannot be made"):
        BlockCache(tmp_path / "file", MIN_CACHE_BYTES)
    with pytest.raises(ConfigError, match="a cache needs"):
        BlockCache(tmp_path, MIN_CACHE_BYTES - 1)
    assert os.stat(BlockCache(tmp_path, MIN_CACHE_BYTES)._folder).st_mode & 0o077 == 0
