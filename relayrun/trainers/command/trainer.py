"""A program of the user's own under the chain: how it is started, asked and followed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from signal import Signals

from relayrun import client
from relayrun.rundir.lineage import Durable
from relayrun.rundir.records import AttemptStart, Record
from relayrun.rundir.run import Run
from relayrun.trainers.base import Observing
from relayrun.trainers.command.checkpoints import CheckpointRule
from relayrun.trainers.command.program import CommandProgram
from relayrun.trainers.logs import logs_of
from relayrun.trainers.observer import Observer

PLACEHOLDERS = ("run_dir", "checkpoints", "iteration", "checkpoint")
"""What an attempt fills in where it stands in braces."""


@dataclass(frozen=True, kw_only=True)
class CommandSettings(Record):
    """The section `command` of a run config, as it stands in plan.json: its `checkpoint` is not a section here."""

    run: list[str]
    """Program and arguments. `{run_dir}`, `{checkpoints}` and `{iteration}` (to go on from) are filled in."""
    resume: list[str] = field(default_factory=list)
    """Arguments that are added where there is a checkpoint to go on from; `{checkpoint}` is its path."""
    pattern: str | None = None
    """Name of a checkpoint below `{checkpoints}`, with `{iteration}`; None: the program says them by the client."""
    whole_when: str | None = None
    """A file in it that is written last; None: nothing is, and without a tracker it is published by a rename."""
    tracker: str | None = None
    """A file beside the checkpoints that names the newest whole one, by its iteration or its name."""
    progress: str | None = None
    """Regular expression of a line of progress; None: the program says its steps by the client."""
    save_signal: str | None = None
    """Signal that asks for a checkpoint; None: the client alone hears of it."""
    leave_signal: str | None = "SIGUSR2"
    """Signal that asks to save and leave; None: the client alone hears of it."""


class Command:
    """What the settings make of an attempt."""

    def __init__(self, run: Run, settings: CommandSettings) -> None:
        self._run = run
        self._settings = settings

    @property
    def leave_signal(self) -> Signals | None:
        """The signal on which every rank saves and leaves."""
        name = self._settings.leave_signal
        return None if name is None else Signals[name]

    def prepare(self, base: Durable, *, attempt: int) -> list[str]:
        """Move what lies beyond the base out of the program's sight; make the folder of the client."""
        self._run.checkpoints.mkdir(exist_ok=True)
        self._run.attempt(attempt).client.mkdir(exist_ok=True)
        rule = self._rule()
        return [] if rule is None else rule.prepare(base=base.iteration, attempt=attempt)

    def command(self, begin: AttemptStart) -> list[str]:
        """The program with the names of this attempt filled in."""
        words = [*self._settings.run, *(self._settings.resume if begin.base_path is not None else ())]
        values = (str(self._run.path), str(self._run.checkpoints), str(begin.base_iteration), begin.base_path or "")
        names = dict(zip(PLACEHOLDERS, values, strict=True))
        return [re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), word) for word in words]

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """What `relayrun.client` reads."""
        attempt = self._run.attempt(begin.attempt)
        found = {client.FOLDER: str(attempt.client), client.STOP: str(attempt.stop)}
        return found if begin.base_path is None else found | {client.CHECKPOINT: begin.base_path}

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> Observing | None:
        """An observer of its log and its files."""
        settings, attempt = self._settings, self._run.attempt(begin.attempt)
        save = None if settings.save_signal is None else partial(signal_ranks, Signals[settings.save_signal])
        program = CommandProgram(
            client=attempt.client,
            folder=self._run.checkpoints,
            logs=logs_of(begin),
            progress=None if settings.progress is None else re.compile(settings.progress),
            rule=self._rule(),
            save=save,
            asked_to_leave=attempt.stop.exists,
        )
        leave = (lambda: None) if self.leave_signal is None else partial(signal_ranks, self.leave_signal)
        return Observer(self._run, attempt, begin, program, leave=leave)

    def _rule(self) -> CheckpointRule | None:
        settings = self._settings
        if settings.pattern is None:
            return None
        return CheckpointRule(
            folder=self._run.checkpoints,
            pattern=settings.pattern,
            whole_when=settings.whole_when,
            tracker=settings.tracker,
        )
