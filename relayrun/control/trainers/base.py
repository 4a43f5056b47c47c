"""The protocol between a chain and a program that trains.

The native trainer writes its records (`rundir.attempt`) itself. For any other program `trainers.observer` writes them,
from its log and its files as an implementation of `TrainerProgram` reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Literal, Protocol

from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.records import AttemptStart


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """An iteration that the program reports as done."""

    iteration: int
    seconds: float | None = None
    """Duration of the iteration; None if the program does not report it."""
    consumed_samples: int | None = None
    """Samples since the beginning of the run; None if the program does not report them."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers, under the names of `metrics.jsonl` if they have one there."""


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint on disk that the program has finished."""

    iteration: int
    path: str
    may_change: bool = False
    """Only its files show that it is finished: it counts once two consecutive looks find the same files."""


@dataclass(frozen=True, kw_only=True)
class ProgramEnding:
    """The end of the program by its own report."""

    outcome: Literal["done", "left", "fatal"]
    """`done`: it has trained everything. `left`: it reports that it saved. `fatal`: it would fail again."""
    words: str


def finite_number(value: object) -> float | None:
    """Return a number, or text that is one, as a float; None for anything else and for infinity: JSON has none."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


ENDED_BY_ITSELF = "the program ended by itself, with exit code 0"
"""Outcome of a program without a known last iteration."""


class Trainer(Protocol):
    """The program of a run's ranks, and the observation of its attempts."""

    lacks_hashes: bool
    """The chain hashes its checkpoints, and compares one with its hashes before ranks load it."""

    @property
    def leave_signal(self) -> Signals | None:
        """The signal on which every rank saves and leaves; None if only a file asks for it."""

    @property
    def asked_by(self) -> Sequence[Signals]:
        """All signals by which the chain asks the program for something."""

    def prepare(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Make the program start from `base` and from nothing else; return one line per action. Called when an attempt
        begins, and before each of its further restarts, while no rank lives and no process observes."""

    def command(self, begin: AttemptStart) -> list[str]:
        """Return the command of a rank of this attempt, without the cluster's prefix."""

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """Return variables of every rank of this attempt, besides those of the chain. PYTHONPATH: folders that come
        before all others."""

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> AttemptObserver | None:
        """Return the writer of this attempt's records; None if the program writes them itself."""


class AttemptObserver(Protocol):
    """Writes the records of an attempt, beside it and after it. Every method may raise OSError."""

    def look(self) -> None:
        """Record new facts; ask the program to save or leave if that is due."""

    def conclude(self, exit_code: int | None) -> None:
        """Record the remaining facts and the program's end. `exit_code`: of all ranks together, None if unknown."""


class TrainerProgram(Protocol):
    """One attempt of a foreign program, seen from the node of its batch script. Each process that looks reads log and
    files anew: `watch` may be killed and started again. Every method may raise OSError."""

    def steps(self) -> Sequence[ObservedStep]:
        """Return the iterations reported since the last call, rising; the first call reads from the beginning."""

    def checkpoints(self) -> Sequence[FoundCheckpoint]:
        """Return all complete checkpoints on disk, rising."""

    def saving(self) -> int | None:
        """Return the iteration of the checkpoint that is being written; None without one."""

    def is_printing(self) -> bool:
        """Return whether it printed new lines at the last call of `steps`, and has never reported an iteration: its
        progress is unknown, and no proof of a hang."""

    def unmatched(self) -> Sequence[str]:
        """Return the settings that fit nothing of what it prints and writes, in words."""

    def ask_to_save(self) -> str | None:
        """Ask it to save and go on; return in words why it cannot, else None."""

    def ending(self, exit_code: int | None) -> ProgramEnding | None:
        """Return its end; None if that was not on purpose. `exit_code`: of all ranks together, None if unknown."""
