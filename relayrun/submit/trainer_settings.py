"""What a config tells its trainer: from its sections to `trainer_settings` of plan.json."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relayrun.config.schema import CommandConfig, CommonConfig, MegatronConfig, RunConfig
from relayrun.errors import ConfigError
from relayrun.rundir.run import Run
from relayrun.trainers.command.trainer import CommandSettings
from relayrun.trainers.megatron_lm.program import dialect_of
from relayrun.trainers.megatron_lm.trainer import MegatronSettings


def trainer_settings(config: CommonConfig, run: Run) -> dict[str, Any]:
    """Return the settings of the config's trainer, as its class in `relayrun.trainers` reads them; {} for native.

    Raises ConfigError.
    """
    if isinstance(config, CommandConfig):
        return asdict(command_settings(config))
    if isinstance(config, MegatronConfig):
        return asdict(megatron_settings(config, run))
    return {}


def total_steps(config: CommonConfig, settings: dict[str, Any]) -> int | None:
    """Return the run's last iteration; None where only its program knows it. `settings`: those of its trainer."""
    if isinstance(config, RunConfig):
        return config.training.steps
    if isinstance(config, CommandConfig):
        return config.command.steps
    return int(settings["total_steps"])


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


def megatron_settings(config: MegatronConfig, run: Run) -> MegatronSettings:
    """Return the command of Megatron-LM's ranks without the folders that an attempt decides.

    Raises ConfigError where the checkout cannot be read, or nothing says how long it trains.
    """
    del run
    own = config.megatron_lm
    try:
        dialect = dialect_of(Path(own.dir))
    except OSError as error:
        raise ConfigError(
            f"{own.dir} is no checkout of Megatron-LM: {error.filename}: {error.strerror}",
            where="megatron_lm.dir",
            hint="set it, or MEGATRON_LM_DIR in the launcher, to a checkout of Megatron-LM",
        ) from None
    steps = own.args.get("train-iters", None if config.training is None else config.training.steps)
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(
            "nothing says how many iterations this run has",
            where="training.steps",
            hint="set training.steps, or train-iters in megatron_lm.args",
        )
    program = str(Path(own.dir) / own.program)
    flags = [word for name, value in own.args.items() for word in _flag(name, value)]
    return MegatronSettings(
        run=[config.cluster.python or sys.executable, program, *flags], dialect=dialect.value, total_steps=steps
    )


def _flag(name: str, value: Any) -> list[str]:
    """A flag as the words of a command line."""
    if isinstance(value, bool):
        return [f"--{name}"] if value else []
    return [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
