"""Which tokenizer made a shard, and whether it is the run's.

The record beside a shard's real .bin says it, also for a link in a mixture (see `record`). Shards of other programs
have none: some of their ids are looked at, and every id again when it is read for training.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from relayrun.errors import InputError
from relayrun.files import RealPathCache
from relayrun.tokens.shards.indexed import Shard
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest
from relayrun.tokens.shards.record import ShardRecords, TokenizerRecord

log = logging.getLogger(__name__)

ALLOW_SETTING = "data.allow_other_tokenizer"
MAX_SAMPLED_SHARDS = 32
"""Shards without a record whose ids are looked at, in each data set."""
SAMPLED_IDS = 1 << 16
"""How many ids of such a shard are looked at, at its beginning."""


def check_tokenizer(
    manifest: Manifest, mixture: Iterable[str] | None = None, *, ends_matter: bool = False, allow: bool = False
) -> int:
    """Raise InputError if a shard was made with another tokenizer than the run's; with `allow`, warn.

    Parameters as `other_tokenizers`. Returns how many shards have no record.
    """
    errors, without = tokenizer_differences(manifest, mixture, ends_matter=ends_matter)
    for error in errors:
        if not allow:
            raise error
        log.warning("taken, as %s says: %s: %s", ALLOW_SETTING, error.where, error.message)
    return sum(map(len, without.values()))


def tokenizer_differences(
    manifest: Manifest, mixture: Iterable[str] | None = None, *, ends_matter: bool = False
) -> tuple[list[InputError], dict[str, list[str]]]:
    """Return an error for every set and way in which shards differ from the run's tokenizer.

    `mixture`: names of the data sets to look at, beside all validation sets; None: all. `ends_matter`: something in
    the run depends on which id ends a document. Also returned: by set, the prefixes of shards that have no record.
    """
    records, real_path = ShardRecords(), RealPathCache()
    errors: list[InputError] = []
    without: dict[str, list[str]] = {}
    for what, dataset in iterate_data_sets(manifest, mixture):
        wrong: dict[str, list[str]] = {}
        for shard in dataset.shards:
            record = records.of(real_path(shard.prefix + ".bin").removesuffix(".bin"))
            if record is None or record.made is None:
                without.setdefault(what, []).append(shard.prefix)
            elif (words := _tokenizer_difference(record.made, manifest, ends_matter)) is not None:
                wrong.setdefault(words, []).append(shard.prefix)
        errors += [
            InputError(
                f"{what}: {len(prefixes):,} of {len(dataset.shards):,} shards, of which this is the first, were not "
                f"made with the tokenizer {manifest.tokenizer}: {words}",
                where=prefixes[0],
                hint=f"set data.tokenizer to the one that made them, or tokenize again; if it is meant, {ALLOW_SETTING}=true",
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
    """Say how the tokenizer of a record differs from the run's; None if it does not, or nobody knows."""
    if (words := _vocabulary_difference(made, manifest)) is not None:
        return words
    if ends_matter and made.eos != manifest.eod:
        there = "no token" if made.eos is None else f"the token {made.eos}"
        return f"{there} ends documents there, and the run takes {manifest.eod} for their end"
    return None


def _vocabulary_difference(made: TokenizerRecord, manifest: Manifest) -> str | None:
    if made.ids and manifest.tokenizer_ids:
        if made.ids == manifest.tokenizer_ids:
            return None
    elif manifest.tokenizer_fingerprint in ("", made.fingerprint):
        return None
    size, own = made.size, manifest.vocabulary_size
    if size is None:
        return "the fingerprints of the two tokenizers differ"
    if size == own:
        return f"both have {own:,} entries, and ids mean other text"
    small = ", and ids beyond it end the run" if size > own else ""
    return f"that one has {size:,} entries, the run's {own:,}{small}"


def check_first_ids(prefixes: Sequence[str], what: str, vocabulary_size: int) -> None:
    """Raise InputError if one of the first ids of some of these shards, evenly chosen, is beyond the vocabulary."""
    prefixes = [prefix for prefix in prefixes if "://" not in prefix]  # their ids are checked when they are read
    step = max(1, -(-len(prefixes) // MAX_SAMPLED_SHARDS))
    for prefix in prefixes[::step]:
        ids: npt.NDArray[np.int64] = np.asarray(Shard.open(prefix).ids()[:SAMPLED_IDS], np.int64)
        if len(ids) and (ids.max() >= vocabulary_size or ids.min() < 0):
            wrong = int(ids[(ids >= vocabulary_size) | (ids < 0)][0])
            raise InputError(
                f"{what}: this shard holds the id {wrong}, which is beyond the vocabulary of {vocabulary_size:,}",
                where=prefix,
                hint="set data.tokenizer to the one that made it",
            )
