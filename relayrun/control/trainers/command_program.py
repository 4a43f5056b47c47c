r"""A user's own program, seen from outside: its progress, its checkpoints, its end.

Progress comes from `relayrun.client`, from log lines that a pattern matches, or from a file of JSON lines:

    Step 12/100 | loss 2.31            pattern: Step (?P<iteration>\d+)/\d+ \| loss (?P<loss>\S+)
    {"step": 12, "loss": 2.31}         a line of JSON

A pattern is a user's own and may be slow: it is interrupted after a short time. `CheckpointRule` says which files
or folders are checkpoints, and which of them are complete.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import math
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.control.job_log import LogFollower
from relayrun.control.trainers.base import ENDED_BY_ITSELF, FoundCheckpoint, ObservedStep, ProgramEnding
from relayrun.control.trainers.checkpoint_cleanup import quarantine_checkpoints
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, read_lines, temporary_prefix, write_atomic


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """How the names of checkpoints tell their iterations."""

    folder: Path
    pattern: str
    """A name with `{iteration}` in it once."""
    whole_when: str | None
    """A file below a checkpoint's folder that is written last; None: nothing is. One that is called *.json must hold
    JSON; of another one its name is enough."""
    tracker: str | None = None
    """A file of `folder`, or a link, that names the newest whole one by its iteration or its name; None: none does."""

    def every(self) -> list[tuple[int, Path]]:
        """Iteration and path of everything that has a checkpoint's name, rising."""
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        found = ((self._iteration(entry), self.folder / entry) for entry in entries)
        return sorted((iteration, path) for iteration, path in found if iteration is not None)

    def is_whole(self, path: Path) -> bool:
        """Whether nothing of a checkpoint is missing, as far as the rule tells."""
        return self._fault(path, self.tracked()) is None

    def whole(self) -> list[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""
        newest = self.tracked()
        return [
            FoundCheckpoint(iteration=iteration, path=str(path), may_change=True)
            for iteration, path in self.every()
            if self._fault(path, newest) is None
        ]

    def under_way(self) -> int | None:
        """The iteration of the newest name, where that is not whole; None where it is, or there is none."""
        newest = max(self.every(), default=None)
        return None if newest is None or self.is_whole(newest[1]) else newest[0]

    def tracked(self) -> int | None:
        """The iteration that the tracker names; None where there is no tracker, or it names none."""
        text = self._tracker_text()
        return None if text is None else int(text) if _is_number(text) else self._iteration(os.path.basename(text))

    def prepare(self, *, base: int, attempt: int) -> list[str]:
        """Leave nothing beyond iteration `base` that the program could go on from. Returns what was done, in words."""
        beyond = [path for iteration, path in self.every() if iteration > base]
        newest = self.tracked()
        done = quarantine_checkpoints(
            self.folder, beyond, attempt=attempt, fault=lambda path: self._fault(path, newest)
        )
        if self.tracker is not None and (self._tracker_text() is not None or base) and newest != (base or None):
            self._track(base)
            done.append(f"{self.folder / self.tracker} named iteration {newest}; it names {base or 'none'} now")
        return done

    def _track(self, iteration: int) -> None:
        """Let the tracker name this iteration in the form that it had, by the name found on disk; 0: remove it.

        A name made from the number may be another one (`step-40` for `step-00000040`), which the program does not find.
        """
        assert self.tracker is not None
        path, former = self.folder / self.tracker, self._tracker_text()
        if not iteration:
            path.unlink(missing_ok=True)
            fsync_directory(self.folder)
            return
        name = next((found.name for number, found in self.every() if number == iteration), None)
        if name is None:
            raise RunDirError(f"no checkpoint of iteration {iteration} is there to go on from", where=self.folder)
        if path.is_symlink():
            link = self.folder / f"{temporary_prefix()}{self.tracker}"
            link.symlink_to(os.path.join(os.path.dirname(os.readlink(path)), name))
            os.replace(link, path)
            fsync_directory(self.folder)
        elif former in (None, "release") or _is_number(former):  # Megatron's word for weights without an iteration
            digits = self._digits(name)
            same_form = former is not None and digits is not None and len(digits) == len(former)
            write_atomic(path, f"{digits if same_form else iteration}\n")
        else:
            write_atomic(path, os.path.join(os.path.dirname(former), name))

    def _tracker_text(self) -> str | None:
        """What the tracker says; None without one."""
        if self.tracker is None:
            return None
        path = self.folder / self.tracker
        try:
            return (
                os.readlink(path) if path.is_symlink() else path.read_text(encoding="utf-8", errors="replace").strip()
            )
        except FileNotFoundError:
            return None

    def _iteration(self, name: str) -> int | None:
        digits = self._digits(name)
        return None if digits is None else int(digits)

    def _digits(self, name: str) -> str | None:
        """The iteration as a name has it, with its zeros in front; None where it is no checkpoint's name."""
        before, _, after = self.pattern.partition("{iteration}")
        found = re.fullmatch(re.escape(before) + r"([0-9]+)" + re.escape(after), name)
        return None if found is None else found[1]

    def _fault(self, path: Path, newest: int | None) -> str | None:
        """What is missing of a checkpoint; None where nothing is. `newest`: the iteration that the tracker names."""
        if self.whole_when is not None and (what := _unwritten_fault(path / self.whole_when)) is not None:
            return f"{self.whole_when} {what}"
        if self.tracker is not None and (self._iteration(path.name) or 0) > (newest or 0):
            return f"{self.tracker} does not name it"
        return None if path.exists() else "it is missing"


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]+", text) is not None


