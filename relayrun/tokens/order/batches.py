"""Global batches: samples dealt to data-parallel ranks, and the iterations that train on them.

The iteration that begins with `c` consumed samples trains on the samples c .. c + size - 1, with the size of
`GlobalBatchSizes`. Accumulation step s, rank r, row m of its micro-batch is

    sample c + (s * data_parallel_size + r) * micro_batch_size + m

so every accumulation step, over all ranks, is a contiguous range of sample numbers. With streams, each rank takes the
numbers of its lanes (`order.sampler.ReplicaSampleReader`). `TrainingProgress` maps iterations to samples over the whole
past of a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol, Self

from relayrun.config.sections.training import GlobalBatchSizes, IterationRange
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.order.prefetcher import Prefetcher
from relayrun.tokens.order.sample_rows import RowBatch, SampleRow
from relayrun.tokens.shards.shard import first_foreign_id

PREFETCHED_ITERATIONS = 2
"""Iterations that a thread prepares in advance."""
CLOSE_SECONDS = 10.0

Batch = list[Any]
"""The share of a rank in an iteration: for each accumulation step a `RowBatch`, or what `convert` makes of it."""


class SampleSource(Protocol):
    """Numbered samples. Optional methods: `numbers(first, end)`, this rank's samples in the range, and `close()`."""

    name: str

    def row(self, k: int) -> SampleRow: ...


def check_row(row: SampleRow, order: SampleSource, k: int, vocabulary_size: int | None) -> SampleRow:
    """Return `row`, which is sample k. Raises FatalTrainingError for an id outside of the vocabulary. Without the check
    the padding of an embedding would accept some ids, and a GPU would report the others only as a failure."""
    if vocabulary_size is not None and (wrong := first_foreign_id(row.tokens, vocabulary_size)) is not None:
        raise FatalTrainingError(
            f"sample {k} of {order.name!r} holds the token id {wrong}, which is beyond the vocabulary of "
            f"{vocabulary_size}",
            hint="scripts/tools/verify_dataset.py names the shard; tokenize it with the tokenizer of data.tokenizer",
        )
    return row


class BatchReader(Iterator[Batch]):
    """Endless iterator over the batches of a data-parallel rank, starting at `consumed_samples`. A thread reads ahead.

    Raises ConfigError if a later batch size is not divisible by micro_batch_size x data_parallel_size. `next` raises an
    error of the thread behind the iterations that were read before it. `close`, or the context manager, ends the
    thread.
    """

    def __init__(
        self,
        order: SampleSource,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        micro_batch_size: int,
        batch_sizes: GlobalBatchSizes,
        consumed_samples: int,
        vocabulary_size: int | None = None,
        convert: Callable[[RowBatch], Any] = lambda rows: rows,
        depth: int = PREFETCHED_ITERATIONS,
    ) -> None:
        """`vocabulary_size`: exclusive upper bound of token ids; None: unknown. The thread, which reads `depth`
        iterations ahead, calls `convert`; 0: no thread, and `next` reads."""
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data-parallel rank {data_parallel_rank} of {data_parallel_size}")
        if micro_batch_size < 1 or consumed_samples < 0:
            wrong = f"{micro_batch_size}, {consumed_samples}"
            raise ValueError(f"micro_batch_size must be positive and consumed_samples not negative, not {wrong}")
        if (stage := batch_sizes.indivisible(micro_batch_size * data_parallel_size, consumed_samples)) is not None:
            product = f"{micro_batch_size} x {data_parallel_size}"
            raise ConfigError(f"{stage} is no multiple of micro_batch_size x data-parallel size = {product}")
        self.consumed_samples = consumed_samples
        """Number of the first sample, over all ranks, that `next` has not returned."""
        self._order = order
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self._micro_batch_size = micro_batch_size
        self._batch_sizes = batch_sizes
        self._vocabulary_size, self._convert = vocabulary_size, convert
        self._closed = False
        self._ahead = Prefetcher(self._batches(consumed_samples), depth, name=f"batches-{order.name}")

    def __next__(self) -> Batch:
        if self._closed:
            raise RuntimeError("this BatchReader is closed")
        batch = next(self._ahead)
        self.consumed_samples += self._batch_sizes.at(self.consumed_samples)
        return batch

    def close(self) -> None:
        """End the thread. After 10 s a read that hangs in the file system is abandoned: the thread is a daemon."""
        self._closed = True
        self._ahead.close()
        self._ahead.join(CLOSE_SECONDS)
        if (close := getattr(self._order, "close", None)) is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _batches(self, consumed: int) -> Iterator[Batch]:
        while True:
            yield self._read(consumed)
            consumed += self._batch_sizes.at(consumed)

    def _read(self, consumed: int) -> Batch:
        numbers, step = self._numbers(consumed, consumed + self._batch_sizes.at(consumed)), self._micro_batch_size
        return [self._micro_batch(numbers[at : at + step]) for at in range(0, len(numbers), step)]

    def _micro_batch(self, numbers: Sequence[int]) -> Any:
        rows = [*map(self._order.row, numbers)]
        found, size = RowBatch.stack(rows), self._vocabulary_size
        if size is not None and first_foreign_id(found.tokens.ravel(), size) is not None:
            for k, row in zip(numbers, rows, strict=True):
                check_row(row, self._order, k, size)
        return self._convert(found)

    def _numbers(self, first: int, end: int) -> Sequence[int]:
        """Return this rank's samples of the range."""
        if (own := getattr(self._order, "numbers", None)) is not None:
            return list[int](own(first, end))
        size = self._micro_batch_size
        starts = range(first + self._rank * size, end, self._size * size)
        return [k for start in starts for k in range(start, start + size)]


