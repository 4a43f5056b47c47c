"""The trainer Megatron-LM: its command, its variables, and the record of its code.

Adds the flags of W&B and of the folders, NCCL's log, and nsys; moves lists of shards that are too long for a command
line into a file; records commit and difference of the checkout.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from signal import Signals

from relayrun.control.job_log import job_output_files
from relayrun.control.rundir.checkpoint_records import ResumePoint, is_checkpoint_of
from relayrun.control.rundir.records import AttemptStart, Record
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import megatron_lm_log, tools
from relayrun.control.trainers.base import AttemptObserver
from relayrun.control.trainers.checkpoint_cleanup import CheckpointRetention
from relayrun.control.trainers.megatron_lm_log import MegatronDialect, MegatronProgram, iteration_of_folder
from relayrun.control.trainers.observer import ProgramObserver
from relayrun.control.trainers.tools import nsys_command, wandb_mode
from relayrun.control.trainers.torch_files import vet_checkpoint
from relayrun.files import write_atomic
from relayrun.masking import mask_tokens


def _missing_flags(words: Sequence[str], wanted: Mapping[str, str]) -> list[str]:
    given = _flag_names(words)
    return [word for flag, value in wanted.items() if flag not in given for word in (flag, value)]


def _flag_names(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words}


GIT_SECONDS = 20.0
"""Time limit of a git command: a job's begin waits for it."""


def record_checkout(checkout: Path, target: Path) -> None:
    """Write commit and difference of a checkout to a file for its owner alone. Raises OSError."""
    commit, difference = checkout_state(checkout)
    text = f"== code\n{checkout}\ncommit {commit}\n\n== difference to the commit\n{difference.rstrip() or 'none'}\n"
    target.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(target, mask_tokens(text)[0].encode(errors="surrogateescape"), mode=0o600, durable=False)


def checkout_state(checkout: Path) -> tuple[str, str]:
    """Return commit and difference of a checkout, or of a snapshot with both beside it; the reason if unknown."""
    commit, difference = checkout.with_suffix(".commit"), checkout.with_suffix(".diff")
    if commit.is_file():
        return commit.read_text(encoding="utf-8").strip(), _file_text(difference)
    if not (checkout / ".git").exists():
        return "unknown: this is no git checkout", "unknown"
    changes = _git_output(checkout, "diff", "--no-ext-diff", "--no-textconv", "HEAD")
    return _git_output(checkout, "rev-parse", "HEAD").strip(), changes


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError as error:
        return f"unknown: {error.strerror}"


def _git_output(checkout: Path, *words: str) -> str:
    command = ["git", "-C", str(checkout), *words]
    environment = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}  # nothing is written into somebody's checkout
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=GIT_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"unknown: {error}"
    if done.returncode:
        return f"unknown: {done.stderr.decode(errors='replace').strip()}"
    return done.stdout.decode(errors="surrogateescape")


COMMAND_LINE_BYTES = 100_000
"""Bytes of words above which a file is used; Linux takes 128 KiB for one word, and 2 MB for all of them."""

_SPLITS = {"--train-data-path": "train", "--valid-data-path": "valid", "--test-data-path": "test"}


def is_too_long_for_command(values: Sequence[str]) -> bool:
    """Return whether words go to a file."""
    return sum(len(value.encode(errors="surrogateescape")) + 1 for value in values) > COMMAND_LINE_BYTES


def shorten_data_paths(words: Sequence[str], file: str) -> tuple[list[str], str | None]:
    """Return a command line whose shards are in `file` if it is too long, and the text of that file or None."""
    flags = _grouped_flags(words)
    whole = next((values for name, values in flags if name == "--data-path" and is_too_long_for_command(values)), None)
    if whole is not None:
        return _replaced_flags(flags, {"--data-path"}, ["--data-args-path", file]), " ".join(whole) + "\n"
    parts = {name: values for name, values in flags if name in _SPLITS}
    if is_too_long_for_command([value for values in parts.values() for value in values]):
        lists = {split: parts.get(name, []) or None for name, split in _SPLITS.items()}
        return _replaced_flags(flags, set(parts), ["--per-split-data-args-path", file]), json.dumps(lists) + "\n"
    return list(words), None


