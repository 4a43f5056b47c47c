"""Overlap of two data sets of shards: documents of the first that stand in the second, whole or by their n-grams.

Large sets are sampled in blocks of documents, evenly spread, so that a comparison takes seconds; the result says how
many documents were read. BOS and EOS, as the records of the shards name them, do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from relayrun.errors import InputError
from relayrun.tokens.shards.shard import Shard, ShardRecords

NGRAM = 13
"""Tokens of an n-gram, as GPT-3 and Llama compare them."""

_BLOCK = 1 << 20
_FACTOR, _FILTER_SHIFT = np.uint64(0x9E3779B97F4A7C15), np.uint64(40)

_Block = tuple[npt.NDArray[Any], npt.NDArray[np.int64], int]
"""Ids of some documents, their ends after a leading 0, and the documents before them."""


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """Documents of the first data set that stand in the second one."""

    documents: int
    """Documents of the first set that were compared."""
    same: int
    """Of these, documents that stand whole in the second set."""
    half: int
    """Of these, documents with at least half of their n-grams in the second set."""
    ngram_share: float
    """Share of the n-grams of the first set that stand in the second set."""
    read: int
    """Documents of the second set that were read."""
    of: int
    """All documents of the second set."""

    def describe(self) -> str:
        """Describe the overlap in one line."""
        words = f"{self.same:,} of {self.documents:,} documents stand whole, {self.half:,} by at least half"
        return f"{words}, {self.ngram_share:.2%} of their {NGRAM}-grams, in {self.read:,} of {self.of:,} documents"


def measure_overlap(first: Sequence[str], second: Sequence[str], *, most: int) -> Overlap:
    """Compare the documents of shards, given by prefix; of each set about `most` tokens are read. Raises InputError for
    torn shards, for shards of two tokenizers, and if the first set has no document."""
    records = ShardRecords()
    made = [record.made for prefix in (*first, *second) if (record := records.of(prefix)) and record.made]
    if len({each.ids for each in made}) > 1:
        raise InputError("the shards of two tokenizers cannot be compared", where=second[0])
    frames = [token for token in {i for each in made for i in (each.bos, each.eos)} if token is not None]
    blocks = [*_documents(first, most, frames)]
    texts = [text for block in blocks for text in _digests(*block)]
    if not texts:
        raise InputError("there is no document to compare", where=first[0])
    hashes, owners = (np.concatenate(each) for each in zip(*itertools.starmap(_ngrams, blocks), strict=True))
    known, place = np.unique(hashes, return_inverse=True)
    maybe = np.zeros(1 << 24, np.bool_)
    maybe[known >> _FILTER_SHIFT] = True
    known = np.append(known, np.uint64(0))  # the place of hashes above all others
    there, seen, wanted, read = np.zeros(len(known), np.bool_), set[int](), set(texts), 0
    for block in _documents(second, most, frames):
        seen |= wanted.intersection(_digests(*block))
        found, _ = _ngrams(*block)
        found = found[maybe[found >> _FILTER_SHIFT]]
        at = np.searchsorted(known[:-1], found)
        there[at[known[at] == found]] = True
        read += len(block[1]) - 1
    every, shared = (np.bincount(each, minlength=len(texts)) for each in (owners, owners[there[place]]))
    return Overlap(
        documents=len(texts),
        same=sum(text in seen for text in texts),
        half=int(np.count_nonzero((shared > 0) & (2 * shared >= every))),
        ngram_share=int(shared.sum()) / max(len(owners), 1),
        read=read,
        of=sum(Shard.open(prefix).documents for prefix in second),
    )


def _documents(prefixes: Sequence[str], most: int, frames: Sequence[int]) -> Iterator[_Block]:
    """Yield blocks of documents, evenly spread over the shards, of about `most` tokens together, without `frames`."""
    shards, number, before = [*map(Shard.open, prefixes)], itertools.count(), 0
    step = max(1, -(-sum(shard.tokens for shard in shards) // most))
    for shard in shards:
        ids, ends = shard.ids() if shard.tokens else np.zeros(0, shard.dtype), shard.document_ends()
        firsts = np.searchsorted(ends, np.arange(0, shard.tokens, _BLOCK))
        for begin, end in itertools.pairwise(np.unique(np.append(firsts, len(ends) - 1)).tolist()):
            if next(number) % step == 0:
                kept = ~np.isin(part := np.asarray(ids[ends[begin] : ends[end]]), frames)
                yield part[kept], np.append(0, np.cumsum(kept))[ends[begin : end + 1] - ends[begin]], before
                before += end - begin


def _digests(ids: npt.NDArray[Any], ends: npt.NDArray[np.int64], _: int) -> list[int]:
    wide = ids.astype(np.uint32).data
    return [xxhash.xxh3_64_intdigest(wide[begin:end]) for begin, end in itertools.pairwise(ends.tolist())]


def _ngrams(
    ids: npt.NDArray[Any], ends: npt.NDArray[np.int64], before: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Return a hash of each n-gram inside a document, and the number of its document."""
    size = max(len(ids) - NGRAM + 1, 0)
    hashes = np.zeros(size, np.uint64)
    for offset in range(NGRAM):
        hashes *= _FACTOR
        hashes += ids[offset : offset + size].astype(np.uint64) + np.uint64(1)
    owners = before + np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    inside = owners[:size] == owners[len(ids) - size :]
    return hashes[inside], owners[:size][inside]
