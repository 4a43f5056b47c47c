"""Selects the shards that a mixture takes of each data set, and summarises the mixture.

`select_shards`: every data set gives weight x total tokens, to the document: whole shards in a seeded order, and the
last shard is cut. `select_whole_shards`: no shard is cut; the data set furthest behind its weight (weight x total -
own tokens is largest) takes its next shard until a data set that should take has none left. A shard that would leave
any data set more than one shard away from its weight waits, so the reached weights are within one shard. Several
passes over a data set lie in folders of their own, because each file needs a name of its own.
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
from relayrun.tokens.shards.prefixes import MIXTURE_FORMAT
from relayrun.tokens.shards.shard import Shard, encode_index

WEIGHT_TOLERANCE = 0.001
"""How far from its weight a dataset may be, as a share of its weight."""


@dataclass(frozen=True, kw_only=True)
class ShardSelection:
    """What one dataset gives of its shards, in their shuffled order."""

    passes: int
    """How often all of its shards are taken."""
    shards: int
    """Whole shards of the last, partial pass, from the front."""
    rest: int
    """Tokens that are missing after the whole shards, fewer than the next shard has."""


def parse_token_count(text: str) -> int:
    """Return how many tokens `10B`, `1.5T`, `300M`, `20k` or `1_000` are. Raises ConfigError."""
    match = re.fullmatch(r"(\d[\d_]*(?:\.\d+)?)([kKmMbBgGtT]?)", text.strip())
    factor = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
    tokens = round(float(match[1].replace("_", "")) * factor[match[2].lower()]) if match else 0
    if tokens < 1:
        raise ConfigError(f"{text!r} is no number of tokens", where="--tokens", hint="write 500M, 10B, 1.5T")
    return tokens


def normalise_weights(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum. Raises ConfigError unless all are positive and finite."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(
                f"a weight must be a positive number, not {weight:g}",
                where="--weights",
                hint="leave a dataset out to give it no weight",
            )
    largest = max(weights, default=1.0)  # first, lest the sum of huge weights be infinite
    total = math.fsum(weight / largest for weight in weights)
    shares = [weight / largest / total for weight in weights]
    if not all(shares):
        raise ConfigError("a weight is too small beside the others", where="--weights")
    return shares


def shuffled_order(names: Sequence[str], *, seed: int, dataset: int) -> list[int]:
    """A shuffle of the shards called `names`: indices sorted by a keyed hash of the name.

    It depends on nothing but seed, number of the dataset and names: not on the place of the folder,
    and a shard that is added leaves the others in their order.
    """
    key = hashlib.sha256(f"{seed}/{dataset}".encode()).digest()
    digests = [hashlib.blake2b(os.fsencode(name), key=key, digest_size=16).digest() for name in names]
    return sorted(range(len(names)), key=lambda i: (digests[i], names[i]))


def tokens_per_dataset(
    available: Sequence[int], weights: Sequence[float], *, tokens: int | None = None, repeat: bool = False
) -> list[int]:
    """Tokens that each dataset is to give.

    With `tokens` they sum to it, within rounding, and a dataset that has fewer is repeated. Without, the mixture
    ends where the first dataset is used up, or, with `repeat`, the last one.
    """
    if tokens is not None:
        return [round(weight * tokens) for weight in weights]
    lasts = [have / weight for have, weight in zip(available, weights, strict=True)]
    end = (max if repeat else min)(range(len(lasts)), key=lasts.__getitem__)
    targets = [round(weight * lasts[end]) for weight in weights]
    targets[end] = available[end]  # exactly, whatever the rounding
    return targets if repeat else [min(pair) for pair in zip(targets, available, strict=True)]


def select_shards(sizes: Sequence[int], target: int) -> ShardSelection:
    """How the `target` tokens come from shards of these `sizes` (tokens, in their shuffled order)."""
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    passes, left = divmod(target, int(ends[-1]))
    whole = int(np.searchsorted(ends, left, side="right")) if left else 0
    return ShardSelection(passes=passes, shards=whole, rest=left - (int(ends[whole - 1]) if whole else 0))


def nearest_end(ends: npt.NDArray[np.int64], tokens: int) -> int:
    """Which of the ascending `ends` comes nearest to `tokens`; of equal ones the last."""
    after = min(int(np.searchsorted(ends, tokens)), len(ends) - 1)
    before = max(after - 1, 0)
    found = before if tokens - int(ends[before]) <= int(ends[after]) - tokens else after
    return int(np.searchsorted(ends, ends[found], side="right")) - 1


def select_whole_shards(sizes: Sequence[Sequence[int]], weights: Sequence[float]) -> list[int]:
    """How many shards each dataset gives, from the front of its list, none cut. The rule is above.

    `sizes[d]` are the tokens of dataset d's shards in their shuffled order, `weights` sum to 1.
    For the counts returned, |tokens of d - weights[d] x total| is at most the largest shard chosen,
    for every d. With two or three datasets one is always used up; with four or more the selection can
    (rarely) run into states where every step breaks the bound: it then goes on by the plain rule, and
    the last state within the bound counts.
    """
    share = np.asarray(weights, dtype=np.float64)
    tokens = np.zeros(len(sizes), dtype=np.int64)
    taken = [0] * len(sizes)
    within = list(taken)
    largest = 0
    while True:
        behind = share * int(tokens.sum()) - tokens
        line = np.argsort(-behind, kind="stable").tolist()
        pick = line[0]
        bounded = False
        for d in line:
            if behind[d] < 0 and d != line[0]:  # the rest are ahead
                break
            if taken[d] == len(sizes[d]):
                return within
            size = sizes[d][taken[d]]
            after = behind + share * size
            after[d] -= size
            if float(np.abs(after).max()) <= max(largest, size):
                pick, bounded = d, True
                break
        size = sizes[pick][taken[pick]]
        largest = max(largest, size)
        tokens[pick] += size
        taken[pick] += 1
        if bounded:
            within = list(taken)


@dataclass(frozen=True, kw_only=True)
class CutShard:
    """The first documents of a shard."""

    of: Shard
    documents: int
    tokens: int

    def index(self) -> bytes:
        """Return the bytes of an .idx that names these documents alone."""
        bounds = np.asarray(self.of.bounds())[: self.documents + 1]
        return encode_index(np.asarray(self.of.lengths())[: bounds[-1]], bounds, self.of.dtype)

    def longest(self) -> int:
        """Tokens of the longer of the two documents at the cut."""
        bounds = np.asarray(self.of.bounds())
        lengths = self.of.lengths()
        around = [(bounds[at], bounds[at + 1]) for at in (self.documents - 1, self.documents) if at >= 0]
        return max(int(np.sum(lengths[first:end])) for first, end in around)


@dataclass(frozen=True, kw_only=True)
class MixtureDataset:
    """One dataset of a mixture. `shards` and `links` stand in their shuffled order."""

    name: str
    """Sub-folder of the mixture that holds its links."""
    folder: str
    """Absolute path of the dataset, as it was given."""
    weight: float
    """Wanted share of the tokens; the weights of a mixture sum to 1."""
    shards: list[Shard] = field(repr=False)
    """All shards that the dataset has."""
    links: list[str] = field(repr=False)
    """Link names without suffix, one a shard."""
    reals: list[str] = field(repr=False)
    """Where the .bin of each shard really lies."""
    passes: int = 0
    """How often the mixture takes all shards."""
    taken: int = 0
    """How many shards the mixture takes whole after the passes, from the front."""
    cut: CutShard | None = None
    """What the mixture takes of the shard after the whole ones."""

    @functools.cached_property
    def tokens(self) -> int:
        """Tokens that the mixture takes."""
        cut = self.cut.tokens if self.cut is not None else 0
        return self.passes * self.available + sum(shard.tokens for shard in self.shards[: self.taken]) + cut

    @functools.cached_property
    def available(self) -> int:
        """Tokens that the dataset has."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def epochs(self) -> float:
        """How often the mixture takes an average token."""
        return self.tokens / self.available

    @property
    def size(self) -> int:
        """Bytes of the tokens that the mixture takes."""
        whole = self.passes * sum(shard.tokens * shard.dtype.itemsize for shard in self.shards)
        whole += sum(shard.tokens * shard.dtype.itemsize for shard in self.shards[: self.taken])
        return whole + (self.cut.tokens * self.cut.of.dtype.itemsize if self.cut is not None else 0)

    @property
    def counts(self) -> list[int]:
        """Whole shards of every pass; to the last one belongs the cut shard, if there is one."""
        last = [self.taken] if self.taken or self.cut is not None else []
        return [len(self.shards)] * self.passes + last

    @property
    def prefixes(self) -> int:
        """How many shards the mixture links."""
        return self.passes * len(self.shards) + self.taken + (self.cut is not None)

    def entries(self) -> Iterator[dict[str, Any]]:
        """A record of every shard that the mixture links."""
        for number, count in enumerate(self.counts):
            place = os.path.join(self.name, pass_folder(number))
            found = [(shard, shard.tokens, shard.documents if shard.cut else None) for shard in self.shards[:count]]
            if self.cut is not None and number == self.passes:
                found.append((self.cut.of, self.cut.tokens, self.cut.documents))
            for (shard, tokens, cut_after), link in zip(found, self.links, strict=False):
                entry = {"dataset": self.name, "link": os.path.join(place, link), "prefix": shard.prefix}
                yield entry | {"tokens": tokens} | ({} if cut_after is None else {"cut_after_documents": cut_after})


