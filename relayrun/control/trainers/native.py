"""The training program of relayrun: it writes its records itself, and falls back to another checkpoint itself."""

from __future__ import annotations

from collections.abc import Callable
from signal import Signals

from relayrun.control.rundir.lineage import ResumePoint
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.trainers.base import AttemptObserver


class NativeTrainer:
    """`python -m relayrun.train`, as the plan has it."""

    leave_signal = Signals.SIGUSR2
    asked_by = (Signals.SIGUSR1, Signals.SIGUSR2)

    def __init__(self, plan: Plan) -> None:
        self._program = plan.program

    def prepare(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Nothing: every rank reads begin.json."""
        del base, attempt
        return []

    def command(self, begin: AttemptStart) -> list[str]:
        """What a rank of this attempt executes."""
        return [*self._program, f"--attempt={begin.attempt}"]

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """What keeps `python -m` from finding the checkout in its working directory before a snapshot."""
        del begin
        return {"PYTHONSAFEPATH": "1"}

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> AttemptObserver | None:
        """Nobody: rank 0 writes the records."""
        del begin, signal_ranks
        return None
