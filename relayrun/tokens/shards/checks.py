"""Check shards against their records, and their tokenizer against the run's.

`verify_shards` reads every shard once, front to back: header, sizes, order, ids, ends of documents, checksums. Threads
read several shards at a time, because numpy and xxhash release Python's lock.

`check_tokenizer` compares the tokenizer in the record beside a shard's real .bin with the run's, also for a link in a
mixture. Shards of other programs have no record: `check_first_ids` reads some of their ids, and training checks every
id when it reads it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash

from relayrun.errors import FatalTrainingError, InputError
from relayrun.files import file_size
from relayrun.progress import Progress, count
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest
from relayrun.tokens.shards.shard import Shard, ShardRecords, TokenizerRecord, first_foreign_id

if TYPE_CHECKING:  # pydantic
    from relayrun.config.sections.data import DataSection

log = logging.getLogger(__name__)

ALLOW_SETTING = "data.allow_other_tokenizer"
MAX_SAMPLED_SHARDS = 32
"""Shards without a record whose ids are sampled, in each data set."""
SAMPLED_IDS = 1 << 16
"""Sampled ids at the beginning of such a shard."""


def check_tokenizer(
    manifest: Manifest, mixture: Iterable[str] | None = None, *, ends_matter: bool = False, allow: bool = False
) -> int:
    """Raise InputError if a shard was made with another tokenizer than the run's; with `allow`, warn. Parameters as in
    `shard_tokenizer_errors`. Returns the number of shards without a record."""
    errors, without = shard_tokenizer_errors(manifest, mixture, ends_matter=ends_matter)
    for error in errors:
        if not allow:
            raise error
        log.warning("taken, as %s says: %s: %s", ALLOW_SETTING, error.where, error.message)
    return sum(map(len, without.values()))


def shard_tokenizer_errors(
    manifest: Manifest, mixture: Iterable[str] | None = None, *, ends_matter: bool = False
) -> tuple[list[InputError], dict[str, list[str]]]:
    """Return an error for every data set and way in which shards differ from the run's tokenizer, and shards without a
    record. `mixture`: names of the data sets to check, besides all validation sets; None: all. `ends_matter`: the run
    depends on the id that ends a document. Prefixes of shards without a record come by data set."""
    records = ShardRecords()
    errors: list[InputError] = []
    without: dict[str, list[str]] = {}
    for what, dataset in iterate_data_sets(manifest, mixture):
        wrong: dict[str, list[str]] = {}
        for shard in dataset.shards:
            record = records.of(shard.prefix)
            if record is None or record.made is None:
                without.setdefault(what, []).append(shard.prefix)
            elif (words := _tokenizer_difference(record.made, manifest, ends_matter)) is not None:
                wrong.setdefault(words, []).append(shard.prefix)
        errors += [
            InputError(
                f"{what}: {len(prefixes):,} of {len(dataset.shards):,} shards, of which this is the first, were not "
                f"made with the tokenizer {manifest.tokenizer}: {words}",
                where=prefixes[0],
                hint="set data.tokenizer to the one that made them, or tokenize again; if it is meant, "
                f"{ALLOW_SETTING}=true",
            )
            for words, prefixes in wrong.items()
        ]
    return errors, without


def iterate_data_sets(manifest: Manifest, mixture: Iterable[str] | None) -> Iterator[tuple[str, DatasetManifest]]:
    """Yield each data set of `mixture` (None: all) and each validation set, with the words that name it."""
    for name in manifest.datasets if mixture is None else mixture:
        yield f"data set {name!r}", manifest.datasets[name]
    for name, dataset in manifest.validation.items():
        yield f"validation set {name!r}", dataset


def _tokenizer_difference(made: TokenizerRecord, manifest: Manifest, ends_matter: bool) -> str | None:
    """Describe how the tokenizer of a record differs from the run's; None if equal or unknown."""
    size, own = made.size, manifest.vocabulary_size
    if manifest.tokenizer_ids not in ("", made.ids):
        if size == own:
            return f"both have {own:,} entries, and ids mean other text"
        small = ", and ids beyond it end the run" if size > own else ""
        return f"that one has {size:,} entries, the run's {own:,}{small}"
    if ends_matter and made.eos != manifest.eod:
        there = "no token" if made.eos is None else f"the token {made.eos}"
        return f"{there} ends documents there, and the run takes {manifest.eod} for their end"
    return None


