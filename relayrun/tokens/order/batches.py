"""Global batches: how samples are dealt to data-parallel ranks, and which iteration trains on which samples.

The iteration that begins with `c` consumed samples trains on the samples c .. c + size - 1, with the size of
`BatchSizes`. Accumulation step s, rank r, row m of its micro-batch is

    sample c + (s * data_parallel_size + r) * micro_batch_size + m

so every accumulation step, over all ranks, is one contiguous range of sample numbers. If ranks have lanes of their own
(`relayrun.tokens.order.sampler.LaneReader`), each rank takes its own numbers. A thread prepares the next two
iterations. `TrainingProgress` maps iterations to samples over the whole past of a run.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from queue import Empty, Queue
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from relayrun.config.sections.training import BatchSizes, IterationRange
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.order.sample_rows import RowBatch, SampleRow

PREFETCHED_ITERATIONS = 2
"""Iterations read ahead."""
CLOSE_SECONDS = 10.0

Batch = list[RowBatch]
"""One rank's share of an iteration: per accumulation step micro_batch_size samples."""


class SampleSource(Protocol):
    """What is read: numbered samples, each int64 [seq_length + 1].

    It may have a method `row(k)` as well, and `numbers(first, end)`, the samples of this rank between the two.
    """

    name: str

    def sample(self, k: int) -> npt.NDArray[np.int64]: ...


def check_token_ids(order: SampleSource, k: int, vocabulary_size: int | None) -> npt.NDArray[np.int64]:
    """Token ids of sample k. Raises FatalTrainingError if one of them is none of a vocabulary of this size.

    The padding of an embedding would take some without a word, and a GPU says of the others only that it failed.
    """
    ids = order.sample(k)
    check_row(SampleRow(tokens=ids), order, k, vocabulary_size)
    return ids


def check_row(row: SampleRow, order: SampleSource, k: int, vocabulary_size: int | None) -> SampleRow:
    """Return the row, which is sample k. Raises FatalTrainingError as `check_token_ids`."""
    tokens = row.tokens
    if vocabulary_size is not None and (tokens.max() >= vocabulary_size or tokens.min() < 0):
        wrong = int(tokens[(tokens >= vocabulary_size) | (tokens < 0)][0])
        raise FatalTrainingError(
            f"sample {k} of {order.name!r} holds the token id {wrong}, which is beyond the vocabulary of "
            f"{vocabulary_size}",
            hint="scripts/tools/verify_dataset.py names the shard; tokenize it with the tokenizer of data.tokenizer",
        )
    return row


class BatchReader(Iterator[Batch]):
    """Endless iterator over the share of one data-parallel rank, beginning at `consumed_samples`.

    Raises ConfigError if a batch size still to come is no multiple of micro_batch_size x data_parallel_size.
    An error of the reading thread is raised by `next`, after the iterations that were read whole before it.
    Call `close` (or use it as a context manager) to end the thread.
    """

    def __init__(
        self,
        order: SampleSource,
        *,
        data_parallel_rank: int,
        data_parallel_size: int,
        micro_batch_size: int,
        batch_sizes: BatchSizes,
        consumed_samples: int,
        vocabulary_size: int | None = None,
    ) -> None:
        """`vocabulary_size`: what every token id must be below; None where nothing is known of it."""
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data-parallel rank {data_parallel_rank} of {data_parallel_size}")
        if micro_batch_size < 1 or consumed_samples < 0:
            raise ValueError(
                f"micro_batch_size must be positive and consumed_samples not negative, not "
                f"{micro_batch_size}, {consumed_samples}"
            )
        if (stage := batch_sizes.indivisible(micro_batch_size * data_parallel_size, consumed_samples)) is not None:
            raise ConfigError(
                f"{stage} is no multiple of micro_batch_size x data-parallel size = "
                f"{micro_batch_size} x {data_parallel_size}"
            )
        self.consumed_samples = consumed_samples
        """Number of the first sample that `next` has not returned yet, over all ranks."""
        self._order = order
        self._rank = data_parallel_rank
        self._size = data_parallel_size
        self._micro_batch_size = micro_batch_size
        self._batch_sizes = batch_sizes
        self._vocabulary_size = vocabulary_size
        self._queue: Queue[Batch | BaseException] = Queue(PREFETCHED_ITERATIONS)
        self._error: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(
            target=self._read_ahead, args=(consumed_samples,), daemon=True, name=f"batches-{order.name}"
        )
        self._thread.start()

    def __next__(self) -> Batch:
        if self._closing.is_set():
            raise RuntimeError("this BatchReader is closed")
        if self._error is None:
            item = self._queue.get()
            if not isinstance(item, BaseException):
                self.consumed_samples += self._batch_sizes.at(self.consumed_samples)
                return item
            self._error = item
        raise self._error

    def close(self) -> None:
        """End the thread. A read that hangs in the file system is left alone after 10 s: the thread is a daemon."""
        self._closing.set()
        try:
            while True:  # room for what the thread is about to put; it looks at `_closing` after that
                self._queue.get_nowait()
        except Empty:
            self._thread.join(CLOSE_SECONDS)
        if (close := getattr(self._order, "close", None)) is not None:
            close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _read_ahead(self, consumed: int) -> None:
        try:
            while not self._closing.is_set():
                self._queue.put(self._read(consumed))
                consumed += self._batch_sizes.at(consumed)
        except BaseException as error:
            self._queue.put(error)

    def _row(self, k: int) -> SampleRow:
        row = getattr(self._order, "row", None)
        found = SampleRow(tokens=self._order.sample(k)) if row is None else row(k)
        return check_row(found, self._order, k, self._vocabulary_size)

    def _read(self, consumed: int) -> Batch:
        numbers, step = self._numbers(consumed, consumed + self._batch_sizes.at(consumed)), self._micro_batch_size
        return [RowBatch.of([self._row(k) for k in numbers[at : at + step]]) for at in range(0, len(numbers), step)]

    def _numbers(self, first: int, end: int) -> Sequence[int]:
        """The samples of this rank, of those from `first` to below `end`."""
        if (own := getattr(self._order, "numbers", None)) is not None:
            numbers: Sequence[int] = own(first, end)
            return numbers
        size = self._micro_batch_size
        starts = range(first + self._rank * size, end, self._size * size)
        return [k for start in starts for k in range(start, start + size)]


