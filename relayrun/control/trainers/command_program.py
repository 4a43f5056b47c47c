r"""A user's own program, observed from outside: its progress, its checkpoints, its end.

Progress comes from `relayrun.client`, from log lines that a pattern matches, or from a file of JSON lines:

    Step 12/100 | loss 2.31            pattern: Step (?P<iteration>\d+)/\d+ \| loss (?P<loss>\S+)
    {"step": 12, "loss": 2.31}         a line of JSON

A user's pattern may be slow: it is interrupted after a short time. `CheckpointRule` says which files or folders are
checkpoints, and which of them are complete.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from relayrun.control.diagnosis import first_cause
from relayrun.control.failure_signatures import time_limited
from relayrun.control.job_log import LOG_PREFIX, LogFollower
from relayrun.control.trainers.base import ENDED_BY_ITSELF, FoundCheckpoint, ObservedStep, ProgramEnding, finite_number
from relayrun.control.trainers.checkpoint_cleanup import quarantine_checkpoints
from relayrun.errors import RunDirError
from relayrun.files import fsync_directory, last_bytes, names_in, read_json_lines, stat_of, text_of, write_atomic
from relayrun.leftovers import temporary_prefix


@dataclass(frozen=True, kw_only=True)
class CheckpointRule:
    """Names of checkpoints, and the marks of a complete one."""

    folder: Path
    pattern: str
    """A name with `{iteration}` in it once; `*` and other names in braces are any text. Folders may precede it."""
    whole_when: str | None
    """A file in a checkpoint that is written last, or None; with `{name}` or `{stem}`, a file beside it. A file named
    *.json must hold JSON; of others the name suffices."""
    unfinished_when: str | None = None
    """A file, named in the same way, that exists while the checkpoint is incomplete, or None."""
    tracker: str | None = None
    """A file of `folder`, or a link, that names the newest complete checkpoint by iteration or name; None without one.
    """

    def every(self) -> list[tuple[int, Path]]:
        """Return iteration and path of every entry with a checkpoint's name, rising."""
        found = [self.folder]
        for part in self.pattern.split("/"):
            name, folders = _expression(part), filter(Path.is_dir, found)
            found = [folder / entry for folder in folders for entry in names_in(folder) if name.fullmatch(entry)]
        marks = {mark for path in found for mark in self._with_marks(path) if mark != path}
        return sorted((int(self._digits(path.name) or 0), path) for path in found if path not in marks)

    def is_whole(self, path: Path) -> bool:
        """Return whether a checkpoint is complete by this rule."""
        return self._fault(path, self.tracked()) is None

    def whole(self) -> list[FoundCheckpoint]:
        """Return all complete checkpoints, rising; of several of one iteration the one that changed last."""
        newest = self.tracked()
        found = [
            (number, path.stat().st_mtime_ns, path) for number, path in self.every() if not self._fault(path, newest)
        ]
        last = {number: path for number, _, path in sorted(found)}
        return [FoundCheckpoint(iteration=number, path=str(path), may_change=True) for number, path in last.items()]

    def unmatched(self) -> Iterator[str]:
        """Yield what no entry of the folder fits, in words."""
        entries = [name for name in names_in(self.folder) if name[0] != "." and name != self.tracker]
        text, known = self._tracker_text(), self.every()
        if entries and not known:
            some = f"{len(entries)} entries of {self.folder}: {', '.join(entries[:3])}"
            yield f"command.checkpoint.pattern {self.pattern} matched none of {some}"
        if text and known and self.tracked() not in [iteration for iteration, _ in known]:
            yield f"command.checkpoint.tracker {self.tracker} holds {text[:80]!r}, which names no checkpoint"
        if len(known) > 1 and self.whole_when is not None and not any(self.is_whole(path) for _, path in known):
            yield f"command.checkpoint.whole_when {self.whole_when}: none of {len(known)} checkpoints is complete by it"

    def under_way(self) -> int | None:
        """Return the iteration of the newest name if that checkpoint is incomplete; else None."""
        newest = max(self.every(), default=None)
        return None if newest is None or self.is_whole(newest[1]) else newest[0]

    def tracked(self) -> int | None:
        """Return the iteration that the tracker names; None without one."""
        text = self._tracker_text()
        digits = text if text is None or _is_number(text) else self._digits(os.path.basename(text))
        return None if digits is None else int(digits)

    def prepare(self, *, base: int, attempt: int) -> list[str]:
        """Hide everything beyond iteration `base` from the program; return one line per action."""
        beyond = [each for iteration, path in self.every() if iteration > base for each in self._with_marks(path)]
        newest = self.tracked()
        done = quarantine_checkpoints(self.folder, beyond, attempt=attempt, fault=partial(self._fault, newest=newest))
        if self.tracker is not None and (self._tracker_text() is not None or base) and newest != (base or None):
            self._track(base)
            done.append(f"{self.folder / self.tracker} named iteration {newest}; it names {base or 'none'} now")
        return done

    def _track(self, iteration: int) -> None:
        """Let the tracker name this iteration in its present form, by the name on disk; 0: remove it. A name made from
        the number may differ (`step-40` for `step-00000040`), and the program would not find it."""
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
        if self.tracker is None:
            return None
        path = self.folder / self.tracker
        with contextlib.suppress(FileNotFoundError):
            if path.is_symlink():
                return os.readlink(path)
        text = text_of(path)
        return None if text is None else text.strip()

    def _digits(self, name: str) -> str | None:
        """Return the iteration in a name with its leading zeros; None if it is no checkpoint's name."""
        found = _expression(self.pattern.rpartition("/")[2]).fullmatch(name)
        return None if found is None else found[1]

    def _with_marks(self, path: Path) -> list[Path]:
        """A checkpoint and its marks beside it, in an order in which it is never complete while they are moved."""
        whole, unfinished = (_mark(path, name or "{name}") for name in (self.whole_when, self.unfinished_when))
        beside = (each for each in (whole, path, unfinished) if each.parent == path.parent and os.path.lexists(each))
        return list(dict.fromkeys(beside))

    def _fault(self, path: Path, newest: int | None) -> str | None:
        """Return the defect of a checkpoint; None without one. `newest`: the iteration that the tracker names."""
        if self.whole_when is not None and (what := _unwritten_fault(_mark(path, self.whole_when))) is not None:
            return f"{self.whole_when} {what}"
        if self.unfinished_when is not None and os.path.lexists(_mark(path, self.unfinished_when)):
            return f"{self.unfinished_when} is there"
        if self.tracker is not None and int(self._digits(path.name) or 0) > (newest or 0):
            return f"{self.tracker} does not name it"
        return None if path.exists() else "it is missing"


