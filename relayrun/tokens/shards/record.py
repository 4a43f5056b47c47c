"""What is on record beside a shard: which tokenizer made it, and the checksums of its files.

A dump's shards share `tokenization.json` in their folder. A shard that was written by itself, by a merge or by the
datatrove step, has `PREFIX.record.json`: tasks and jobs that write into one folder at once need no lock for it. Where a
shard has both, its own record is the newer one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any

from relayrun.files import RealPathCache, read_json, write_json

FOLDER_RECORD = "tokenization.json"
"""The record of a folder of shards."""
RECORD_SUFFIX = ".record.json"
"""What the name of a shard's own record has behind the prefix."""
SHARD_RECORD_FORMAT = "relayrun shard, version 1"
_END_BYTES = 1 << 16


@dataclass(frozen=True, kw_only=True)
class TokenizerRecord:
    """What a record says of the tokenizer."""

    fingerprint: str
    """SHA-256 of the serialized tokenizer."""
    ids: str
    """Fingerprint of what decides its ids (`tokenization.identity`); empty in records of earlier versions."""
    size: int | None
    """Entries of its vocabulary; None in records of earlier versions."""
    eos: int | None
    """The id that ends every document; None if none does."""

    def same(self, other: TokenizerRecord) -> bool:
        """Whether two records name one tokenizer, as far as both tell."""
        return self.ids == other.ids if self.ids and other.ids else self.fingerprint == other.fingerprint


@dataclass(frozen=True, kw_only=True)
class ShardRecord:
    """One shard's record."""

    made: TokenizerRecord | None
    """None where nobody knows."""
    xxh3_128: dict[str, str]
    """Checksums, 32 hexadecimal digits, of the .bin and the .idx; empty where nobody knows."""
    largest_id: int | None = None
    """The largest id in the .bin; None where it is empty, and where nobody has noted it."""
    inputs: tuple[tuple[str, int, str], ...] = ()
    """Path, bytes and fingerprint (`tokenization.record`) of each raw file that it was made of, as far as known."""
    texts: frozenset[str] = frozenset()
    """The texts (`Records.texts`) of the shards that it joins."""
    merged: tuple[str, ...] = ()
    """The prefixes of these shards, where an earlier version merged them and noted no texts."""


def write_shard_record(prefix: str, shard: ShardRecord, *, merged: Sequence[str] | None = None) -> None:
    """Write the record of the shard `prefix` alone, before its files get their names. `merged`: the shards it joins."""
    record: dict[str, Any] = {
        "format": SHARD_RECORD_FORMAT,
        "tokenizer": None if shard.made is None else asdict(shard.made),
        "xxh3_128": shard.xxh3_128,
        "largest_id": shard.largest_id,
    }
    if merged is not None:
        record |= {"merged": list(merged), "texts": sorted(shard.texts)}
    write_json(prefix + RECORD_SUFFIX, record)


def remove_shard_record(prefix: str) -> None:
    """Remove the record of a shard that another is about to replace."""
    Path(prefix + RECORD_SUFFIX).unlink(missing_ok=True)


