"""What a mixture takes of each dataset: pure functions of weights, seed, names and sizes.

Two laws. `select_shards`: every dataset gives weight x total tokens, to the document: whole shards in a seeded order,
and the shard where the number is reached is cut. `select_whole_shards`: no shard is cut. Again and again the dataset
furthest behind its weight (weight x total - own tokens is largest) takes its next shard, until one that should take has
none left; a shard that would leave any dataset more than one shard (the largest chosen one) away from its weight waits,
and the next one in line takes. So the reached weights are always within one shard.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relayrun.errors import ConfigError

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
