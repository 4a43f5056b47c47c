"""The dataset and position of global sample k: closed form, exact integers, no I/O.

A schedule is a list of phases. A phase begins at a sample number and has a weight for each dataset, integers that sum
to 2^32. Inside a phase a binary tree interleaves the datasets: a node of weight w whose left part weighs l gives, of
its first n samples, (n * l + w // 2) // w to the left and the rest to the right. These counts rise by 0 or 1 with every
sample, so each sample goes down exactly one path, and the counts of the first n samples are known without a walk
through them.

The tree is Huffman's: the two lightest parts are joined first. Heavy datasets stand near the root, where rounding
matters least: a count is never further than 2 from weight x n, within about 1 in practice.

A dataset's position is its count in this phase plus its counts of all earlier phases. A dataset that leaves the mixture
keeps its count, and continues there when it returns. Cost of `locate`: a step for each level of the tree, about 1 µs;
of `counts`: a step for each dataset and phase. Decision 0010 lists rejected ways.
"""

from __future__ import annotations

import heapq
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, Self

from relayrun.tokens.order.permutation import Permutation, permutation_key

WEIGHT_TOTAL = 1 << 32
"""Sum of the integer weights of a phase."""


def integer_weights(weights: Mapping[str, float]) -> dict[str, int]:
    """Return weights in any unit as integers of at least 1 that sum to 2^32, in the order of the names.

    Largest remainders, in exact arithmetic: the result depends on the ratios alone, not on the order of the weights.
    Raises ValueError unless all are positive and finite.
    """
    if not weights or len(weights) > WEIGHT_TOTAL >> 8:
        raise ValueError("a mixture needs a dataset, and not millions of them")
    try:
        exact = {name: Fraction(weight) for name, weight in sorted(weights.items())}
    except (OverflowError, ValueError):
        raise ValueError("a weight must be a finite number") from None
    if min(exact.values()) <= 0:
        raise ValueError("a weight must be positive; leave a dataset out to give it no weight")
    spare = WEIGHT_TOTAL - len(exact)  # each has 1 already
    total = sum(exact.values())
    shares = {name: weight / total * spare for name, weight in exact.items()}
    result = {name: 1 + int(share) for name, share in shares.items()}
    missing = WEIGHT_TOTAL - sum(result.values())
    for name in sorted(shares, key=lambda name: (int(shares[name]) - shares[name], name))[:missing]:
        result[name] += 1
    return result


