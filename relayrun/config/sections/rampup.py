"""The global batch size as a pure function of the samples that were consumed before, and its iterations.

Megatron's `--rampup-batch-size START INCREMENT SAMPLES`: from START to global_batch_size in steps of
INCREMENT, which are spread evenly over the first SAMPLES samples
(megatron-core 0.16.1, num_microbatches_calculator.py:353), here in exact integers. The other form,
`[[SIZE, SAMPLES], ...]`, lists the stages: SIZE until SAMPLES samples are consumed.

An iteration has the size of the stage in which it begins; it may end beyond that stage, and the next one begins there.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any


@dataclass(frozen=True, kw_only=True)
class BatchSizeStage:
    """A batch size, from a number of consumed samples on."""

    first: int
    size: int

    def __str__(self) -> str:
        return f"global batch size {self.size} from sample {self.first:,} on"


@dataclass(frozen=True, kw_only=True)
class SameSizeIterations:
    """Iterations of one size, one after the other."""

    iteration: int
    """Iterations of other sizes that are done before the first one of these."""
    consumed_samples: int
    """Samples that are consumed before the first of these iterations."""
    size: int


class BatchSizes:
    """The batch sizes of a config: those of its ramp, then `global_batch_size`.

    Raises ValueError for a ramp that has neither of the two forms, or does not rise.
    """

    def __init__(self, global_batch_size: int, rampup: Sequence[Any] | None = None) -> None:
        self.global_batch_size = global_batch_size
        self.rampup = rampup
        self.stages = _batch_size_stages(global_batch_size, rampup)
        self._firsts = [stage.first for stage in self.stages]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BatchSizes) and self.stages == other.stages

    def __hash__(self) -> int:
        return hash(self.stages)

    def at(self, consumed_samples: int) -> int:
        """Samples of the iteration that begins with `consumed_samples` consumed."""
        return self.stages[bisect_right(self._firsts, consumed_samples) - 1].size

    def stages_from(self, consumed_samples: int) -> tuple[BatchSizeStage, ...]:
        """The stages that an iteration at or after this sample can have."""
        return self.stages[bisect_right(self._firsts, consumed_samples) - 1 :]

    def indivisible(self, by: int, consumed_samples: int = 0) -> BatchSizeStage | None:
        """The first stage still to come whose size is no multiple of `by`."""
        return next((stage for stage in self.stages_from(consumed_samples) if stage.size % by), None)

    def runs(self, iteration: int, consumed_samples: int) -> list[SameSizeIterations]:
        """All iterations from this one on, by size; the last run has no end. Short stages may be missing."""
        found = []
        for stage, after in pairwise(self.stages):
            if consumed_samples < after.first:
                found.append(
                    SameSizeIterations(iteration=iteration, consumed_samples=consumed_samples, size=stage.size)
                )
                steps = -((consumed_samples - after.first) // stage.size)
                iteration += steps
                consumed_samples += steps * stage.size
        found.append(
            SameSizeIterations(iteration=iteration, consumed_samples=consumed_samples, size=self.global_batch_size)
        )
        return found

    def reaches(self, samples: int) -> int:
        """Iterations done when a run that has these sizes from its beginning has consumed this many samples."""
        return IterationRange(0, 0, self).reaches(samples)

    def consumed_by(self, iteration: int) -> int:
        """Samples that a run which has these sizes from its beginning has consumed after so many iterations."""
        return IterationRange(0, 0, self).consumed(iteration)

    def to_json(self) -> dict[str, Any]:
        return {"global_batch_size": self.global_batch_size, "rampup_batch_size": self.rampup}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> BatchSizes:
        return cls(value["global_batch_size"], value["rampup_batch_size"])


@dataclass(frozen=True)
class IterationRange:
    """Iterations of one config, without a gap between their samples."""

    iteration: int
    """Iterations done before the leg."""
    consumed_samples: int
    """Number of the leg's first sample."""
    sizes: BatchSizes

    @cached_property
    def _runs(self) -> list[SameSizeIterations]:
        return self.sizes.runs(self.iteration, self.consumed_samples)

    def consumed(self, iteration: int) -> int:
        """Consumed samples when `iteration` iterations are done; not for one before the leg."""
        run = self._runs[bisect_right(self._runs, iteration, key=lambda run: run.iteration) - 1]
        return run.consumed_samples + (iteration - run.iteration) * run.size

    def reaches(self, samples: int) -> int:
        """Iterations done when the leg has consumed this many samples, counted from the run's beginning."""
        at = max(0, bisect_left(self._runs, samples, key=lambda run: run.consumed_samples) - 1)
        run = self._runs[at]
        return run.iteration + max(0, -((run.consumed_samples - samples) // run.size))


def _batch_size_stages(last: int, rampup: Sequence[Any] | None) -> tuple[BatchSizeStage, ...]:
    if rampup is None:
        return (BatchSizeStage(first=0, size=last),)
    if not _are_positive_integers(rampup) and not (
        rampup and all(_are_positive_integers(part) and len(part) == 2 for part in rampup)
    ):
        raise ValueError(
            f"{rampup!r} is neither [start, increment, samples] nor [[size, samples], ...], all integers above 0"
        )
    if not _are_positive_integers(rampup):
        ends = [samples for _, samples in rampup]
        if any(a >= b for a, b in pairwise(ends)):
            raise ValueError(f"the samples at which its stages end must rise, not be {ends}")
        sizes = [*(size for size, _ in rampup), last]
        return tuple(BatchSizeStage(first=first, size=size) for first, size in zip([0, *ends], sizes, strict=True))
    if len(rampup) != 3:
        raise ValueError(f"[start, increment, samples] has 3 numbers, not {len(rampup)}")
    start, increment, samples = rampup
    if start >= last or (last - start) % increment:
        raise ValueError(f"start {start} must be below global_batch_size {last} by a multiple of increment {increment}")
    count = (last - start) // increment
    by_first = {-(-number * samples // count): start + number * increment for number in range(count + 1)}
    return tuple(BatchSizeStage(first=first, size=size) for first, size in by_first.items())


def _are_positive_integers(value: object) -> bool:
    return (
        isinstance(value, list | tuple)
        and bool(value)
        and all(isinstance(item, int) and not isinstance(item, bool) and item > 0 for item in value)
    )
