"""Selects the shards of each data set for a mixture, and summarises the mixture.

Every data set gives weight x total tokens, to the document: whole shards in a seeded order, and the last shard is cut.
Each pass over a data set has its own folder, because file names must be unique.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from relayrun.errors import ConfigError
from relayrun.terminal import format_table
from relayrun.tokens.shards.prefixes import MIXTURE_FORMAT
from relayrun.tokens.shards.shard import Shard, encode_index

WEIGHT_TOLERANCE = 0.001
"""Accepted deviation from a dataset's weight, as a share of the weight."""


@dataclass(frozen=True, kw_only=True)
class ShardSelection:
    """The share of a dataset's shards, in their shuffled order, in a mixture."""

    passes: int
    """Complete passes over all shards."""
    shards: int
    """Whole shards of the last, partial pass, from the front."""
    rest: int
    """Tokens still missing after the whole shards, fewer than the next shard has."""


def parse_token_count(text: str) -> int:
    """Return the number of tokens in `10B`, `1.5T`, `300M`, `20k` or `1_000`. Raises ConfigError."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kKmMbBgGtT]?)", text.strip())
    factor = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
    tokens = round(float(match[1].replace("_", "")) * factor[match[2].lower()]) if match else 0
    if tokens < 1:
        raise ConfigError(f"{text!r} is no number of tokens", where="--tokens", hint="write 500M, 10B, 1.5T")
    return tokens


def normalise_weights(weights: Sequence[float]) -> list[float]:
    """Return the weights divided by their sum. Raises ConfigError unless all are positive and finite."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            hint = "leave a dataset out to give it no weight"
            raise ConfigError(f"a weight must be a positive number, not {weight:g}", where="--weights", hint=hint)
    largest = max(weights, default=1.0)  # first, lest the sum of huge weights be infinite
    total = math.fsum(weight / largest for weight in weights)
    shares = [weight / largest / total for weight in weights]
    if not all(shares):
        raise ConfigError("a weight is too small beside the others", where="--weights")
    return shares


def shuffled_order(names: Sequence[str], *, seed: int, dataset: int) -> list[int]:
    """Return indices of the shards `names` in shuffled order, sorted by a keyed hash of the name: a moved folder
    changes nothing, and an added shard leaves the others in their order."""
    key = hashlib.sha256(f"{seed}/{dataset}".encode()).digest()
    digests = [hashlib.blake2b(os.fsencode(name), key=key, digest_size=16).digest() for name in names]
    return sorted(range(len(names)), key=lambda i: (digests[i], names[i]))


def tokens_per_dataset(
    available: Sequence[int], weights: Sequence[float], *, tokens: int | None = None, repeat: bool = False
) -> list[int]:
    """Return the target tokens of each dataset. With `tokens` they sum to it, within rounding, and smaller datasets are
    repeated. Without, the mixture ends with the first dataset that is used up, or, with `repeat`, the last."""
    if tokens is not None:
        return [round(weight * tokens) for weight in weights]
    lasts = [have / weight for have, weight in zip(available, weights, strict=True)]
    end = (max if repeat else min)(range(len(lasts)), key=lasts.__getitem__)
    targets = [round(weight * lasts[end]) for weight in weights]
    targets[end] = available[end]  # exactly, whatever the rounding
    return targets if repeat else [min(pair) for pair in zip(targets, available, strict=True)]


