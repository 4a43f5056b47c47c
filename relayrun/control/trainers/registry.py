"""The trainer that a plan names, and the native trainer.

The native trainer is relayrun's own training program; its rank 0 writes the records itself.
"""

from __future__ import annotations

from collections.abc import Callable
from signal import Signals

from relayrun.config.sections.command import CommandSection
from relayrun.config.sections.dataclass_section import read_section
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import AttemptObserver, Trainer
from relayrun.control.trainers.command import CommandTrainer
from relayrun.control.trainers.megatron_lm import MegatronSettings, MegatronTrainer
from relayrun.errors import RunDirError


class NativeTrainer:
    """`python -m relayrun.train`; every rank reads begin.json, and rank 0 writes the records."""

    leave_signal = Signals.SIGUSR2
    asked_by = (Signals.SIGUSR1, Signals.SIGUSR2)
    lacks_hashes = False  # its ranks write them, and compare what they load

    def __init__(self, plan: Plan) -> None:
        self._program = plan.program

    def prepare(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Do nothing: every rank reads begin.json."""
        del base, attempt
        return []

    def command(self, begin: AttemptStart) -> list[str]:
        return [*self._program, f"--attempt={begin.attempt}"]

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """Keep `python -m` from finding a checkout in its working directory before the snapshot."""
        del begin
        return {"PYTHONSAFEPATH": "1"}

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> AttemptObserver | None:
        """Return None: rank 0 writes the records."""
        del begin, signal_ranks
        return None


def trainer_of(plan: Plan, run: Run) -> Trainer:
    """Return the trainer of a plan. Raises RunDirError if this version does not know it."""
    try:
        match plan.trainer:
            case "native":
                return NativeTrainer(plan)
            case "command":
                settings = read_section(CommandSection, plan.trainer_settings, "command")
                return CommandTrainer(run, settings, total_steps=plan.total_steps)
            case "megatron-lm":
                return MegatronTrainer(run, MegatronSettings.of(plan.trainer_settings))
    except (TypeError, ValueError) as error:
        raise RunDirError(f"unreadable settings of the trainer {plan.trainer}: {error}", where=run.plan) from None
    raise RunDirError(f"no trainer is called {plan.trainer!r}", where=run.plan, hint="update relayrun")
