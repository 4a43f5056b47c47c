"""Overlap of two data sets of shards: documents and n-grams of the first that stand in the second.

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

_BLOCK = 1 << 17
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, kw_only=True)
class Overlap:
    """The documents and n-grams of one data set that also stand in another."""

    documents: int
    """Documents of the first set that were compared."""
    same: int
    """Compared documents that stand whole in the second set."""
    nearly: int
    """Compared documents that do not, but of whose n-grams at least 95% stand there."""
    ngram_share: float
    """Share of their n-grams that stand in the second set."""
    read: int
    """Documents of the second set that were read."""
    of: int
    """All documents of the second set."""

    @property
    def large(self) -> bool:
        """True for a copy of the text: more than 1% of the documents, but for a few tokens, or half of the n-grams.
        Separate texts share some: program code more than prose."""
        return self.same + self.nearly > 0.01 * self.documents or self.ngram_share > 0.5

    def __str__(self) -> str:
        nearly = f" (and {self.nearly:,} but for a few tokens)" if self.nearly else ""
        words = f"{self.same:,} of {self.documents:,} documents{nearly} and {self.ngram_share:.2%} of their"
        return f"{words} {NGRAM}-grams stand in {self.read:,} of {self.of:,} documents"


def measure_overlap(first: Sequence[str], second: Sequence[str], *, most: int) -> Overlap:
    """Compare the documents of shards, given by prefix; of each set about `most` tokens are read. Raises InputError for
    torn shards, for shards of two tokenizers, and if the first set has no document."""
    records = ShardRecords()
    made = [record.made for prefix in (*first, *second) if (record := records.of(prefix)) and record.made]
    if len({each.ids for each in made}) > 1:
        raise InputError("the shards of two tokenizers cannot be compared", where=second[0])
    frames = [token for token in {i for each in made for i in (each.bos, each.eos)} if token is not None]
    read = [(_digests(*block), _ngrams(*block), np.diff(block[1])) for block in _documents(first, most, frames)]
    texts = [text for digests, *_ in read for text in digests]
    if not texts:
        raise InputError("there is no document to compare", where=first[0])
    # with one more, so that there is a place for every hash
    ngrams, places = np.unique(np.concatenate([[np.uint64(0)], *(each for _, each, _ in read)]), return_inverse=True)
    there, wanted, seen, documents = np.zeros(len(ngrams), np.bool_), set(texts), set[int](), 0
    for block in _documents(second, most, frames):
        digests = _digests(*block)
        seen |= wanted.intersection(digests)
        found = np.unique(_ngrams(*block))
        place = np.searchsorted(ngrams[:-1], found)
        there[place[ngrams[place] == found]] = True
        documents += len(digests)
    whole = np.array([text in seen for text in texts])
    sizes = np.maximum(np.concatenate([each for *_, each in read]) - NGRAM + 1, 0)
    known = np.append(0, np.cumsum(there[places[1:]]))  # n-grams up to each one
    shares = np.diff(known[np.append(0, np.cumsum(sizes))]) / np.maximum(sizes, 1)
    return Overlap(
        documents=len(texts),
        same=int(whole.sum()),
        nearly=int((~whole & (shares >= 0.95)).sum()),
        ngram_share=float(known[-1] / max(sizes.sum(), 1)),
        read=documents,
        of=sum(Shard.open(prefix).documents for prefix in second),
    )


def _documents(
    prefixes: Sequence[str], most: int, frames: Sequence[int]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
    """Yield blocks of documents, evenly spread over the shards, of about `most` tokens together: ids without `frames`,
    and the end of each document after a leading 0."""
    shards, number = [*map(Shard.open, prefixes)], itertools.count()
    step = max(1, -(-sum(shard.tokens for shard in shards) // most))
    for shard in shards:
        ids, ends = shard.ids() if shard.tokens else np.zeros(0, shard.dtype), shard.document_ends()
        firsts = np.searchsorted(ends, np.arange(0, shard.tokens, _BLOCK))
        for begin, end in itertools.pairwise(np.unique(np.append(firsts, len(ends) - 1)).tolist()):
            if next(number) % step == 0:
                kept = ~np.isin(part := np.asarray(ids[ends[begin] : ends[end]]), frames)
                yield part[kept], np.append(0, np.cumsum(kept))[ends[begin : end + 1] - ends[begin]]


def _digests(ids: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> list[int]:
    wide = ids.astype(np.uint32).data
    return [xxhash.xxh3_64_intdigest(wide[begin:end]) for begin, end in itertools.pairwise(ends.tolist())]


def _ngrams(ids: npt.NDArray[Any], ends: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each n-gram inside a document."""
    size = max(len(ids) - NGRAM + 1, 0)
    hashes = np.zeros(size, np.uint64)
    for offset in range(NGRAM):
        hashes *= _FACTOR
        hashes += ids[offset : offset + size].astype(np.uint64) + np.uint64(1)
    owners = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
    return np.asarray(hashes[owners[:size] == owners[len(ids) - size :]])
