"""What a mixture holds: its datasets, the table with the forecast, and the summary for programs.

Several passes over a dataset lie in folders of their own, because each file needs its own name.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from relayrun.tokens.mixture.select import WEIGHT_TOLERANCE
from relayrun.tokens.shards.indexed import Shard, encode_index
from relayrun.tokens.shards.mixture_folder import MIXTURE_FORMAT


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
