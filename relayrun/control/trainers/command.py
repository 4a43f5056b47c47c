"""The trainer `command`, a user's own program: how it is started, asked and observed."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from signal import Signals

from relayrun import client
from relayrun.config.sections.command import CommandSection
from relayrun.control.job_log import job_output_files
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import ResumePoint, is_checkpoint_of
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import tools
from relayrun.control.trainers.base import AttemptObserver
from relayrun.control.trainers.checkpoint_cleanup import CheckpointRetention, ResumeGuard
from relayrun.control.trainers.command_program import CheckpointRule, CommandProgram, LogPattern
from relayrun.control.trainers.observer import ProgramObserver
from relayrun.files import write_atomic

PLACEHOLDERS = ("run_dir", "checkpoints", "iteration", "checkpoint")
"""Names in braces that an attempt fills in."""


class CommandTrainer:
    """The trainer of these settings. `total_steps`: the last iteration; None: the program ends when it is done."""

    lacks_hashes = False  # a checkpoint may change after it is whole

    def __init__(self, run: Run, settings: CommandSection, *, total_steps: int | None) -> None:
        self._run = run
        self._settings = settings
        self._total_steps = total_steps

    @property
    def leave_signal(self) -> Signals | None:
        name = self._settings.leave_signal
        return None if name is None else Signals[name]

    @property
    def asked_by(self) -> list[Signals]:
        return [Signals[name] for name in (self._settings.save_signal, self._settings.leave_signal) if name is not None]

    def prepare(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Hide checkpoints beyond the base, make the client's folder, and withdraw requests."""
        settings, opened = self._settings, self._run.attempt(attempt)
        self._run.checkpoints.mkdir(exist_ok=True)
        opened.client.mkdir(exist_ok=True)
        _move_client_records(opened.client)
        if settings.progress_file is not None:
            with contextlib.suppress(FileNotFoundError):
                write_atomic(_offset_file(opened), str(self._path(settings.progress_file).stat().st_size))
        for name in filter(None, (settings.save_file, settings.leave_file)):
            self._path(name).parent.mkdir(parents=True, exist_ok=True)
            self._path(name).unlink(missing_ok=True)
        if settings.leave_file is not None:  # so whoever asks, asks here too: watch, or the batch script by itself
            self._path(settings.leave_file).symlink_to(opened.stop)
        rule, guard = self._rule(), ResumeGuard(self._run.checkpoints)
        done = guard.release(restore=True, attempt=attempt)  # of an attempt that was killed
        own = base.iteration if is_checkpoint_of(self._run, base) else 0
        done += [] if rule is None else rule.prepare(base=own, attempt=attempt)
        if own and base.path is not None:
            older = [path for _, path in reversed(rule.every())] if rule is not None else []
            done += guard.keep([Path(base.path), *(path for path in older if str(path) != base.path)])
        return done

    def command(self, begin: AttemptStart) -> list[str]:
        words = [*self._settings.run, *(self._settings.resume if begin.base_path is not None else ())]
        values = (str(self._run.path), str(self._run.checkpoints), str(begin.base_iteration), begin.base_path or "")
        names = dict(zip(PLACEHOLDERS, values, strict=True))
        return [fill_placeholders(word, names) for word in words]

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        attempt = self._run.attempt(begin.attempt)
        found = {client.FOLDER: str(attempt.client), client.STOP: str(attempt.stop)}
        found |= tools.wandb_variables(self._run)
        return found if begin.base_path is None else found | {client.CHECKPOINT: begin.base_path}

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> AttemptObserver | None:
        settings, attempt = self._settings, self._run.attempt(begin.attempt)

        def save() -> None:
            if settings.save_file is not None:
                self._path(settings.save_file).touch()
            if settings.save_signal is not None:
                signal_ranks(Signals[settings.save_signal])

        said = settings.progress_file
        program = CommandProgram(
            client=attempt.client,
            folder=self._run.checkpoints,
            base=begin.base_iteration,
            total_steps=self._total_steps,
            logs=job_output_files(begin),
            progress=None if settings.progress is None else LogPattern(re.compile(settings.progress)),
            progress_file=None if said is None else (self._path(said), _read_offset(attempt)),
            rule=self._rule(),
            save=save,
            asked_to_leave=attempt.stop.exists,
            exit_code_suffices=settings.done == "exit-code",
        )
        leave = (lambda: None) if self.leave_signal is None else partial(signal_ranks, self.leave_signal)
        end = partial(signal_ranks, Signals.SIGKILL)
        kept = self._retention(begin)
        guard = ResumeGuard(self._run.checkpoints)
        return ProgramObserver(self._run, attempt, begin, program, leave=leave, end=end, retention=kept, guard=guard)

    def _retention(self, begin: AttemptStart) -> CheckpointRetention | None:
        if self._settings.checkpoint.keep_last is None:
            return None
        attempt = self._run.attempt(begin.attempt)
        return CheckpointRetention(self._run, attempt, begin, keep_last=self._settings.checkpoint.keep_last)

    def _rule(self) -> CheckpointRule | None:
        return checkpoint_rule(self._settings, self._run.checkpoints)

    def _path(self, name: str) -> Path:
        """Return the path of a file in a setting, below the run's directory if it is relative."""
        names = {"run_dir": str(self._run.path), "checkpoints": str(self._run.checkpoints)}
        return self._run.path / fill_placeholders(name, names)


def checkpoint_rule(settings: CommandSection, folder: Path) -> CheckpointRule | None:
    """Return the rule of the checkpoints in a folder; None if the program reports them."""
    rule = settings.checkpoint
    if rule.pattern is None:
        return None
    marks = {"whole_when": rule.whole_when, "unfinished_when": rule.unfinished_when}
    return CheckpointRule(folder=folder, pattern=rule.pattern, **marks, tracker=rule.tracker)


def _move_client_records(folder: Path) -> None:
    """Move the client's records of an earlier restart away: the next restart reports them again."""
    away = folder / f"restart-{1 + len(list(folder.glob('restart-*'))):04}"
    for path in sorted(folder.glob("*.jsonl")):
        away.mkdir(exist_ok=True)
        path.rename(away / path.name)


def fill_placeholders(word: str, names: Mapping[str, str]) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: names.get(found[1], found[0]), word)


def _offset_file(attempt: Attempt) -> Path:
    return attempt.client / "progress_offset"


def _read_offset(attempt: Attempt) -> int:
    try:
        return int(_offset_file(attempt).read_text())
    except (FileNotFoundError, ValueError):
        return 0
