"""The trainer that a plan names."""

from __future__ import annotations

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import Trainer
from relayrun.control.trainers.command import CommandSettings, CommandTrainer
from relayrun.control.trainers.megatron_lm_trainer import MegatronSettings, MegatronTrainer
from relayrun.control.trainers.native import NativeTrainer
from relayrun.errors import RunDirError


def trainer_of(plan: Plan, run: Run) -> Trainer:
    """Raises RunDirError for one that this version does not know."""
    try:
        match plan.trainer:
            case "native":
                return NativeTrainer(plan)
            case "command":
                return CommandTrainer(run, CommandSettings.of(plan.trainer_settings), total_steps=plan.total_steps)
            case "megatron-lm":
                return MegatronTrainer(run, MegatronSettings.of(plan.trainer_settings))
    except (TypeError, ValueError) as error:
        raise RunDirError(f"unreadable settings of the trainer {plan.trainer}: {error}", where=run.plan) from None
    raise RunDirError(f"no trainer is called {plan.trainer!r}", where=run.plan, hint="update relayrun")
