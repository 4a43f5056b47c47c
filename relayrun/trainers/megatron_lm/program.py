"""One attempt of Megatron-LM, followed by its log and its folder of checkpoints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from signal import Signals

from relayrun.trainers.base import Ending, FoundCheckpoint, ObservedStep
from relayrun.trainers.megatron_lm import checkpoints
from relayrun.trainers.megatron_lm.log_line import parse_save, parse_step
from relayrun.trainers.new_lines import NewLines


class Dialect(Enum):
    """The two families of checkouts, as far as a chain sees them."""

    SWISS_AI = "swiss-ai"
    """It has `--trigger-path`, and leaves on SIGUSR2."""
    NVIDIA = "nvidia"
    """It has no triggers, and leaves on SIGTERM."""

    @property
    def leave_signal(self) -> Signals:
        """On which it saves and leaves, with `--exit-signal-handler`."""
        return Signals.SIGUSR2 if self is Dialect.SWISS_AI else Signals.SIGTERM


LEFT = "exiting program after receiving "
"""What both print when they have saved because of the signal."""

CANNOT = "An error has been detected; Canceling pending scheduled jobs."
"""What swiss-ai prints before a failed check of its data is raised."""

_REFUSED = re.compile(
    r"\.py: error: ((?:unrecognized arguments|argument --|ambiguous option|the following arguments are required).*)"
)
"""What argparse prints of flags that it does not know, or whose values it cannot read, with the end of each rank."""


def dialect_of(checkout: Path) -> Dialect:
    """Which dialect a checkout speaks, by the text of its arguments. Raises OSError where that cannot be read."""
    arguments = checkout / "megatron" / "training" / "arguments.py"
    text = arguments.read_text(encoding="utf-8", errors="replace")
    return Dialect.SWISS_AI if "--trigger-path" in text else Dialect.NVIDIA


class MegatronLM:
    """What Megatron-LM says and leaves on disk.

    Args:
        dialect: of the checkout.
        logs: files with what the ranks print, each with the bytes that it had before the attempt.
        folder: `--save` and `--load`, with the tracker.
        trigger_folder: `--trigger-path`, which only this attempt's program looks at.
        total_steps: `--train-iters`.
    """

    def __init__(
        self,
        *,
        dialect: Dialect,
        logs: Sequence[tuple[str, int]],
        folder: Path,
        trigger_folder: Path,
        total_steps: int,
    ) -> None:
        self._dialect = dialect
        self._lines = [NewLines(path, offset=offset) for path, offset in logs]
        self._folder = folder
        self._trigger_folder = trigger_folder
        self._total_steps = total_steps
        self._newest = 0
        self._said_to_save: int | None = None
        self._ending: Ending | None = None

    def steps(self) -> list[ObservedStep]:
        """The iterations that it has said since the last call, rising; from its beginning for the first call."""
        found = []
        for lines in self._lines:
            for line in lines.read():
                if (step := parse_step(line)) is not None:
                    if step.iteration > self._newest:
                        found.append(step)
                        self._newest = step.iteration
                elif (iteration := parse_save(line)) is not None:
                    self._said_to_save = iteration
                else:
                    self._ending = _ending(line) or self._ending
        return found

    def checkpoints(self) -> list[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""
        return checkpoints.whole(self._folder)

    def saving(self) -> int | None:
        """The iteration of a checkpoint that it has begun and not finished."""
        begun = self._said_to_save
        return begun if begun is not None and begun > (checkpoints.tracked(self._folder) or 0) else None

    def ask_to_save(self) -> str | None:
        """Touch its own trigger, which it removes itself. Returns why it cannot save now, in words."""
        if self._dialect is not Dialect.SWISS_AI:
            return "this Megatron-LM has no way to be asked for a checkpoint; set checkpoint.interval"
        self._trigger_folder.mkdir(parents=True, exist_ok=True)
        (self._trigger_folder / "save").touch()
        return None

    def ending(self, exit_code: int | None) -> Ending | None:
        """How it ended, by what it said and saved; its forks' exit codes tell nothing."""
        del exit_code
        durable = checkpoints.whole(self._folder)
        if durable and durable[-1].iteration >= self._total_steps:
            return Ending(outcome="done", words=f"the last iteration, {durable[-1].iteration}, is saved")
        return self._ending


def _ending(line: str) -> Ending | None:
    if LEFT in line:
        name = line.partition(LEFT)[2].split(".")[0].strip()
        return Ending(outcome="left", words=name)
    if CANNOT in line:
        return Ending(outcome="fatal", words="Megatron-LM refuses its data (see the log): it would do so again")
    if (refused := _REFUSED.search(line)) is not None:
        return Ending(outcome="fatal", words=f"Megatron-LM refuses its flags: {refused[1]}")
    return None
