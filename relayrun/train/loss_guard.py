"""What to do with an iteration whose loss is no number, or a spike; decided before the update, on all ranks alike.

A spike: the loss is above the median of the last `spike_window` losses by more than `spike_threshold` times their
median absolute deviation. Median and deviation are hardly moved by single bad values, and losses of skipped
iterations are not among them. Before the window is full nothing is a spike.

What is remembered goes into every checkpoint, so that a replay comes to the same decisions. No torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from relayrun.config.compose.schema import TrainingSection
from relayrun.train.hooks import Action, Gradients, Hook, Step, UpdateVerdict

_BY_NAME = {"ignore": Action.UPDATE, "skip": Action.SKIP, "rewind": Action.REWIND, "stop": Action.STOP}


class LossGuard(Hook):
    """Judges the iterations of a run, one after the other."""

    name = "guard"

    def __init__(self, settings: TrainingSection) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._skipped = 0
        """Iterations skipped in a row, up to now."""
        self.rewinds = 0
        """How many times training went back to a checkpoint, in the whole run."""

        # stopping needs no agreement
        self.may_differ = {settings.on_nan, settings.on_spike} & {"skip", "rewind"} != set()

    def before_update(self, gradients: Gradients) -> UpdateVerdict:
        return self.judge(gradients.loss, gradients.grad_norm)

    def after_step(self, step: Step) -> None:
        """Before a rewind or a stop the iteration counts as skipped, and what was remembered of it is not kept."""
        self.took(Action.UPDATE if step.skipped is None else Action.SKIP, step.loss)

    def judge(self, loss: float, grad_norm: float) -> UpdateVerdict:
        """What to do with an iteration of this loss (nats per token) and norm of the gradient before clipping."""
        settings = self._settings
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self.limited(_BY_NAME[settings.on_nan], f"loss {loss}, gradient norm {grad_norm}")
        if settings.on_spike == "ignore" or len(self._losses) < settings.spike_window:
            return UpdateVerdict(Action.UPDATE)
        middle = statistics.median(self._losses)
        deviation = statistics.median(abs(value - middle) for value in self._losses)
        if loss <= middle + settings.spike_threshold * deviation:
            return UpdateVerdict(Action.UPDATE)
        return self.limited(
            _BY_NAME[settings.on_spike],
            f"loss {loss:.4f} is a spike: the last {settings.spike_window} have the median {middle:.4f} and the "
            f"median deviation {deviation:.4f}",
        )

    def took(self, action: Action, loss: float) -> None:
        """What the ranks agreed on."""
        if action is Action.UPDATE:
            self._skipped = 0
            if math.isfinite(loss):
                self._losses.append(loss)
        elif action is Action.SKIP:
            self._skipped += 1

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "skipped": self._skipped, "rewinds": self.rewinds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._settings.spike_window)
        self._skipped, self.rewinds = state["skipped"], state["rewinds"]

    def limited(self, action: Action, reason: str | None) -> UpdateVerdict:
        """The verdict of this action, or a stop where there were as many of its kind as are allowed."""
        settings = self._settings
        if action is Action.SKIP and self._skipped >= settings.max_skips:
            return UpdateVerdict(Action.STOP, f"{reason}; {self._skipped} iterations before it were skipped in a row")
        if action is Action.REWIND and self.rewinds >= settings.max_rewinds:
            return UpdateVerdict(Action.STOP, f"{reason}; the run was rewound {self.rewinds} times before")
        return UpdateVerdict(action, reason)