def _unwritten_fault(path: Path) -> str | None:
    """What is wrong with a file that is written last; None where nothing is."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return "is missing"
    if path.suffix == ".json" and not _holds_json(path, found.st_size, found.st_mtime_ns):
        return "is not written to its end"
    return None


@functools.lru_cache(maxsize=1024)
def _holds_json(path: Path, size: int, changed: int) -> bool:
    """Whether a file holds JSON; read once as long as it has this size and this time of change."""
    del size, changed
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


log = logging.getLogger(__name__)

ITERATION_KEYS = ("iteration", "step", "global_step")
"""What programs call the iteration in a line of JSON; the first that is there counts."""

LINE_SECONDS = 0.25
"""Processor time that a pattern may take on one line."""
LOOK_SECONDS = 1.0
"""Seconds for all lines of one look; those behind are passed over."""


class LogPattern:
    """Finds the steps in lines of a log. A line on which the pattern takes long is passed over, which is said once."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._complained = False

    def steps(self, lines: Iterable[str]) -> Iterator[ObservedStep]:
        """The steps that these lines tell of."""
        spent = 0.0
        for line in lines:
            if spent > LOOK_SECONDS:
                continue
            begun = time.thread_time()
            try:
                with _time_limited(LINE_SECONDS):
                    found = self._pattern.search(line)
            except _PatternTooSlow:
                found = None
                spent += time.thread_time() - begun
                self._complain(line)
            if found is not None and (step := _make_step(found.groupdict())) is not None:
                yield step

    def _complain(self, line: str) -> None:
        if not self._complained:
            log.warning(
                "the pattern of progress, %r, takes too long on a line of the log, and passes over such lines: %.100r; "
                "make it simpler: a + or * within a group that is repeated is what takes long",
                self._pattern.pattern,
                line,
            )
        self._complained = True


def json_step(line: str) -> ObservedStep | None:
    """The step that a line of JSON tells of; None where it tells of none.

    Its numbers are metrics, those of its object `metrics` where it has one; what is no number is left out.
    """
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    iteration = next((entry[name] for name in ITERATION_KEYS if name in entry), None)
    metrics = entry["metrics"] if isinstance(entry.get("metrics"), dict) else entry
    return _make_step({**metrics, "iteration": iteration})


def _make_step(values: Mapping[str, Any]) -> ObservedStep | None:
    numbers = {name: number for name, value in values.items() if (number := _finite_number(value)) is not None}
    iteration = numbers.pop("iteration", None)
    if iteration is None or iteration < 0:
        return None
    for name in ITERATION_KEYS:
        numbers.pop(name, None)
    seconds, samples = numbers.pop("step_seconds", None), numbers.pop("consumed_samples", None)
    return ObservedStep(
        iteration=int(iteration),
        seconds=seconds,
        consumed_samples=None if samples is None else int(samples),
        metrics=numbers,
    )


def _finite_number(value: object) -> float | None:
    """A finite number, or text that is one; JSON has no others."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


class _PatternTooSlow(Exception):
    pass


@contextlib.contextmanager
def _time_limited(seconds: float) -> Iterator[None]:
    """Raise _TooSlow inside after so much processor time of this process.

    A search looks for signals now and then, and nothing else ends one. In another thread than the main one, where
    Python hears no signals, nothing is limited.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise _PatternTooSlow

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


