"""Whether token shards are what they say: header, sizes, order, ids, ends of documents, checksums.

Every shard is read once, front to back, in pieces; several at a time, because numpy and xxhash let go of
Python's lock. Checksums are those of the record beside a shard (see `record`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from relayrun.errors import InputError
from relayrun.tokens.shards.indexed import Shard
from relayrun.tokens.shards.record import ShardRecords

_READ_BYTES = 1 << 20
"""Bytes that are looked at twice, for checksum and range, while they are in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class VerifiedShard:
    """A shard, and what is wrong with it."""

    prefix: str
    tokens: int
    bytes: int
    faults: tuple[str, ...]


def verify_shards(
    prefixes: Sequence[str],
    *,
    vocabulary_size: int | None = None,
    eod: int | None = None,
    checksums: bool = True,
    threads: int | None = None,
    report: Callable[[VerifiedShard], None] = lambda verified: None,
) -> list[VerifiedShard]:
    """Check shards, each fault named; `report` gets each shard as it is done, in the order of `prefixes`.

    `vocabulary_size`: ids must lie below it. `eod`: every document must end with it. `checksums`: compare
    with the record beside the shard, if there is one.
    """
    records = ShardRecords() if checksums else None
    check = functools.partial(_verify_shard, vocabulary_size=vocabulary_size, eod=eod, records=records)
    results = []
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool:
        for verified in pool.map(check, prefixes):
            report(verified)
            results.append(verified)
    return results


def _verify_shard(
    prefix: str, *, vocabulary_size: int | None, eod: int | None, records: ShardRecords | None
) -> VerifiedShard:
    try:
        shard = Shard.open(prefix)
    except InputError as error:
        return VerifiedShard(prefix=prefix, tokens=0, bytes=0, faults=(error.message,))
    whole = _uncut_shard(shard)
    faults = _index_faults(shard, cut=whole is not None)
    if whole is not None:
        faults += _cut_faults(shard, whole)
    if not faults and eod is not None:
        faults += _document_end_faults(shard, eod)
    expected = _recorded_checksums(prefix, records) if records is not None else {}
    digest = xxhash.xxh3_128() if expected else None
    faults += _id_faults(shard, vocabulary_size, digest)
    index = (shard if whole is None else whole).prefix + ".idx"
    if digest is not None and digest.hexdigest() != expected.get("bin"):
        faults.append("the .bin is not what its record says (xxh3-128)")
    if digest is not None and xxhash.xxh3_128_hexdigest(Path(index).read_bytes()) != expected.get("idx"):
        faults.append("the .idx is not what its record says (xxh3-128)")
    return VerifiedShard(prefix=prefix, tokens=shard.tokens, bytes=shard.bin_bytes, faults=tuple(faults))


def _uncut_shard(shard: Shard) -> Shard | None:
    """The shard that a mixture cut: its .bin is the target of a link beside a shorter .idx."""
    tokens, index = shard.prefix + ".bin", shard.prefix + ".idx"
    if not shard.cut or not os.path.islink(tokens) or os.path.islink(index):
        return None
    try:
        return Shard.open(os.path.realpath(tokens).removesuffix(".bin"))
    except InputError:
        return None


def _cut_faults(shard: Shard, whole: Shard) -> list[str]:
    same = (
        shard.dtype == whole.dtype
        and np.array_equal(shard.lengths(), whole.lengths()[: shard.sequences])
        and np.array_equal(shard.bounds(), whole.bounds()[: shard.documents + 1])
    )
    return [] if same else [f"its index is not the beginning of {whole.prefix}.idx"]


def _index_faults(shard: Shard, *, cut: bool) -> list[str]:
    faults = []
    lengths, bounds = np.asarray(shard.lengths()), np.asarray(shard.bounds())
    if (lengths <= 0).any():
        faults.append(f"sequence {int(np.argmax(lengths <= 0))} has no tokens")
    ends = np.cumsum(lengths, dtype=np.int64) * shard.dtype.itemsize
    wrong = np.asarray(shard.offsets()) != ends - lengths.astype(np.int64) * shard.dtype.itemsize
    if wrong.any():
        faults.append(f"sequence {int(np.argmax(wrong))} does not begin where the one before it ends")
    elif not cut and shard.bin_bytes != (ends[-1] if len(ends) else 0):
        faults.append(f"the .bin has {shard.bin_bytes} bytes, its index ends at {int(ends[-1]) if len(ends) else 0}")
    if bounds[0] != 0 or bounds[-1] != shard.sequences or (np.diff(bounds) < 0).any():
        faults.append("the documents' bounds do not run from the first sequence to the last")
    return faults


def _document_end_faults(shard: Shard, eod: int) -> list[str]:
    bounds = np.unique(np.asarray(shard.bounds()))[1:]
    ends = np.cumsum(shard.lengths(), dtype=np.int64)[bounds - 1] - 1
    without = np.flatnonzero(np.asarray(shard.ids())[ends] != eod) if len(ends) else ends
    if not without.size:
        return []
    return [f"{without.size:,} documents do not end with {eod}, the first of them is document {int(without[0])}"]


def _id_faults(shard: Shard, vocabulary_size: int | None, digest: Any) -> list[str]:
    """One pass over the .bin: the range of the ids, and its checksum."""
    highest = -1
    unsigned = np.dtype(f"u{shard.dtype.itemsize}")  # there an id below zero is a very large one, too
    with open(shard.prefix + ".bin", "rb", buffering=0) as file:
        buffer = bytearray(_READ_BYTES)
        while read := file.readinto(buffer):
            if digest is not None:
                digest.update(memoryview(buffer)[:read])
            if vocabulary_size is not None:
                ids = np.frombuffer(buffer, unsigned, read // shard.dtype.itemsize)
                highest = max(highest, int(ids.max(initial=0)))
    if vocabulary_size is not None and highest >= vocabulary_size:
        wrong = np.asarray(shard.ids())
        return [f"ids from {wrong.min()} to {wrong.max()}, but the vocabulary has {vocabulary_size}"]
    return []


def _recorded_checksums(prefix: str, records: ShardRecords) -> dict[str, str]:
    """What the record beside the shard says, or nothing."""
    record = records.of(os.path.realpath(prefix + ".bin").removesuffix(".bin"))
    return {} if record is None else record.xxh3_128
