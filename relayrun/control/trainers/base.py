"""What a chain needs to know of a program that trains, and what it asks of it: the protocol of a foreign trainer.

The native trainer writes its records (`rundir.attempt`) itself. For any other program `trainers.observer` writes them,
from what an implementation of `TrainerProgram` sees from outside: its log, its files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from signal import Signals
from typing import Literal, Protocol

from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.records import AttemptStart


@dataclass(frozen=True, kw_only=True)
class ObservedStep:
    """An iteration that the program says it has done."""

    iteration: int
    seconds: float | None = None
    """That the iteration took; None where the program does not say."""
    consumed_samples: int | None = None
    """After this iteration, since the beginning of the run; None where the program does not say."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What else it says of the iteration, under the names of `metrics.jsonl` where that has one."""


@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint on disk that the program has finished."""

    iteration: int
    path: str
    may_change: bool = False
    """Whether that is known from outside alone: it counts once two looks in a row have found the same files."""


@dataclass(frozen=True, kw_only=True)
class ProgramEnding:
    """How the program says that it ended."""

    outcome: Literal["done", "left", "fatal"]
    """`done`: it has trained all it was to train. `left`: it says that it saved. `fatal`: it would fail again."""
    words: str


ENDED_BY_ITSELF = "the program ended by itself, with exit code 0"
"""How a program without a known last iteration is done."""


class Trainer(Protocol):
    """What the ranks of a run execute, and how an attempt of it is followed."""

    @property
    def leave_signal(self) -> Signals | None:
        """The signal on which every rank saves and leaves; None where a file alone asks for it."""

    @property
    def asked_by(self) -> Sequence[Signals]:
        """Every signal by which the chain asks the program for something."""

    def prepare(self, base: ResumePoint, *, attempt: int) -> list[str]:
        """Make the program start from `base` and from nothing else. Returns what was done for that, in words.

        No rank lives, and nobody follows the program. It is called when an attempt begins, and again before each of its
        further restarts.
        """

    def command(self, begin: AttemptStart) -> list[str]:
        """What a rank of this attempt executes, without what the cluster puts before it."""

    def environment(self, begin: AttemptStart) -> dict[str, str]:
        """Variables of every rank of this attempt, besides those of the chain.

        PYTHONPATH: folders that come before all others.
        """

    def follow(self, begin: AttemptStart, *, signal_ranks: Callable[[Signals], None]) -> AttemptObserver | None:
        """Who writes the records of this attempt; None where the program writes them itself."""


class AttemptObserver(Protocol):
    """Writes the records of an attempt, from beside it and behind it. Every method may raise OSError."""

    def look(self) -> None:
        """Record what is new; ask the program to save or leave where that is due."""

    def conclude(self, exit_code: int | None) -> None:
        """Record what is left, and how the program ended. `exit_code`: of all ranks together, None where unknown."""


class TrainerProgram(Protocol):
    """One attempt of a foreign program, seen from the node of its batch script.

    What its log and files say is read anew by each process that looks: `watch` may be killed and started again.
    Every method may raise OSError.
    """

    def steps(self) -> Sequence[ObservedStep]:
        """The iterations that it has said since the last call, rising; from its beginning for the first call."""

    def checkpoints(self) -> Sequence[FoundCheckpoint]:
        """Every whole checkpoint that is there now, rising."""

    def saving(self) -> int | None:
        """The iteration of a checkpoint that it is writing; None where it writes none."""

    def ask_to_save(self) -> str | None:
        """Have it save and go on. Returns why it cannot, in words; None where it will."""

    def ending(self, exit_code: int | None) -> ProgramEnding | None:
        """How it ended; None where that is not on purpose. `exit_code`: of all ranks together, None where unknown."""