class CommandProgram:
    """What a program says and leaves on disk.

    Args:
        client: the folder of `relayrun.client`.
        folder: of the run's checkpoints; what the program says of others does not count.
        base: the iteration that the attempt went on from.
        total_steps: the last iteration; None: it has done all when it ends by itself.
        logs: files with what the ranks print, each with the bytes that it had before the attempt.
        progress: finds its iterations in the logs; None: nothing does.
        progress_file: a file of JSON lines, with its bytes before the attempt; None: there is none.
        rule: its checkpoints; None: it says them through the client.
        save: asks it for a checkpoint besides the client's file; None: nothing else does.
        asked_to_leave: whether somebody has asked it to save and leave.
    """

    def __init__(
        self,
        *,
        client: Path,
        folder: Path,
        base: int,
        total_steps: int | None,
        logs: Sequence[tuple[str, int]],
        progress: LogPattern | None,
        progress_file: tuple[Path, int] | None,
        rule: CheckpointRule | None,
        save: Callable[[], None] | None,
        asked_to_leave: Callable[[], bool],
    ) -> None:
        self._client = client
        self._folder = folder
        self._base = base
        self._total_steps = total_steps
        self._said = LogFollower(client / "steps.jsonl")
        self._file = None if progress_file is None else LogFollower(progress_file[0], offset=progress_file[1])
        self._logs = [LogFollower(path, offset=offset) for path, offset in logs]
        self._progress = progress
        self._rule = rule
        self._save = save
        self._asked_to_leave = asked_to_leave
        self._newest = 0

    def steps(self) -> list[ObservedStep]:
        """The iterations that it has said since the last call, as it said them; from its beginning for the first."""
        found = _json_steps(self._said)
        if self._file is not None:
            written = _json_steps(self._file)  # who goes on may write the file anew, with the lines up to its base
            goes_on = any(step.iteration >= self._base for step in written)
            found += [step for step in written if step.iteration >= self._base or not goes_on]
        if self._progress is not None:
            for lines in self._logs:
                found += self._progress.steps(lines.read())
        self._newest = max([self._newest, *(step.iteration for step in found)])
        return found

    def checkpoints(self) -> list[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""
        if self._rule is not None:
            return self._rule.whole()
        said: dict[int, str] = {}
        for entry in read_lines(self._client / "checkpoints.jsonl"):
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                iteration, path = int(entry["iteration"]), str(entry["path"])
                if Path(path).exists() and os.path.realpath(os.path.dirname(path)) == os.path.realpath(self._folder):
                    said[iteration] = path
        return [FoundCheckpoint(iteration=iteration, path=said[iteration]) for iteration in sorted(said)]

    def saving(self) -> int | None:
        """The newest checkpoint that has a name, where it is not whole."""
        return None if self._rule is None else self._rule.under_way()

    def ask_to_save(self) -> str | None:
        """Leave word for the client, and do what else the settings say."""
        self._client.mkdir(exist_ok=True)
        (self._client / "save").touch()
        if self._save is not None:
            self._save()
        return None

    def ending(self, exit_code: int | None) -> ProgramEnding | None:
        """A program that ends well has done all it had to do, or was asked to leave.

        Many end with another exit code than 0 when they have done what a signal asked for. That is on purpose too where
        all that it said it has done is saved.
        """
        if exit_code is None:
            return None
        asked = self._asked_to_leave()
        saved = max((checkpoint.iteration for checkpoint in self.checkpoints()), default=0)
        if exit_code != 0 and not (asked and saved > self._base and saved >= self._newest):
            return None
        if self._total_steps is not None and saved >= self._total_steps:  # also where it was asked at the last moment
            return ProgramEnding(outcome="done", words=f"the last iteration, {saved}, is saved")
        if exit_code != 0:
            return ProgramEnding(outcome="left", words=f"it was asked to leave (exit code {exit_code})")
        if asked:
            return ProgramEnding(outcome="left", words="it was asked to leave")
        if self._total_steps is not None:
            return ProgramEnding(outcome="left", words=f"{ENDED_BY_ITSELF}, before iteration {self._total_steps}")
        return ProgramEnding(outcome="done", words=ENDED_BY_ITSELF)


def _json_steps(lines: LogFollower) -> list[ObservedStep]:
    """The iterations that new lines of JSON tell of."""
    return [step for line in lines.read() if (step := json_step(line)) is not None]