def _grouped_flags(words: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return the flags with their words; words before the first flag belong to an empty name."""
    found: list[tuple[str, list[str]]] = [("", [])]
    for word in words:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return found


def _replaced_flags(flags: list[tuple[str, list[str]]], names: set[str], words: list[str]) -> list[str]:
    kept = [word for name, values in flags if name not in names for word in filter(None, (name, *values))]
    return [*kept, *words]


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
    """Number of newest checkpoints that stay; None: all. Megatron-LM removes none."""
    keep_every: int | None = None
    """Checkpoints of multiples of it stay for good; None: none do."""
    load_flags: list[str] = field(default_factory=list)
    """Flags of attempts that begin with another run's checkpoint: with --finetune each attempt would count from 0."""
    profile: str | None = None
    """`nsys`: nsys wraps every rank."""
    nsys_options: list[str] = field(default_factory=list)
    """Options of nsys, which replace the default ones."""
    log_nccl: bool = False
    wandb_project: str | None = None
    """W&B's project, if W&B is on in the job; None: `run` has it."""
    wandb_name: str | None = None


class MegatronTrainer:
    """The trainer of these settings."""

    lacks_hashes = True

    def __init__(self, run: Run, settings: MegatronSettings) -> None:
        self._run = run
        self._settings = settings
        self._dialect = MegatronDialect(settings.dialect)

    @property
    def leave_signal(self) -> Signals:
        return self._dialect.leave_signal(self._settings.run)

    @property
    def asked_by(self) -> list[Signals]:
        return [self.leave_signal]

    def prepare(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Set the tracker to the base, and hide everything beyond it; another run's checkpoint is loaded by its path.
        The attempt gets its trigger folder, and the state of the checkout is recorded. Raises InputError for a
        checkpoint that holds more than values."""
        self._run.checkpoints.mkdir(exist_ok=True)
        record = self._run.attempt(attempt)
        record.client.mkdir(exist_ok=True)
        _, paths = shorten_data_paths(self._settings.run, str(record.data_paths))
        if paths is not None:
            write_atomic(record.data_paths, paths)
        if self._settings.profile == "nsys":
            self._profiles(attempt).mkdir(parents=True, exist_ok=True)
        own = base.iteration if is_checkpoint_of(self._run, base) else 0
        if base.path is not None:
            vet_checkpoint(Path(base.path), checkout=None if self._settings.dir is None else Path(self._settings.dir))
        said = megatron_lm_log.prepare_checkpoints(self._run.checkpoints, base=own, attempt=attempt)
        if self._settings.dir is not None:
            try:
                record_checkout(Path(self._settings.dir), self._run.debug_of(attempt) / "compute_environment.txt")
            except OSError as error:
                said.append(f"the state of {self._settings.dir} is not on record: {error}")
        return said

    def command(self, begin: AttemptStart) -> list[str]:
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
        project, name = settings.wandb_project, settings.wandb_name
        if project is not None and name is not None and wandb_mode(os.environ) is not None:  # W&B is on in this job
            words += _missing_flags(words, {"--wandb-project": project, "--wandb-exp-name": name})
        if "--wandb-project" in _flag_names(words):
            # Megatron-LM's own folder of W&B lies among the checkpoints. It sends loss, gradient norm and learning rate
            # to W&B only if it writes event files of TensorBoard, too.
            folders = {"--wandb-save-dir": str(self._run.path), "--tensorboard-dir": str(self._run.tensorboard)}
            words += _missing_flags(words, folders)
        if settings.profile != "nsys":
            return words
        output = f"{self._profiles(begin.attempt)}/nsys-trace-hostname-%h-procid-%q{{SLURM_PROCID}}.nsys-rep"
        return [*nsys_command(output, settings.nsys_options), *words]

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        found = {} if self._settings.dir is None else {"PYTHONPATH": self._settings.dir}
        if self._settings.log_nccl:
            found["NCCL_DEBUG"] = os.environ.get("NCCL_DEBUG", "INFO")
            file = self._run.debug_of(begin.attempt) / "nccl-info-hostname-%h-pid-%p.txt"  # node, process id
            found["NCCL_DEBUG_FILE"] = str(file)
        return found | tools.wandb_variables(self._run)

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> AttemptObserver | None:
        attempt = self._run.attempt(begin.attempt)
        program = MegatronProgram(
            dialect=self._dialect,
            logs=job_output_files(begin),
            folder=self._run.checkpoints,
            trigger_folder=self._triggers(begin),
            total_steps=self._settings.total_steps,
        )

        def leave() -> None:
            if self._dialect is MegatronDialect.SWISS_AI and "--profile" in _flag_names(self._settings.run):
                program.leave_by_files()  # with --profile it heeds no signal
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
            tracked=partial(megatron_lm_log.tracked_iteration, self._run.checkpoints),
        )

    def _profiles(self, attempt: int) -> Path:
        return self._run.debug_of(attempt) / "profile"

    def _triggers(self, begin: AttemptStart) -> Path:
        """Return a folder of this attempt: swiss-ai touches `exit` in it at the end, and needs the folder."""
        return self._run.attempt(begin.attempt).client
