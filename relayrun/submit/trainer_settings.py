"""What a config tells its trainer: from its sections to `trainer_settings` of plan.json."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from relayrun.config.compose.schema import CommandConfig, CommonConfig, MegatronConfig, RunConfig
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.command import CommandSettings
from relayrun.submit.megatron_lm.command_line import command_line


def trainer_settings(config: CommonConfig, run: Run) -> dict[str, Any]:
    """Return the settings of the config's trainer, as its class in `relayrun.control.trainers` reads them; {} for native.

    Raises ConfigError, and InputError where data that a command names are not there.
    """
    if isinstance(config, CommandConfig):
        return asdict(command_settings(config))
    if isinstance(config, MegatronConfig):
        return asdict(command_line(config, run).settings)
    return {}


def total_steps(config: CommonConfig, settings: dict[str, Any]) -> int | None:
    """Return the run's last iteration; None where only its program knows it. `settings`: those of its trainer."""
    if isinstance(config, RunConfig):
        return config.training.steps
    if isinstance(config, CommandConfig):
        return config.command.steps
    return int(settings["total_steps"])


def stop_after(config: CommonConfig) -> int | None:
    """Return the iteration before the last one at which the run is to stop; None where it is to go on."""
    training = config.training if isinstance(config, RunConfig | MegatronConfig) else None
    return None if training is None else training.stop_after


def save_interval(config: CommonConfig) -> int | None:
    """Return the iterations between two saves; None where only the run's program, or a flag of its own, says it."""
    checkpoint = config.checkpoint if isinstance(config, RunConfig | MegatronConfig) else None
    return None if checkpoint is None else checkpoint.interval


def checkpoints_kept(config: CommonConfig) -> int | None:
    """Return how many of the newest checkpoints a rule keeps; None where only the run's program knows it."""
    checkpoint = config.checkpoint if isinstance(config, RunConfig | MegatronConfig) else None
    return None if checkpoint is None else checkpoint.keep_last


def command_settings(config: CommandConfig) -> CommandSettings:
    """Return what the chain needs to know of a program of the user's own."""
    command = config.command
    return CommandSettings(
        run=command_words(config, command.run),
        resume=command_words(config, command.resume),
        progress=command.progress,
        progress_file=command.progress_file,
        save_signal=command.save_signal,
        save_file=command.save_file,
        leave_signal=command.leave_signal,
        leave_file=command.leave_file,
        **command.checkpoint.model_dump(),
    )


def command_words(config: CommandConfig, words: Sequence[str]) -> list[str]:
    """Return words of a command with `{python}` filled in; what an attempt decides is filled in by the trainer."""
    return [word.replace("{python}", config.cluster.python or sys.executable) for word in words]
