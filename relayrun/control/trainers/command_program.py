"""One attempt of a user's own program, followed by what it says through `relayrun.client`, by its log, by its files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from relayrun.control.new_lines import LogFollower
from relayrun.control.trainers.base import ENDED_BY_ITSELF, FoundCheckpoint, ObservedStep, ProgramEnding
from relayrun.control.trainers.command_checkpoints import CheckpointRule
from relayrun.control.trainers.progress import LogPattern, json_step
from relayrun.files import read_lines


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
