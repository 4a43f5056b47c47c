"""How far a run is, and which iteration trained on which samples: closed form over its whole past.

Within a *leg* the iterations follow from the batch sizes of one config alone. A leg begins at an iteration and
a sample: the first one at (0, 0), another one where a checkpoint is resumed with other batch sizes, and where
training went back to a checkpoint and passed over the samples that led to trouble. The samples between the end of
a leg and the begin of the next are those that were passed over: consumed, not trained on.

Kept in every checkpoint, so that what was left out once is left out in every replay. Tiny, plain JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Self

from relayrun.config.sections.rampup import BatchSizes, IterationRange
from relayrun.errors import FatalTrainingError


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