def pass_folder(number: int) -> str:
    """Where the links of a pass lie below those of the first, which is number 0."""
    return f"epoch-{number + 1}" if number else ""


def summarise_mixture(datasets: Sequence[MixtureDataset], seed: int) -> str:
    """The table that is printed and written beside the links: one line a dataset, and the total.

    `lasts` forecasts when a dataset has been read once, in tokens of the mixture.
    """
    total = sum(dataset.tokens for dataset in datasets)
    rows = [("dataset", "tokens", "of", "epochs", "lasts", "prefixes", "of", "GB", "wanted", "reached", "folder")]
    rows += [
        (
            d.name,
            f"{d.tokens:,}",
            f"{d.available:,}",
            f"{d.epochs:.3f}",
            f"{d.available / d.weight:,.0f}",
            f"{d.prefixes:,}",
            f"{len(d.shards):,}",
            f"{d.size / 1e9:.3f}",
            f"{d.weight:.4f}",
            f"{d.tokens / total:.4f}",
            d.folder,
        )
        for d in datasets
    ]
    rows.append(
        (
            "total",
            f"{total:,}",
            f"{sum(d.available for d in datasets):,}",
            "",
            "",
            f"{sum(d.prefixes for d in datasets):,}",
            f"{sum(len(d.shards) for d in datasets):,}",
            f"{sum(d.size for d in datasets) / 1e9:.3f}",
            "1.0000",
            "1.0000",
            "",
        )
    )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 10)), row[10]]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    lines.insert(-1, lines[1])
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
    """The summary for programs; one line a shard. ASCII, because a file name need not be UTF-8."""
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