class TrainingProgress:
    """Iterations done, samples consumed, and the ranges of iterations (`legs`) with their batch sizes."""

    def __init__(
        self,
        sizes: GlobalBatchSizes,
        *,
        iteration: int = 0,
        consumed_samples: int = 0,
        legs: Sequence[IterationRange] = (),
        skipped: Sequence[int] = (),
    ) -> None:
        """Continue at `iteration` with `sizes`; `legs` are the past of the run."""
        self.iteration = iteration
        self.consumed_samples = consumed_samples
        self.legs = [*legs] or [IterationRange(0, 0, sizes)]
        self.skipped = [*skipped]
        """Iterations without an update, ascending; their samples are consumed."""
        if self.legs[-1].sizes != sizes or self.legs[-1].consumed(iteration) != consumed_samples:
            self._begin_leg(sizes)

    @property
    def batch_size(self) -> int:
        """Samples of the next iteration."""
        return self.legs[-1].sizes.at(self.consumed_samples)

    def advance(self, *, skipped: bool = False) -> None:
        """Count an iteration; `skipped` if it has no update."""
        self.consumed_samples += self.batch_size
        self.iteration += 1
        if skipped:
            self.skipped.append(self.iteration)

    def pass_over(self, end: int) -> None:
        """Consume the samples before `end` without training on them."""
        if end < self.consumed_samples:
            raise ValueError(f"samples before {self.consumed_samples} are consumed, {end} cannot be next")
        self.consumed_samples = end
        self._begin_leg(self.legs[-1].sizes)

    def reaches(self, samples: int) -> int:
        """Return the iterations done, or expected, once `samples` are consumed."""
        for leg, after in pairwise(self.legs):
            if samples <= after.consumed_samples:
                return min(leg.reaches(samples), after.iteration)
        return self.legs[-1].reaches(samples)

    def iteration_of(self, sample: int) -> int | None:
        """Return the iteration (counted from 1) that trains on a sample; None if the sample was passed over."""
        if any(first <= sample < end for first, end in self.passed_over):
            return None
        return self.reaches(sample + 1)

    @property
    def passed_over(self) -> list[tuple[int, int]]:
        """Ranges (first, end) of samples that were consumed without training on them."""
        ends = [0] + [leg.consumed(after.iteration) for leg, after in pairwise(self.legs)]
        return [
            (end, leg.consumed_samples) for end, leg in zip(ends, self.legs, strict=True) if end < leg.consumed_samples
        ]

    @property
    def untrained(self) -> list[tuple[int, int]]:
        """Ranges (first, end) of samples that changed no weight: passed over, or of a skipped iteration."""
        found = self.passed_over
        for iteration in self.skipped:
            leg = next(leg for leg in reversed(self.legs) if leg.iteration < iteration)
            found.append((leg.consumed(iteration - 1), leg.consumed(iteration)))
        return sorted(found)

    def state(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "consumed_samples": self.consumed_samples,
            "legs": [
                {"iteration": leg.iteration, "consumed_samples": leg.consumed_samples, **leg.sizes.to_json()}
                for leg in self.legs
            ],
            "skipped": list(self.skipped),
        }

    @classmethod
    def resume(cls, state: Mapping[str, Any], sizes: GlobalBatchSizes) -> Self:
        """Resume from a state with these batch sizes. Raises FatalTrainingError if the state is damaged."""
        try:
            legs = [
                IterationRange(entry["iteration"], entry["consumed_samples"], GlobalBatchSizes.from_json(entry))
                for entry in state["legs"]
            ]
            iteration, consumed = state["iteration"], state["consumed_samples"]
            for leg, after in pairwise(legs):
                if not leg.iteration < after.iteration or leg.consumed(after.iteration) > after.consumed_samples:
                    raise ValueError(f"the leg at iteration {after.iteration} does not follow the one before")
            if legs[-1].iteration > iteration or legs[-1].consumed(iteration) != consumed:
                raise ValueError(f"its legs do not lead to {consumed} samples in {iteration} iterations")
            return cls(sizes, iteration=iteration, consumed_samples=consumed, legs=legs, skipped=state["skipped"])
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise FatalTrainingError(
                f"the progress in the checkpoint is damaged: {error}", hint="resume from an older checkpoint"
            ) from None

    def _begin_leg(self, sizes: GlobalBatchSizes) -> None:
        """Begin a leg here. Legs that begin at this iteration or later never trained and are dropped."""
        self.legs = [leg for leg in self.legs if leg.iteration < self.iteration]
        last = self.legs[-1] if self.legs else None
        if last is None or last.sizes != sizes or last.consumed(self.iteration) != self.consumed_samples:
            self.legs.append(IterationRange(self.iteration, self.consumed_samples, sizes))
