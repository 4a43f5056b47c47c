"""Megatron-LM under the chain: how it is started, asked and followed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals

from relayrun.rundir.lineage import Durable, is_own
from relayrun.rundir.records import AttemptStart, Record
from relayrun.rundir.run import Run
from relayrun.trainers.base import Observing
from relayrun.trainers.logs import logs_of
from relayrun.trainers.megatron_lm import checkpoints
from relayrun.trainers.megatron_lm.program import Dialect, MegatronLM
from relayrun.trainers.observer import Observer


@dataclass(frozen=True, kw_only=True)
class MegatronSettings(Record):
    """The section `megatron_lm` of a run config, as it stands in plan.json."""

    run: list[str]
    """Program and flags, without those of the folders that an attempt decides."""
    dialect: str
    total_steps: int


class MegatronTrainer:
    """What the settings make of an attempt."""

    def __init__(self, run: Run, settings: MegatronSettings) -> None:
        self._run = run
        self._settings = settings
        self._dialect = Dialect(settings.dialect)

    @property
    def leave_signal(self) -> Signals | None:
        """On which it saves and leaves."""
        return self._dialect.leave_signal

    def prepare(self, base: Durable, *, attempt: int) -> list[str]:
        """Let the tracker name the base, and nothing lie beyond it; another run's checkpoint is loaded by its path."""
        self._run.checkpoints.mkdir(exist_ok=True)
        own = base.iteration if is_own(self._run, base) else 0
        return checkpoints.prepare(self._run.checkpoints, base=own, attempt=attempt)

    def command(self, begin: AttemptStart) -> list[str]:
        """The program with its flags and the folders of this attempt."""
        folder = str(self._run.checkpoints)
        base = Durable(iteration=begin.base_iteration, path=begin.base_path)
        load = folder if base.path is None or is_own(self._run, base) else str(Path(base.path).parent)
        words = [*self._settings.run, "--save", folder, "--load", load]
        if load != folder:
            words += ["--ckpt-step", str(begin.base_iteration)]
        if self._dialect is Dialect.SWISS_AI:
            words += ["--trigger-path", str(self._triggers(begin))]
        return words

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """None of its own."""
        del begin
        return {}

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> Observing | None:
        """An observer of its log and its checkpoints."""
        program = MegatronLM(
            dialect=self._dialect,
            logs=logs_of(begin),
            folder=self._run.checkpoints,
            trigger_folder=self._triggers(begin),
            total_steps=self._settings.total_steps,
        )
        return Observer(
            self._run,
            self._run.attempt(begin.attempt),
            begin,
            program,
            leave=partial(signal_ranks, self._dialect.leave_signal),
        )

    def _triggers(self, begin: AttemptStart) -> Path:
        """A folder of this attempt's: swiss-ai touches `exit` in it at the end, and needs it to be there."""
        return self._run.attempt(begin.attempt).client