@functools.lru_cache
def _expression(part: str) -> re.Pattern[str]:
    """Return the regular expression of a folder or name in a pattern; the iteration is its only group."""
    wild = re.sub(r"\\\*|\\\{(?!iteration\\\})\w+\\\}", ".*", re.escape(part))
    return re.compile(r"(?!\.)" * wild.startswith(".*") + wild.replace(r"\{iteration\}", "([0-9]+)"))


def _mark(path: Path, name: str) -> Path:
    """Return the file that marks a checkpoint: in it, or beside it if the name says the checkpoint's."""
    beside = name.replace("{name}", path.name).replace("{stem}", path.stem)
    return path / name if beside == name else path.parent / beside


def _is_number(text: str) -> bool:
    return re.fullmatch("[0-9]+", text) is not None


def _unwritten_fault(path: Path) -> str | None:
    """Return the defect of a file that is written last; None without one."""
    found = stat_of(path)
    if found is None:
        return "is missing"
    if path.suffix == ".json" and not _holds_json(path, found.st_size, found.st_mtime_ns):
        return "is not written to its end"
    return None


@functools.lru_cache(maxsize=1024)
def _holds_json(path: Path, size: int, changed: int) -> bool:
    """Return whether a file holds JSON; read once for each size and time of change."""
    del size, changed
    try:
        json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return True


log = logging.getLogger(__name__)

ENDED_EARLY = (
    "ended early: exit code 0 without a step, a checkpoint or a word of relayrun.client; if that is its whole work, "
    "set command.done to exit-code"
)
CRASHES = ("crashed", "abort", "killed", "script-missing", "module-missing", "program-missing", "flags", "syntax")
"""Entries of the table of failures that end a program, with or without a traceback."""
CRASH_BYTES = 200_000
"""Bytes of each log in which the words of a crash are looked for."""

