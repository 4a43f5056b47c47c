"""Action on an iteration whose loss is not finite or a spike; decided before the update, the same on all ranks.

A spike is a loss above the median of the last `spike_window` losses by more than `spike_threshold` times their median
absolute deviation. Single bad values hardly move both, and losses of skipped iterations are not among them. Until the
window is full there is no spike. The state is part of every checkpoint, so a replay decides the same. No torch.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from relayrun.config.compose.schema import TrainingSection
from relayrun.train.hooks import Action, Gradients, Hook, Step, UpdateVerdict

_BY_NAME = {"ignore": Action.UPDATE, "skip": Action.SKIP, "rollback": Action.ROLLBACK, "stop": Action.STOP}


class LossGuard(Hook):
    """Judges the iterations of a run in their order."""

    name = "guard"

    def __init__(self, settings: TrainingSection) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.spike_window)
        self._skipped = 0
        """Iterations skipped in a row so far."""
        self.rollbacks = 0
        """Rollbacks of the whole run."""

        # stopping needs no agreement
        self.may_differ = {settings.on_nan, settings.on_spike} & {"skip", "rollback"} != set()

    def before_update(self, gradients: Gradients) -> UpdateVerdict:
        return self.judge(gradients.loss, gradients.grad_norm)

    def after_step(self, step: Step) -> None:
        """Record the iteration. Before a rollback or a stop it counts as skipped, and that state is not kept."""
        self.record(Action.UPDATE if step.skipped is None else Action.SKIP, step.loss)

    def judge(self, loss: float, grad_norm: float) -> UpdateVerdict:
        """Return the action for a loss (nats per token) and a gradient norm before clipping."""
        settings = self._settings
        if not (math.isfinite(loss) and math.isfinite(grad_norm)):
            return self.within_limits(_BY_NAME[settings.on_nan], f"loss {loss}, gradient norm {grad_norm}")
        if settings.on_spike == "ignore" or len(self._losses) < settings.spike_window:
            return UpdateVerdict(Action.UPDATE)
        middle = statistics.median(self._losses)
        deviation = statistics.median(abs(value - middle) for value in self._losses)
        if loss <= middle + settings.spike_threshold * deviation:
            return UpdateVerdict(Action.UPDATE)
        return self.within_limits(
            _BY_NAME[settings.on_spike],
            f"loss {loss:.4f} is a spike: the last {settings.spike_window} have the median {middle:.4f} and the "
            f"median deviation {deviation:.4f}",
        )

    def record(self, action: Action, loss: float) -> None:
        """Record the agreed action."""
        if action is Action.UPDATE:
            self._skipped = 0
            if math.isfinite(loss):
                self._losses.append(loss)
        elif action is Action.SKIP:
            self._skipped += 1

    def state_dict(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "skipped": self._skipped, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._settings.spike_window)
        self._skipped, self.rollbacks = state["skipped"], state["rollbacks"]

    def within_limits(self, action: Action, reason: str | None) -> UpdateVerdict:
        """Return a verdict with this action, or a stop if the limit of such actions is reached."""
        settings = self._settings
        if action is Action.SKIP and self._skipped >= settings.max_skips:
            return UpdateVerdict(Action.STOP, f"{reason}; {self._skipped} iterations before it were skipped in a row")
        if action is Action.ROLLBACK and self.rollbacks >= settings.max_rollbacks:
            return UpdateVerdict(Action.STOP, f"{reason}; the run was rolled back {self.rollbacks} times before")
        return UpdateVerdict(action, reason)
