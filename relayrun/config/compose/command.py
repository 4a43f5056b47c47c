"""`trainer: command`: a program of the user's own, and what a chain needs to know of it."""

from __future__ import annotations

import re
from signal import Signals
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from relayrun.config.compose.common import CommonConfig
from relayrun.config.sections.base import OutputPath, Positive, Section, SingleLine

UNCATCHABLE_SIGNALS = ("SIGKILL", "SIGSTOP")
"""Signals that no program hears."""


def _signal(name: str) -> str:
    if name not in Signals.__members__:
        raise ValueError(f"{name!r} is no signal; write one as SIGUSR1, SIGUSR2 or SIGTERM")
    if name in UNCATCHABLE_SIGNALS:
        raise ValueError(f"no program hears {name}; SIGUSR1, SIGUSR2 or SIGTERM can be heard")
    return name


def _progress(pattern: str) -> str:
    try:
        groups = re.compile(pattern).groupindex
    except re.error as error:
        raise ValueError(f"this is no regular expression: {error}") from None
    if "iteration" not in groups:
        raise ValueError(r"it needs a group `iteration`, as in `step (?P<iteration>\d+) loss (?P<loss>\S+)`")
    return pattern


def _pattern(name: str) -> str:
    if name.count("{iteration}") != 1:
        raise ValueError("it needs {iteration} once, as in `checkpoint-{iteration}`")
    return _entry(name)


def _entry(name: str) -> str:
    """The name of something directly in the run's folder of checkpoints."""
    if "/" in name or name in (".", ".."):
        raise ValueError("this is the name of an entry of the run's folder of checkpoints, without a /")
    return name


def _below(path: str) -> str:
    if path.startswith("/") or ".." in path.split("/"):
        raise ValueError("this is a file within the checkpoint's folder, by its path from there")
    return path


SignalName = Annotated[str, AfterValidator(_signal)]


class CommandCheckpointSection(Section):
    """Which entries of the run's folder of checkpoints count. Without `pattern` the program says them by the client."""

    pattern: Annotated[SingleLine, AfterValidator(_pattern)] | None = None
    """Name of a checkpoint, a file or a folder, with `{iteration}` for its number: `checkpoint-{iteration}`."""
    whole_when: Annotated[SingleLine, AfterValidator(_below)] | None = None
    """A file in it that is written last. Without it, and without a tracker, the name itself must come last: write
    elsewhere, then rename."""
    tracker: Annotated[SingleLine, AfterValidator(_entry)] | None = None
    """A file beside the checkpoints that names the newest whole one, by its iteration or its name, and is written
    behind it."""

    keep_last: Positive | None = None
    """The chain keeps so many of the newest and removes older ones. None: the program itself sees to that; what it
    removes, the chain does not miss."""

    @model_validator(mode="after")
    def _of_pattern(self) -> Self:
        for name in ("whole_when", "tracker"):
            if getattr(self, name) is not None and self.pattern is None:
                raise ValueError(f"{name} needs `pattern`, which says what a checkpoint is called")
        return self


class CommandSection(Section):
    """The program that every rank executes, and how it is followed and asked (docs/command.md)."""

    run: Annotated[list[SingleLine], Field(min_length=1)]
    """Program and arguments, word by word, without a shell. Filled in: `{python}` (cluster.python, or the Python that
    submits), `{run_dir}`, `{checkpoints}` (the folder for them) and `{iteration}` (to go on from, or 0)."""
    resume: list[SingleLine] = []
    """Arguments that are added where there is a checkpoint to go on from; `{checkpoint}` is its path."""
    checkpoint: CommandCheckpointSection = CommandCheckpointSection()
    progress: Annotated[str, AfterValidator(_progress)] | None = None
    """Regular expression of a line that the program prints for an iteration, with a group `iteration`; the numbers of
    other groups are metrics. None: the program says its iterations by the client."""
    progress_file: SingleLine | None = None
    """A file to which it appends a line of JSON for an iteration, with `iteration`, `step` or `global_step` and other
    numbers, which are metrics; below the run's directory, or `{checkpoints}/...`."""
    save_signal: SignalName | None = None
    """Signal on which it saves and goes on; None: it hears of it by the client or `save_file` alone."""
    save_file: OutputPath | None = None
    """A file, named like `progress_file`, whose existence asks for a checkpoint; the program removes it."""
    leave_signal: SignalName | None = "SIGUSR2"
    """Signal on which every rank saves and ends with exit code 0; None: it hears of it by the client or `leave_file`
    alone."""
    leave_file: OutputPath | None = None
    """A file, named like `progress_file`, whose existence asks every rank to save and end with exit code 0."""
    steps: Positive | None = None
    """The last iteration. None: it is done when it ends with exit code 0 and nobody has asked it to leave."""

    @model_validator(mode="after")
    def _two_signals(self) -> Self:
        if self.save_signal is not None and self.save_signal == self.leave_signal:
            raise ValueError(f"save_signal and leave_signal are both {self.save_signal}: it could not tell them apart")
        return self


class CommandConfig(CommonConfig):
    """All settings of a run of trainer `command`."""

    trainer: Literal["command"] = "command"
    command: CommandSection

    @model_validator(mode="after")
    def _without_effect(self) -> Self:
        """What the native trainer does within its ranks, nobody does within a program of somebody else's."""
        for name, instead in (
            ("debug.profile", "put the profiler in front of the program in command.run"),
            ("debug.log_nccl", "set NCCL_DEBUG in cluster.environment"),
            ("tracking.tensorboard", "let the program write event files"),
        ):
            section, _, setting = name.partition(".")
            if getattr(getattr(self, section), setting):
                raise ValueError(f"{name} has no effect with trainer command; {instead}")
        return self