ITERATION_KEYS = ("iteration", "step", "global_step")
"""Names of the iteration in a line of JSON; the first that is there counts."""

MIN_LINES = 50
"""Printed lines without an iteration from which on that is said."""
RECENT_LINES = 200
"""A line that differs from so many before it is a sign of life of a program whose iterations are unknown."""

_COLOURS = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_THOUSANDS = re.compile(r"(?<=\d)[,_'\u00a0\u2009\u202f](?=\d{3}(?!\d))")

LINE_SECONDS = 0.25
"""Processor time of a pattern for one line."""
LOOK_SECONDS = 1.0
"""Seconds for all lines of one look; further lines are skipped."""


class LogPattern:
    """Finds steps in lines of a log. A line for which the pattern takes too long is skipped, with one warning."""

    def __init__(self, pattern: re.Pattern[str]) -> None:
        self._pattern = pattern
        self._complained = False

    def steps(self, lines: Iterable[str]) -> Iterator[ObservedStep]:
        """Yield the steps in these lines."""
        spent = 0.0
        for line in lines:
            if spent > LOOK_SECONDS:
                continue
            begun = time.thread_time()
            try:
                with time_limited(LINE_SECONDS):
                    found = self._search(_COLOURS.sub("", line))
            except TimeoutError:
                found = None
                spent += time.thread_time() - begun
                self._complain(line)
            if found is not None and (step := _make_step(found.groupdict())) is not None:
                yield step

    def _search(self, line: str) -> re.Match[str] | None:
        """Search a line as it is; where that fails or cuts the iteration, without separators of thousands."""
        found = self._pattern.search(line)
        if found is None or (found.end() == found.end("iteration") and _THOUSANDS.match(line, found.end())):
            found = self._pattern.search(_THOUSANDS.sub("", line)) or found
        return found

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
    """Return the step in a line of JSON; None without one. Its numbers are metrics, or those of its object `metrics` if
    it has one; other values are left out."""
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
    plain = {
        name: _THOUSANDS.sub("", value).strip(" \t,;|)]%") if isinstance(value, str) else value
        for name, value in values.items()
    }
    numbers = {name: number for name, value in plain.items() if (number := finite_number(value)) is not None}
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