@dataclass(frozen=True)
class _Node:
    """A part of the tree: a dataset, or two parts."""

    weight: int
    name: str
    """Name of the dataset; in an inner node the smallest name below it, which settles ties."""
    left: _Node | None = None
    right: _Node | None = None

    def left_count(self, n: int) -> int:
        """Return how many of this node's first n samples go to the left."""
        assert self.left is not None
        return (n * self.left.weight + self.weight // 2) // self.weight


class Interleave:
    """The samples 0, 1, ... of a phase, dealt to its datasets."""

    def __init__(self, weights: Mapping[str, int]) -> None:
        heap = [(weight, name, _Node(weight, name)) for name, weight in weights.items()]
        heapq.heapify(heap)
        while len(heap) > 1:
            light, heavy = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
            joined = _Node(light.weight + heavy.weight, min(light.name, heavy.name), light, heavy)
            heapq.heappush(heap, (joined.weight, joined.name, joined))
        self._root = heap[0][2]

    def locate(self, n: int) -> tuple[str, int]:
        """Return the dataset of sample n, and the number of earlier samples of that dataset."""
        node = self._root
        while True:
            left, right = node.left, node.right
            if left is None or right is None:
                return node.name, n
            before = node.left_count(n)
            if node.left_count(n + 1) > before:
                node, n = left, before
            else:
                node, n = right, n - before

    def counts(self, n: int) -> dict[str, int]:
        """Return the number of samples of each dataset among the first n."""
        found = {}
        waiting = [(self._root, n)]
        while waiting:
            node, n = waiting.pop()
            if node.left is None or node.right is None:
                found[node.name] = n
            else:
                left = node.left_count(n)
                waiting += [(node.left, left), (node.right, n - left)]
        return found


class RotatedInterleave:
    """An `Interleave`, rotated for every turn of `lanes` samples: a phase of a mixture with streams.

    Number r of turn t is number (r + shift of t) mod `lanes` of that turn in the `Interleave`. Without the shift a data
    set that gives, say, every second sample would only ever use every second lane. Over `lanes` turns every shift comes
    once, so each lane has its share of every data set. At the end of each turn the counts equal those of the
    `Interleave`; inside a turn they differ by a few samples at most.
    """

    def __init__(self, inner: Interleave, lanes: int) -> None:
        self._inner = inner
        self._lanes = lanes
        self._shifts = Permutation(lanes, permutation_key(0, "turns", lanes))
        self._turn = lru_cache(8)(self._turn_counts)
        self._only = next(iter(names)) if len(names := inner.counts(0)) == 1 else None
        """The data set if it is the only one: it has every sample."""

    def locate(self, n: int) -> tuple[str, int]:
        """See `Interleave.locate`."""
        if self._only is not None:
            return self._only, n
        turn, r = divmod(n, self._lanes)
        shift, _, at_shift, after = self._turn(turn)
        first = turn * self._lanes
        name, count = self._inner.locate(first + (r + shift) % self._lanes)
        if r + shift < self._lanes:  # the rotation moves the samples before the shift behind it
            return name, count - at_shift[name] + self._turn(turn)[1][name]
        return name, count + after[name] - at_shift[name]

    def counts(self, n: int) -> dict[str, int]:
        """See `Interleave.counts`."""
        turn, r = divmod(n, self._lanes)
        shift, before, at_shift, after = self._turn(turn)
        first = turn * self._lanes
        if r + shift <= self._lanes:
            now, base = self._inner.counts(first + r + shift), before
        else:
            now, base = self._inner.counts(first + r + shift - self._lanes), after
        return {name: base[name] + count - at_shift[name] for name, count in now.items()}

    def _turn_counts(self, turn: int) -> tuple[int, dict[str, int], dict[str, int], dict[str, int]]:
        """Return the shift, and the counts of the `Interleave` before the turn, at its shift and after it."""
        shift, first = self._shifts(turn % self._lanes), turn * self._lanes
        counts = self._inner.counts
        return shift, counts(first), counts(first + shift), counts(first + self._lanes)


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A mixture, from sample `start` on."""

    start: int
    weights: dict[str, int]
    """Weight of each dataset, integers that sum to 2^32."""
    lanes: int | None = None
    """Lanes of the streams in the mixture; None: no stream."""

    @cached_property
    def interleave(self) -> Interleave | RotatedInterleave:
        """The assignment of the phase's samples to its datasets."""
        inner = Interleave(self.weights)
        return inner if self.lanes is None else RotatedInterleave(inner, self.lanes)


class Schedule:
    """Phases from sample 0 on. Immutable; `with_phase` makes another one. Raises ValueError for phases that do not
    begin at 0 and rise, or whose weights do not sum to 2^32."""

    def __init__(self, phases: Sequence[Phase]) -> None:
        starts = [phase.start for phase in phases]
        if not starts or starts[0] != 0 or any(a >= b for a, b in pairwise(starts)):
            raise ValueError(f"phases begin at 0 and rise, not {starts}")
        for phase in phases:
            if sum(phase.weights.values()) != WEIGHT_TOTAL or min(phase.weights.values()) < 1:
                raise ValueError(f"the weights of the phase at {phase.start} do not sum to 2^32")
        self.phases = tuple(phases)
        self._starts = starts
        self._before: list[dict[str, int]] = [{}]  # counts of all earlier phases, by phase
        for phase, after in pairwise(self.phases):
            self._before.append(_sum(self._before[-1], phase.interleave.counts(after.start - phase.start)))

    @classmethod
    def from_weights(cls, weights: Mapping[str, float], lanes: int | None = None) -> Self:
        return cls([Phase(start=0, weights=integer_weights(weights), lanes=lanes)])

    @property
    def names(self) -> list[str]:
        """All datasets that have or had a weight, sorted."""
        return sorted({name for phase in self.phases for name in phase.weights})

    def locate(self, k: int) -> tuple[str, int]:
        """Return (dataset, position) of sample k. Positions have no gaps. Raises IndexError if k < 0."""
        if k < 0:
            raise IndexError(f"sample {k}: samples are numbered from 0")
        number = bisect_right(self._starts, k) - 1
        name, count = self.phases[number].interleave.locate(k - self._starts[number])
        return name, count + self._before[number].get(name, 0)

    def number_in_phase(self, k: int) -> int:
        """Return the number of global sample k in its phase; modulo the lanes it is the lane of the sample."""
        return k - self._starts[max(0, bisect_right(self._starts, k) - 1)]

    def counts(self, k: int) -> dict[str, int]:
        """Return how many of the samples 0 .. k - 1 each dataset gives, sorted by name; the sum is k."""
        number = max(0, bisect_right(self._starts, k) - 1)
        within = self.phases[number].interleave.counts(k - self._starts[number])
        return dict.fromkeys(self.names, 0) | dict(sorted(_sum(self._before[number], within).items()))

    def sample_of(self, name: str, position: int) -> int | None:
        """Return the global sample at this position of a dataset; None if the dataset left the mixture before."""
        last = self.phases[-1]
        if name not in last.weights and self._before[-1].get(name, 0) <= position:
            return None
        low, high = 0, 1
        while self.counts(high).get(name, 0) <= position:
            low, high = high, 2 * high
        while high - low > 1:  # counts(low) <= position < counts(high)
            middle = (low + high) // 2
            low, high = (middle, high) if self.counts(middle).get(name, 0) <= position else (low, middle)
        return low

    def with_phase(self, start: int, weights: Mapping[str, int], lanes: int | None = None) -> Schedule:
        """Return the schedule of a run that resumes at sample `start` with these integer weights and lanes. Phases that
        begin at `start` or later gave no sample and are dropped; unchanged weights make no new phase."""
        kept = [phase for phase in self.phases if phase.start < start]
        if not kept or (kept[-1].weights, kept[-1].lanes) != (dict(weights), lanes):
            kept.append(Phase(start=start, weights=dict(weights), lanes=lanes))
        return Schedule(kept)

    def to_json(self) -> list[dict[str, Any]]:
        return [
            {"start": phase.start, "weights": dict(phase.weights)}
            | ({} if phase.lanes is None else {"lanes": phase.lanes})
            for phase in self.phases
        ]

    @classmethod
    def from_json(cls, value: Iterable[Mapping[str, Any]]) -> Self:
        """Read the result of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        return cls([Phase(start=int(e["start"]), weights=dict(e["weights"]), lanes=e.get("lanes")) for e in value])


def _sum(a: Mapping[str, int], b: Mapping[str, int]) -> dict[str, int]:
    return {name: a.get(name, 0) + b.get(name, 0) for name in a.keys() | b.keys()}