def select_shards(sizes: Sequence[int], target: int) -> ShardSelection:
    """Return the selection of `target` tokens from shards of these `sizes` (tokens, in their shuffled order)."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    passes, left = divmod(target, int(ends[-1]))
    whole = int(np.searchsorted(ends, left, side="right")) if left else 0
    return ShardSelection(passes=passes, shards=whole, rest=left - (int(ends[whole - 1]) if whole else 0))


def nearest_end(ends: npt.NDArray[np.int64], tokens: int) -> int:
    """Return the index of the ascending `ends` nearest to `tokens`; the last of equal ones."""
    after = min(int(np.searchsorted(ends, tokens)), len(ends) - 1)
    before = max(after - 1, 0)
    found = before if tokens - int(ends[before]) <= int(ends[after]) - tokens else after
    return int(np.searchsorted(ends, ends[found], side="right")) - 1


@dataclass(frozen=True, kw_only=True)
class CutShard:
    """The first documents of a shard."""

    of: Shard
    documents: int
    tokens: int

    def index(self) -> bytes:
        """Return the bytes of an .idx with these documents alone."""
        bounds = np.asarray(self.of.bounds())[: self.documents + 1]
        return encode_index(np.asarray(self.of.lengths())[: bounds[-1]], bounds, self.of.dtype)

    def longest(self) -> int:
        """Return the tokens of the longer of the two documents at the cut."""
        return int(np.diff(self.of.document_ends())[max(0, self.documents - 1) : self.documents + 1].max())


@dataclass(frozen=True, kw_only=True)
class MixtureDataset:
    """A dataset of a mixture. `shards` and `links` are in their shuffled order."""

    name: str
    """Sub-folder of the mixture for its links."""
    folder: str
    """Absolute path of the dataset, with links unresolved."""
    weight: float
    """Wanted share of the tokens; the weights of a mixture sum to 1."""
    shards: list[Shard] = field(repr=False)
    """All shards of the dataset."""
    links: list[str] = field(repr=False)
    """Link names without suffix, one a shard."""
    bin_paths: list[str] = field(repr=False)
    """Real path of the .bin of each shard."""
    passes: int = 0
    """Complete passes over all shards."""
    taken: int = 0
    """Whole shards after the passes, from the front."""
    cut: CutShard | None = None
    """The selected part of the shard after the whole ones."""

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens in the mixture."""
        cut = self.cut.tokens if self.cut is not None else 0
        return self.passes * self.available + sum(shard.tokens for shard in self.shards[: self.taken]) + cut

    @functools.cached_property
    def available(self) -> int:
        """Tokens of the dataset."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def epochs(self) -> float:
        """Average passes over a token."""
        return self.tokens / self.available

    @property
    def size(self) -> int:
        """Bytes of the tokens in the mixture."""
        whole = self.passes * sum(shard.tokens * shard.dtype.itemsize for shard in self.shards)
        whole += sum(shard.tokens * shard.dtype.itemsize for shard in self.shards[: self.taken])
        return whole + (self.cut.tokens * self.cut.of.dtype.itemsize if self.cut is not None else 0)

    @property
    def counts(self) -> list[int]:
        """Whole shards of every pass; the cut shard belongs to the last pass."""
        last = [self.taken] if self.taken or self.cut is not None else []
        return [len(self.shards)] * self.passes + last

    @property
    def prefixes(self) -> int:
        """Number of linked shards."""
        return self.passes * len(self.shards) + self.taken + (self.cut is not None)

    def entries(self) -> Iterator[dict[str, Any]]:
        """Yield a record of every linked shard."""
        for number, count in enumerate(self.counts):
            place = os.path.join(self.name, pass_folder(number))
            found = [(shard, shard.tokens, shard.documents if shard.cut else None) for shard in self.shards[:count]]
            if self.cut is not None and number == self.passes:
                found.append((self.cut.of, self.cut.tokens, self.cut.documents))
            for (shard, tokens, cut_after), link in zip(found, self.links, strict=False):
                entry = {"dataset": self.name, "link": os.path.join(place, link), "prefix": shard.prefix}
                yield entry | {"tokens": tokens} | ({} if cut_after is None else {"cut_after_documents": cut_after})


def pass_folder(number: int) -> str:
    """Return the folder of a pass relative to the first pass, which is number 0."""
    return f"epoch-{number + 1}" if number else ""


def summarise_mixture(datasets: Sequence[MixtureDataset], seed: int, *, width: int | None = None) -> str:
    """Return the printed table, which is also written beside the links: a line for each dataset, and the total. `lasts`
    forecasts the tokens of the mixture after which a dataset has been read once. `width`: see `format_table`."""
    total = sum(dataset.tokens for dataset in datasets)
    numbers = ("tokens", "of", "epochs", "lasts", "prefixes", "of", "GB", "wanted", "reached")
    rows: list[tuple[str, ...]] = []
    for d in datasets:
        tokens = f"{d.tokens:,}", f"{d.available:,}", f"{d.epochs:.3f}", f"{d.available / d.weight:,.0f}"
        files = f"{d.prefixes:,}", f"{len(d.shards):,}", f"{d.size / 1e9:.3f}"
        rows.append((d.name, *tokens, *files, f"{d.weight:.4f}", f"{d.tokens / total:.4f}", d.folder))
    prefixes, shards = sum(d.prefixes for d in datasets), sum(len(d.shards) for d in datasets)
    tokens = f"{total:,}", f"{sum(d.available for d in datasets):,}", "", ""
    files = f"{prefixes:,}", f"{shards:,}", f"{sum(d.size for d in datasets) / 1e9:.3f}"
    rows.append(("total", *tokens, *files, "1.0000", "1.0000", ""))
    lines = [format_table(("dataset", *(f"{name}|n" for name in numbers), "folder"), rows, width=width)]
    for dataset in datasets:
        lines += _remarks(dataset, total)
    lines.append(f"seed {seed}")
    return "\n".join(lines) + "\n"


def _remarks(d: MixtureDataset, total: int) -> Iterator[str]:
    if d.tokens > d.available:
        yield f"{d.name} is repeated: {d.epochs:.2f} times all its tokens"
    elif d.tokens == d.available:
        yield f"{d.name} is used up: all its shards are taken"
    if d.cut is not None:
        yield (
            f"{d.name}: {d.cut.of.prefix} is cut after {d.cut.documents:,} of {d.cut.of.documents:,} documents, "
            f"{d.cut.tokens:,} of {d.cut.of.tokens:,} tokens"
        )
    off = d.tokens / total / d.weight - 1
    if abs(off) > WEIGHT_TOLERANCE:
        why = "no shard or document ends closer to it"
        if d.cut is not None and d.cut.longest() > WEIGHT_TOLERANCE * d.tokens:
            why = f"a document at the cut has {d.cut.longest():,} tokens"
        yield f"{d.name} is {100 * off:+.1f} % off its weight: {why}"


def mixture_summary_json(datasets: Sequence[MixtureDataset], seed: int) -> str:
    """Return the summary for programs, a line for each shard. ASCII, because a file name need not be UTF-8."""
    total = sum(dataset.tokens for dataset in datasets)
    head = {
        "format": MIXTURE_FORMAT,
        "seed": seed,
        "tokens": total,
        "datasets": [
            {
                "name": d.name,
                "folder": d.folder,
                "weight": d.weight,
                "reached": d.tokens / total,
                "tokens": d.tokens,
                "epochs": d.epochs,
                "exhausted_after_tokens": round(d.available / d.weight),
                "bytes": d.size,
                "prefixes": d.prefixes,
                "available_tokens": d.available,
                "available_prefixes": len(d.shards),
            }
            for d in datasets
        ],
    }
    shards = ",\n    ".join(json.dumps(entry) for d in datasets for entry in d.entries())
    return json.dumps(head, indent=2)[:-2] + f',\n  "shards": [\n    {shards}\n  ]\n}}\n'