@dataclass(kw_only=True, eq=False)
class CommandProgram:
    """Reports and files of a program."""

    client: Path
    """The folder of `relayrun.client`."""
    folder: Path
    """The run's checkpoints; reports about others do not count."""
    base: int
    """Iteration from which the attempt resumed."""
    total_steps: int | None
    """The last iteration; None: it is done when it ends by itself."""
    logs: Sequence[tuple[str, int]]
    """Logs of the ranks, each with its bytes before the attempt."""
    progress: LogPattern | None
    """Finds iterations in the logs; None: the logs hold none."""
    progress_file: tuple[Path, int] | None
    """A file of JSON lines with its bytes before the attempt; None without one."""
    rule: CheckpointRule | None
    """Its checkpoints; None: it reports them through the client."""
    save: Callable[[], None] | None
    """Asks for a checkpoint besides the client's file; None: no other way."""
    asked_to_leave: Callable[[], bool]
    """Returns whether it was asked to save and leave."""
    exit_code_suffices: bool = False
    """`command.done: exit-code`: without a last iteration, exit code 0 alone says that it is done."""

    def __post_init__(self) -> None:
        self._said = LogFollower(self.client / "steps.jsonl")
        self._file = self.progress_file and LogFollower(self.progress_file[0], offset=self.progress_file[1])
        self._logs = [LogFollower(path, offset=offset) for path, offset in self.logs]
        self._newest = 0
        self._lines = 0
        """Lines that it has printed, while no iteration is known."""
        self._recent: deque[str] = deque(maxlen=RECENT_LINES)
        self._heard = self._printed = False

    def steps(self) -> list[ObservedStep]:
        found = _json_steps(self._said)
        if self._file is not None:
            written = _json_steps(self._file)  # who goes on may write the file anew, with the lines up to its base
            goes_on = any(step.iteration >= self.base for step in written)
            found += [step for step in written if step.iteration >= self.base or not goes_on]
        self._printed = False
        for printed in self._logs if self.progress is not None or not self._heard else ():
            lines = printed.read() if self._heard else self._count_lines(printed.read())
            found += () if self.progress is None else self.progress.steps(lines)
            deque(lines, maxlen=0)
        self._heard = self._heard or bool(found)
        self._newest = max([self._newest, *(step.iteration for step in found)])
        return found

    def _count_lines(self, lines: Iterable[str]) -> Iterator[str]:
        for line in lines:
            if not line.startswith(LOG_PREFIX):  # those of the chain
                self._lines += 1
                self._printed = self._printed or line not in self._recent
                self._recent.append(line)
            yield line

    def is_printing(self) -> bool:
        return self._printed and not self._heard

    def unmatched(self) -> list[str]:
        found = [] if self.rule is None else list(self.rule.unmatched())
        if self._heard or self._lines < MIN_LINES:
            return found
        count = f"{1 << self._lines.bit_length() - 1} lines or more"  # so the words change seldom
        if self.progress is not None:
            found.append(f"command.progress matched none of {count}")
        if self.progress_file is not None:
            there = "holds no iteration" if self.progress_file[0].exists() else "is not there"
            found.append(f"command.progress_file {self.progress_file[0]} {there}")
        elif self.progress is None:
            found.append(f"no command.progress is set, and relayrun.client reports no iteration in {count}")
        return found

    def checkpoints(self) -> list[FoundCheckpoint]:
        if self.rule is not None:
            return self.rule.whole()
        said: dict[int, str] = {}
        for entry in read_json_lines(self.client / "checkpoints.jsonl"):
            with contextlib.suppress(ValueError, TypeError, KeyError, OverflowError):
                iteration, path = int(entry["iteration"]), str(entry["path"])
                if Path(path).exists() and os.path.realpath(os.path.dirname(path)) == os.path.realpath(self.folder):
                    said[iteration] = path
        return [FoundCheckpoint(iteration=iteration, path=said[iteration]) for iteration in sorted(said)]

    def saving(self) -> int | None:
        return None if self.rule is None else self.rule.under_way()

    def ask_to_save(self) -> str | None:
        self.client.mkdir(exist_ok=True)
        (self.client / "save").touch()
        if self.save is not None:
            self.save()
        return None

    def ending(self, exit_code: int | None) -> ProgramEnding | None:
        """Return the end of a program that ended well, or was asked to leave and saved. Many programs that obeyed a
        signal end with another exit code than 0. That is on purpose too if every reported iteration is saved."""
        if exit_code is None:
            return None
        asked = self.asked_to_leave()
        saved = max((checkpoint.iteration for checkpoint in self.checkpoints()), default=0)
        if exit_code != 0 and not (asked and saved > self.base and saved >= self._newest):
            return None
        if self.total_steps is not None and saved >= self.total_steps:  # also where it was asked at the last moment
            return ProgramEnding(outcome="done", words=f"the last iteration, {saved}, is saved")
        if asked:
            code = f" (exit code {exit_code})" if exit_code else ""
            return ProgramEnding(outcome="left", words=f"it was asked to leave{code}")
        if self.exit_code_suffices and self.total_steps is None:
            return ProgramEnding(outcome="done", words=ENDED_BY_ITSELF)
        if self._crashed():
            return None
        if not (saved or self._newest or self.base):
            return ProgramEnding(outcome="fatal", words="; ".join([ENDED_EARLY, *self.unmatched()]))
        if self.total_steps is not None:
            return ProgramEnding(outcome="left", words=f"{ENDED_BY_ITSELF}, before iteration {self.total_steps}")
        return ProgramEnding(outcome="done", words=ENDED_BY_ITSELF)

    def _crashed(self) -> bool:
        """Return whether a log ends with a traceback or a crash: a pipe, as `| tee`, hides the exit code. An exception
        of another thread than the main one ends no program."""
        for path, offset in self.logs:
            with contextlib.suppress(OSError):
                text = last_bytes(path, CRASH_BYTES, since=offset).decode("utf-8", errors="replace")
                said = None if "Exception in thread" in text else first_cause(text)
                if said is not None and said.last and not said.secondary and (said.place or said.name in CRASHES):
                    return True
        return False


def _json_steps(lines: LogFollower) -> list[ObservedStep]:
    return [step for line in lines.read() if (step := json_step(line)) is not None]