class ShardRecords:
    """The records of shards; each folder is read once."""

    def __init__(self) -> None:
        self._folders: dict[str, tuple[dict[str, ShardRecord], set[str]]] = {}
        self._real_path = RealPathCache()

    def of(self, real_prefix: str) -> ShardRecord | None:
        """What is on record of the shard whose .bin is the real file `real_prefix`.bin; None where nothing is."""
        folder, name = os.path.split(real_prefix)
        if folder not in self._folders:
            self._folders[folder] = _read_folder_record(folder), _list_shard_records(folder)
        shared, own = self._folders[folder]
        return (_read_shard_record(real_prefix) if name + RECORD_SUFFIX in own else None) or shared.get(name)

    def texts(self, prefixes: Iterable[str]) -> dict[str, set[str]]:
        """Name the text of each shard: shards have a name in common if they hold the same text, whatever their paths.

        Names are the checksums on record: of the .bin, of the shards that were merged, of the raw files. Where one of
        several shards whose .bin has the same size has none, all of them are compared by the ends of the .bin: a
        mixture cuts a shard by its .idx. An empty shard has no name, nor has one that is not there or lies below a URL.
        """
        found: dict[str, set[str]] = {}
        sizes: dict[int, dict[str, list[str]]] = {}
        without = set()
        for prefix in prefixes:
            found[prefix] = set()
            try:
                size = os.path.getsize(prefix + ".bin")
            except OSError:
                continue
            if size:
                real = self._real_path(prefix + ".bin").removesuffix(".bin")
                sizes.setdefault(size, {}).setdefault(real, []).append(prefix)
                record = self.of(real) or ShardRecord(made=None, xxh3_128={})
                found[prefix] = {record.xxh3_128.get("bin", real), *record.texts}
                found[prefix] = found[prefix].union(*self.texts(record.merged).values())
                for path, length, fingerprint in record.inputs:
                    found[prefix] |= self.texts_of_file(path, length, fingerprint)
                if real in found[prefix]:
                    without.add(size)
        for alike in (sizes[size] for size in without if len(sizes[size]) > 1):
            for real, several in alike.items():
                for prefix in several:
                    found[prefix].add(_hash_ends(real))
        return found

    def texts_of_file(self, path: str, size: int, *fingerprints: str) -> set[str]:
        """Name the text of a raw file, in the same way; an empty one has no name."""
        path = path.removeprefix("file://")
        place = path if "://" in path else self._real_path(path)
        return {f"{each} {size}" for each in (place, *fingerprints) if each and size}


def _hash_ends(prefix: str) -> str:
    """A hash of the first and last 64 KiB of the .bin."""
    with open(prefix + ".bin", "rb") as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(max(0, os.fstat(file.fileno()).st_size - _END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def _read_folder_record(folder: str) -> dict[str, ShardRecord]:
    """What the record of a folder says, by name of the shard; nothing where there is none, or one that is no such."""
    try:
        record: Any = read_json(os.path.join(folder, FOLDER_RECORD))
        dataset = (record.get("source") or {}).get("dataset") or ""
        shards = {
            name: ShardRecord(
                made=None,
                xxh3_128=task.get("xxh3_128", {}),
                largest_id=task.get("largest_id"),
                inputs=tuple(
                    (os.path.join(dataset, path), size, fingerprint)
                    for (path, size, _), fingerprint, documents in zip(
                        task.get("inputs", ()),
                        task.get("fingerprints", ()),
                        task.get("file_documents") or repeat(1),
                        strict=False,
                    )
                    if fingerprint and documents  # else it was left out, or holds no text, as many a file of Spark
                ),
            )
            for name, task in record["shards"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}
    try:
        settings, known = record["settings"], record.get("tokenizer", {})
        made = TokenizerRecord(
            fingerprint=settings["tokenizer"], eos=settings["eos"], ids=known.get("ids", ""), size=known.get("size")
        )
    except (KeyError, TypeError, AttributeError):
        made = None
    return {name: replace(shard, made=made) for name, shard in shards.items()}


def _list_shard_records(folder: str) -> set[str]:
    try:
        return {name for name in os.listdir(folder) if name.endswith(RECORD_SUFFIX)}
    except OSError:
        return set()


def _read_shard_record(real_prefix: str) -> ShardRecord | None:
    try:
        record: Any = read_json(real_prefix + RECORD_SUFFIX)
        made = record["tokenizer"]
        return ShardRecord(
            made=None if made is None else TokenizerRecord(**made),
            xxh3_128=dict(record["xxh3_128"]),
            largest_id=record.get("largest_id"),
            texts=frozenset(record.get("texts", ())),
            merged=() if "texts" in record else tuple(record.get("merged", ())),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
