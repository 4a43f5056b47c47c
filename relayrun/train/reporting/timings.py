"""How long steps, evaluations and saves take on this rank, and the lead that follows from it.

A run changes its speed, so only the newest measurements count. Saves of earlier attempts count until this
one has made enough of its own. Standard library only.
"""

from __future__ import annotations

from collections import deque

from relayrun.control.rundir.lead import GRACE_SAVES, GRACE_STEPS, current_grace_period, percentile
from relayrun.control.rundir.records import AttemptStart, CheckpointCommit
from relayrun.train.hooks import Hook, Step, ValidationResult


class Timings(Hook):
    """Seconds of the last steps, evaluations and saves on this rank."""

    def __init__(self, begin: AttemptStart) -> None:
        self._begin = begin
        self._steps: deque[float] = deque(maxlen=GRACE_STEPS)
        self.steps_done = 0
        """Steps that were measured since this rank started."""
        self._samples = 0
        self._saves: deque[float] = deque(maxlen=GRACE_SAVES)
        known = [] if begin.evaluation_seconds is None else [begin.evaluation_seconds]
        self._evaluations: deque[float] = deque(known, maxlen=GRACE_SAVES)
        self._evaluated_samples = 0

    def after_step(self, step: Step) -> None:
        self.step(step.step_seconds + (step.hooks_seconds or 0.0), step.global_batch_size)

    def after_save(self, commit: CheckpointCommit) -> None:
        self.save(commit.seconds)

    def at_evaluation(self, result: ValidationResult) -> None:
        self.evaluation(result.seconds)

    def step(self, seconds: float, samples: int) -> None:
        """A step with this global batch size; the steps of smaller ones before it count as if they had had this one."""
        if samples > self._samples:
            if self._samples:
                self._steps = deque((old * samples / self._samples for old in self._steps), maxlen=GRACE_STEPS)
            self._samples = samples
        self._steps.append(seconds)
        self.steps_done += 1

    def save(self, seconds: float) -> None:
        """A save took so long, from its start to its commit; those of earlier attempts come first."""
        self._saves.append(seconds)

    def evaluation(self, seconds: float) -> None:
        """An evaluation took so many seconds, all validation sets together."""
        self._evaluations.append(seconds)

    def expect_evaluation(self, samples: int) -> None:
        """There will be evaluations, of this many samples over all validation sets."""
        self._evaluated_samples = samples

    @property
    def estimates_evaluation(self) -> bool:
        """Whether the lead has room for an evaluation although the run has measured none."""
        return bool(self._evaluated_samples and self._steps and not self._evaluations)

    @property
    def step_median(self) -> float | None:
        return percentile(self._steps, 0.5) if self._steps else None

    @property
    def step_p95(self) -> float | None:
        return percentile(self._steps, 0.95) if self._steps else None

    @property
    def step_p99(self) -> float | None:
        return percentile(self._steps, 0.99) if self._steps else None

    @property
    def save_p95(self) -> float | None:
        return percentile(self._saves, 0.95) if self._saves else None

    def lead(self, *, under_way: float | None = None) -> float:
        """Seconds before the end of the job at which to leave; what the attempt began with until steps and saves
        are measured (with room for an evaluation), and for good where its bounds leave no choice.

        `under_way`: seconds since the start of a save that is not over.
        """
        estimate = self._estimated_evaluation() if self.estimates_evaluation else 0.0
        return current_grace_period(
            self._begin,
            self._steps,
            self._saves,
            under_way=under_way,
            evaluation_seconds=self._evaluations,
            estimate=estimate,
        )

    def _estimated_evaluation(self) -> float:
        """Half a step for each batch: a forward pass is a third of a step's work, and the first one is slow."""
        return self._evaluated_samples / self._samples * percentile(self._steps, 0.95) / 2
