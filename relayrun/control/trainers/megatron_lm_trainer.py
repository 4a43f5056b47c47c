"""Megatron-LM under the chain: how it is started, asked and followed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals

from relayrun.control.logs import job_logs
from relayrun.control.rundir.lineage import ResumePoint, is_checkpoint_of
from relayrun.control.rundir.records import AttemptStart, Record
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import around, checkout, megatron_lm_checkpoints, wandb
from relayrun.control.trainers.base import AttemptObserver
from relayrun.control.trainers.long_data import shorten_data_paths
from relayrun.control.trainers.megatron_lm_checkpoints import iteration_of_folder
from relayrun.control.trainers.megatron_lm_program import MegatronDialect, MegatronProgram
from relayrun.control.trainers.nsys import nsys_command
from relayrun.control.trainers.observer import ProgramObserver
from relayrun.control.trainers.retention import CheckpointRetention
from relayrun.files import write_atomic


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
    load_flags: list[str] = field(default_factory=list)
    """Flags of attempts that begin with another run's checkpoint: --finetune, given for ever, begins anew for ever."""
    profile: str | None = None
    """`nsys`: nsys stands around every rank."""
    nsys_options: list[str] = field(default_factory=list)
    """Options of nsys, which take the place of those that stand there otherwise."""
    log_nccl: bool = False
    wandb_project: str | None = None
    """W&B's project, where W&B is on in the job; None: `run` says it."""
    wandb_name: str | None = None


class MegatronTrainer:
    """What the settings make of an attempt."""

    def __init__(self, run: Run, settings: MegatronSettings) -> None:
        self._run = run
        self._settings = settings
        self._dialect = MegatronDialect(settings.dialect)

    @property
    def leave_signal(self) -> Signals:
        """On which it saves and leaves."""
        return self._dialect.leave_signal(self._settings.run)

    @property
    def asked_by(self) -> list[Signals]:
        """The signal to leave alone: for a checkpoint it has a file."""
        return [self.leave_signal]

    def prepare(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Let the tracker name the base, and nothing lie beyond it; another run's checkpoint is loaded by its path.

        The attempt gets its trigger folder, and the state of the checkout goes on record.
        """
        self._run.checkpoints.mkdir(exist_ok=True)
        record = self._run.attempt(attempt)
        record.client.mkdir(exist_ok=True)
        _, paths = shorten_data_paths(self._settings.run, str(record.data_paths))
        if paths is not None:
            write_atomic(record.data_paths, paths)
        if self._settings.profile == "nsys":
            self._profiles(attempt).mkdir(parents=True, exist_ok=True)
        own = base.iteration if is_checkpoint_of(self._run, base) else 0
        said = megatron_lm_checkpoints.prepare_checkpoints(self._run.checkpoints, base=own, attempt=attempt)
        if self._settings.dir is not None:
            try:
                checkout.record_checkout(
                    Path(self._settings.dir), self._run.debug_of(attempt) / "compute_environment.txt"
                )
            except OSError as error:
                said.append(f"the state of {self._settings.dir} is not on record: {error}")
        return said

    def command(self, begin: AttemptStart) -> list[str]:
        """The program with its flags and the folders of this attempt."""
        settings, folder = self._settings, str(self._run.checkpoints)
        words, _ = shorten_data_paths(settings.run, str(self._run.attempt(begin.attempt).data_paths))
        words += ["--save", folder]
        base = ResumePoint(iteration=begin.base_iteration, path=begin.base_path)
        if base.path is None or is_checkpoint_of(self._run, base):
            words += ["--load", folder]
        else:
            path = Path(base.path)
            iteration = iteration_of_folder(path.name)  # with --finetune the run counts from 0
            step = base.iteration if iteration is None else iteration
            words += ["--load", str(path.parent), "--ckpt-step", str(step), *settings.load_flags]
        if self._dialect is MegatronDialect.SWISS_AI:
            words += ["--trigger-path", str(self._triggers(begin))]
        if settings.wandb_project is not None and settings.wandb_name is not None:
            words += around.wandb_flags(words, project=settings.wandb_project, name=settings.wandb_name)
        words += around.wandb_folder_flags(words, self._run)
        if settings.profile != "nsys":
            return words
        output = f"{self._profiles(begin.attempt)}/nsys-trace-hostname-%h-procid-%q{{SLURM_PROCID}}.nsys-rep"
        return [*nsys_command(output, settings.nsys_options), *words]

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """The checkout first on the path, where NCCL writes its log if it is to write one, and W&B's names."""
        found = {} if self._settings.dir is None else {"PYTHONPATH": self._settings.dir}
        if self._settings.log_nccl:
            found |= around.nccl_log_variables(self._run.debug_of(begin.attempt))
        return found | wandb.wandb_variables(self._run)

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> AttemptObserver | None:
        """An observer of its log and its checkpoints."""
        attempt = self._run.attempt(begin.attempt)
        program = MegatronProgram(
            dialect=self._dialect,
            logs=job_logs(begin),
            folder=self._run.checkpoints,
            trigger_folder=self._triggers(begin),
            total_steps=self._settings.total_steps,
        )

        def leave() -> None:
            if self._dialect is MegatronDialect.SWISS_AI and _has_flag(
                self._settings.run, "--profile"
            ):  # it heeds no signal then
                program.leave_by_files()
                return
            program.wait_inside_step()
            signal_ranks(self.leave_signal)

        kept, end = self._retention(begin), partial(signal_ranks, Signals.SIGKILL)
        return ProgramObserver(self._run, attempt, begin, program, leave=leave, end=end, retention=kept, ask_again=True)

    def _retention(self, begin: AttemptStart) -> CheckpointRetention | None:
        if self._settings.keep_last is None:
            return None
        return CheckpointRetention(
            self._run,
            self._run.attempt(begin.attempt),
            begin,
            keep_last=self._settings.keep_last,
            keep_every=self._settings.keep_every,
            tracked=partial(megatron_lm_checkpoints.tracked_iteration, self._run.checkpoints),
        )

    def _profiles(self, attempt: int) -> Path:
        return self._run.debug_of(attempt) / "profile"

    def _triggers(self, begin: AttemptStart) -> Path:
        """A folder of this attempt's: swiss-ai touches `exit` in it at the end, and needs it to be there."""
        return self._run.attempt(begin.attempt).client


def _has_flag(words: Sequence[str], flag: str) -> bool:
    return any(word == flag or word.startswith(f"{flag}=") for word in words)