def check_first_ids(prefixes: Sequence[str], what: str, vocabulary_size: int) -> None:
    """Raise InputError if a first id of some of these shards, evenly chosen, is beyond the vocabulary."""
    prefixes = [prefix for prefix in prefixes if "://" not in prefix]  # training checks their ids when it reads them
    step = max(1, -(-len(prefixes) // MAX_SAMPLED_SHARDS))
    for prefix in prefixes[::step]:
        ids: npt.NDArray[np.int64] = np.asarray(Shard.open(prefix).ids()[:SAMPLED_IDS], np.int64)
        if (wrong := first_foreign_id(ids, vocabulary_size)) is not None:
            words = f"{what}: this shard holds the id {wrong}, which is beyond the vocabulary of {vocabulary_size:,}"
            raise InputError(words, where=prefix, hint="set data.tokenizer to the one that made it")


_READ_BYTES = 1 << 20
"""Bytes read twice, for checksum and range, while they are in the processor's cache."""


@dataclass(frozen=True, kw_only=True)
class ShardCheckResult:
    """A shard and its faults."""

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
    report: Callable[[ShardCheckResult], None] = lambda verified: None,
) -> list[ShardCheckResult]:
    """Check shards and describe each fault; `report` gets each shard when it is done, in the order of `prefixes`.
    `vocabulary_size`: ids must lie below it. `eod`: every document must end with it. `checksums`: compare with the
    record beside the shard, if any."""
    records = ShardRecords() if checksums else None
    check = functools.partial(_verify_shard, vocabulary_size=vocabulary_size, eod=eod, records=records)
    results = []
    size = sum(file_size(prefix + ".bin") for prefix in prefixes)
    with ThreadPoolExecutor(threads or os.cpu_count()) as pool, Progress("verifying", size):
        for verified in pool.map(check, prefixes):
            report(verified)
            results.append(verified)
    return results


def _verify_shard(
    prefix: str, *, vocabulary_size: int | None, eod: int | None, records: ShardRecords | None
) -> ShardCheckResult:
    try:
        shard = Shard.open(prefix)
    except InputError as error:
        return ShardCheckResult(prefix=prefix, tokens=0, bytes=0, faults=(error.message,))
    whole = _uncut_shard(shard)
    faults = _index_faults(shard, cut=whole is not None)
    if whole is not None:
        faults += _cut_faults(shard, whole)
    if not faults and eod is not None:
        faults += _document_end_faults(shard, eod)
    record = None if records is None else records.of(prefix)
    expected = {} if record is None else record.xxh3_128
    digest = xxhash.xxh3_128() if expected else None
    faults += _id_faults(shard, vocabulary_size, digest)
    index = (shard if whole is None else whole).prefix + ".idx"
    if digest is not None:
        found = {"bin": digest.hexdigest(), "idx": xxhash.xxh3_128_hexdigest(Path(index).read_bytes())}
        wrong = [suffix for suffix in found if found[suffix] != expected.get(suffix)]
        faults += [f"the .{suffix} is not what its record says (xxh3-128)" for suffix in wrong]
    return ShardCheckResult(prefix=prefix, tokens=shard.tokens, bytes=shard.bin_bytes, faults=tuple(faults))


def _uncut_shard(shard: Shard) -> Shard | None:
    """Return the shard that a mixture cut: its .bin is the target of a link beside a shorter .idx."""
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
    end = shard.tokens * shard.dtype.itemsize
    if (gap := shard.first_gap()) is not None:
        faults.append(f"sequence {gap} does not begin where the one before it ends")
    elif not cut and shard.bin_bytes != end:
        faults.append(f"the .bin has {shard.bin_bytes} bytes, its index ends at {end}")
    if bounds[0] != 0 or bounds[-1] != shard.sequences or (np.diff(bounds) < 0).any():
        faults.append("the documents' bounds do not run from the first sequence to the last")
    return faults


def _document_end_faults(shard: Shard, eod: int) -> list[str]:
    ends = np.unique(shard.document_ends())[1:] - 1
    without = np.flatnonzero(np.asarray(shard.ids())[ends] != eod) if len(ends) else ends
    if not without.size:
        return []
    return [f"{without.size:,} documents do not end with {eod}, the first of them is document {int(without[0])}"]


def _id_faults(shard: Shard, vocabulary_size: int | None, digest: Any) -> list[str]:
    """Check the range of the ids and update `digest`, in one pass over the .bin."""
    highest = -1
    unsigned = np.dtype(f"u{shard.dtype.itemsize}")  # a negative id becomes very large
    with open(shard.prefix + ".bin", "rb", buffering=0) as file:
        buffer = bytearray(_READ_BYTES)
        while read := file.readinto(buffer):
            count(read)
            if digest is not None:
                digest.update(memoryview(buffer)[:read])
            if vocabulary_size is not None:
                ids = np.frombuffer(buffer, unsigned, read // shard.dtype.itemsize)
                highest = max(highest, int(ids.max(initial=0)))
    if vocabulary_size is not None and highest >= vocabulary_size:
        wrong = np.asarray(shard.ids())
        return [f"ids from {wrong.min()} to {wrong.max()}, but the vocabulary has {vocabulary_size}"]
    return []


def check_data(manifest: Manifest, mixture: list[str], data: DataSection) -> None:
    """Raise FatalTrainingError for a changed shard (also one that was made again with another tokenizer), InputError if
    files are only missing: their file system may be back at the next attempt."""
    try:
        manifest.verify(mixture)
    except InputError as error:
        if all(line.endswith(": missing") for line in manifest.differences(mixture)):
            raise
        raise FatalTrainingError(error.message, hint=error.hint) from None
    try:
        check_tokenizer(manifest, mixture, allow=data.allow_other_tokenizer, ends_matter=data.depends_on_ends)
    except InputError as error:
        raise FatalTrainingError(error.message, where=error.where, hint=error.hint) from None