class TrainingProgress:
    """Iterations done, samples consumed, and the legs in which that came about."""

    def __init__(
        self,
        sizes: BatchSizes,
        *,
        iteration: int = 0,
        consumed_samples: int = 0,
        legs: Sequence[IterationRange] = (),
        skipped: Sequence[int] = (),
    ) -> None:
        """Make the progress of a run that stands at `iteration` and goes on with `sizes`; `legs` are its past."""
        self.iteration = iteration
        self.consumed_samples = consumed_samples
        self.legs = [*legs] or [IterationRange(0, 0, sizes)]
        self.skipped = [*skipped]
        """Iterations whose update was left out, rising; their samples are consumed."""
        if self.legs[-1].sizes != sizes or self.legs[-1].consumed(iteration) != consumed_samples:
            self._begin_leg(sizes)

    @property
    def batch_size(self) -> int:
        """Samples of the next iteration."""
        return self.legs[-1].sizes.at(self.consumed_samples)

    def advance(self, *, skipped: bool = False) -> None:
        """One iteration more, with its update or without."""
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
        """Iterations done when this many samples were consumed: as it was, and as it will be with the present sizes."""
        for leg, after in pairwise(self.legs):
            if samples <= after.consumed_samples:
                return min(leg.reaches(samples), after.iteration)
        return self.legs[-1].reaches(samples)

    def iteration_of(self, sample: int) -> int | None:
        """The iteration (counted from 1) that trains on a sample; None if it was passed over."""
        if any(first <= sample < end for first, end in self.passed_over):
            return None
        return self.reaches(sample + 1)

    @property
    def passed_over(self) -> list[tuple[int, int]]:
        """Samples that were consumed and not trained on, as (first, end)."""
        ends = [0] + [leg.consumed(after.iteration) for leg, after in pairwise(self.legs)]
        return [
            (end, leg.consumed_samples) for end, leg in zip(ends, self.legs, strict=True) if end < leg.consumed_samples
        ]

    @property
    def untrained(self) -> list[tuple[int, int]]:
        """Samples that were consumed and changed no weight, as (first, end): passed over, or of a skipped iteration."""
        found = self.passed_over
        for iteration in self.skipped:
            leg = next(leg for leg in reversed(self.legs) if leg.iteration < iteration)
            found.append((leg.consumed(iteration - 1), leg.consumed(iteration)))
        return sorted(found)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, plain JSON."""
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
    def resume(cls, state: Mapping[str, Any], sizes: BatchSizes) -> Self:
        """Go on from a state with these batch sizes. Raises FatalTrainingError if the state is damaged."""
        try:
            legs = [
                IterationRange(entry["iteration"], entry["consumed_samples"], BatchSizes.from_json(entry))
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

    def _begin_leg(self, sizes: BatchSizes) -> None:
        """From here on; a leg that would begin at this iteration or later never trained, and is dropped."""
        self.legs = [leg for leg in self.legs if leg.iteration < self.iteration]
        last = self.legs[-1] if self.legs else None
        if last is None or last.sizes != sizes or last.consumed(self.iteration) != self.consumed_samples:
            self.legs.append(IterationRange(self.iteration, self.consumed_samples, sizes))
