"""Megatron-LM under the chain: how it is started, asked and followed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from signal import Signals

from relayrun.errors import RunDirError
from relayrun.rundir.lineage import Durable, is_own
from relayrun.rundir.records import AttemptStart, Record
from relayrun.rundir.run import Run
from relayrun.rundir.streams import record_streams
from relayrun.trainers.base import Observing
from relayrun.trainers.logs import logs_of
from relayrun.trainers.megatron_lm import checkout, checkpoints
from relayrun.trainers.megatron_lm.program import Dialect, MegatronLM
from relayrun.trainers.observer import Observer
from relayrun.trainers.retention import Retention

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class MegatronSettings(Record):
    """The section `megatron_lm` of a run config, as it stands in plan.json."""

    run: list[str]
    """Program and flags, without those of the folders that an attempt decides."""
    dialect: str
    total_steps: int
    dir: str | None = None
    """The checkout, or its snapshot, from which the ranks import; None: the program finds its modules itself."""
    keep_last: int | None = None
    """How many of the newest checkpoints stay; None: all. Megatron-LM removes none."""
    keep_every: int | None = None
    """Checkpoints of multiples of it stay for good; None: none do."""


class MegatronTrainer:
    """What the settings make of an attempt."""

    def __init__(self, run: Run, settings: MegatronSettings) -> None:
        self._run = run
        self._settings = settings
        self._dialect = Dialect(settings.dialect)

    @property
    def leave_signal(self) -> Signals:
        """On which it saves and leaves."""
        return self._dialect.leave_signal(self._settings.run)

    def prepare(self, base: Durable, *, attempt: int) -> list[str]:
        """Let the tracker name the base, and nothing lie beyond it; another run's checkpoint is loaded by its path.

        The attempt gets its trigger folder, and the state of the checkout goes on record.
        """
        self._run.checkpoints.mkdir(exist_ok=True)
        self._run.attempt(attempt).client.mkdir(exist_ok=True)
        own = base.iteration if is_own(self._run, base) else 0
        said = checkpoints.prepare(self._run.checkpoints, base=own, attempt=attempt)
        if self._settings.dir is not None:
            try:
                checkout.record(Path(self._settings.dir), self._run.debug_of(attempt) / "compute_environment.txt")
            except OSError as error:
                said.append(f"the state of {self._settings.dir} is not on record: {error}")
        return said

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
        if _has(words, "--wandb-project") and not _has(words, "--wandb-save-dir"):  # else among the checkpoints
            words += ["--wandb-save-dir", str(self._run.path)]
        return words

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """The checkout first on the path, and W&B's names: all attempts are one run there, up to a rewind."""
        del begin
        found = {} if self._settings.dir is None else {"PYTHONPATH": self._settings.dir}
        try:
            found |= {"WANDB_RUN_ID": record_streams(self._run)[-1].id, "WANDB_RESUME": "allow"}
        except RunDirError as error:  # no attempt fails for it: W&B begins another run
            log.warning("%s: %s", self._run.streams, error.message)
        return found

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> Observing | None:
        """An observer of its log and its checkpoints."""
        attempt = self._run.attempt(begin.attempt)
        program = MegatronLM(
            dialect=self._dialect,
            logs=logs_of(begin),
            folder=self._run.checkpoints,
            trigger_folder=self._triggers(begin),
            total_steps=self._settings.total_steps,
        )

        def leave() -> None:
            if self._dialect is Dialect.SWISS_AI and _has(self._settings.run, "--profile"):  # it heeds no signal then
                program.leave_by_files()
                return
            program.wait_inside_step()
            signal_ranks(self.leave_signal)

        return Observer(self._run, attempt, begin, program, leave=leave, retention=self._retention(begin))

    def _retention(self, begin: AttemptStart) -> Retention | None:
        if self._settings.keep_last is None:
            return None
        return Retention(
            self._run,
            self._run.attempt(begin.attempt),
            begin,
            keep_last=self._settings.keep_last,
            keep_every=self._settings.keep_every,
            tracked=partial(checkpoints.tracked, self._run.checkpoints),
        )

    def _triggers(self, begin: AttemptStart) -> Path:
        """A folder of this attempt's: swiss-ai touches `exit` in it at the end, and needs it to be there."""
        return self._run.attempt(begin.attempt).client


def _has(words: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in words)
