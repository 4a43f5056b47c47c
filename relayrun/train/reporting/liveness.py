"""Liveness of a rank: its section and restarts for the node's agent, its heartbeat file, its step and save times.

The standard library alone, so that the first heartbeat comes before torch is imported.

| section | stands still too long after |
|---|---|
| forward, optimizer | ten steps at their 99th percentile, at least STEP_SECONDS |
| data, triggers, report, evaluation | the same, at least OTHER_SECONDS |
| save | ten saves at their 95th percentile, at least OTHER_SECONDS |
| hooks (a user's own) | `chain.hang_timeout` |
| start (loading after a rewind) | never: the supervisor looks after it |

Before STEPS steps are measured it is `chain.hang_timeout`, which is also the most that the two least numbers may be.
An evaluation and a long step come further with each micro-batch. Standard library only.

It comes once a second. Where an agent of the node sees by its pages of memory how far the ranks are
(`SectionReporter`), the file is for people and for who asks from outside whether the attempt lives: it comes once
a minute, and at once where training begins or, after a rewind, begins anew.

It is written by the main thread where that makes progress, never by a thread of its own: that would beat
on while the main thread hangs. Not synced to disk: an old beat after a crash misleads nobody, since
the attempt is over. Standard library only, so that the first beat comes before torch is imported.

A run changes its speed, so only the newest measurements count. Saves of earlier attempts count until this
one has made enough of its own. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import socket
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from relayrun.control.agent import memory_copies
from relayrun.control.agent.hang_detection import ActivityPage
from relayrun.control.rundir import restarts
from relayrun.control.rundir.records import AttemptStart, CheckpointCommit, Heartbeat
from relayrun.control.rundir.time_limit import GRACE_SAVES, GRACE_STEPS, current_grace_period, percentile
from relayrun.files import write_json
from relayrun.train.hooks import Hook, Step, ValidationResult

AGENT_SOCKET_VARIABLE = "RELAYRUN_AGENT_SOCKET"
"""Has the descriptor of the agent's socket, in the ranks that a server of an agent has forked."""


def has_agent() -> bool:
    """Whether a server of an agent has forked this rank."""
    return AGENT_SOCKET_VARIABLE in os.environ


def restart_number() -> int:
    """The round of this rank; 1 where there are no rounds."""
    return int(os.environ.get(restarts.RESTART_VARIABLE, "1"))


def memory_folder() -> Path | None:
    """Where this rank may keep copies of its state in memory; None where there is no agent."""
    folder = os.environ.get(memory_copies.MEMORY_FOLDER_VARIABLE)
    return Path(folder) if folder else None


def memory_iteration() -> int | None:
    """The iteration whose copies this round starts from; None: from the disk."""
    text = os.environ.get(memory_copies.MEMORY_ITERATION_VARIABLE)
    return None if not text else int(text)


def tell_agent(kind: str, **values: object) -> None:
    """Tell the agent something; nothing where there is none. The agent may be gone, and then so is this rank."""
    descriptor = os.environ.get(AGENT_SOCKET_VARIABLE)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            line = json.dumps({"kind": kind, "round": restart_number(), **values})
            os.write(int(descriptor), line.encode() + b"\n")


class FirstStepNotice(Hook):
    """Tells the agent when the first step of a round is done."""

    def __init__(self) -> None:
        self._told = False

    def after_step(self, step: Step) -> None:
        if not self._told:
            self._told = True
            tell_agent("stepped", time=step.time)


class Timings(Hook):
    """Seconds of the last steps, evaluations and saves on this rank."""

    def __init__(self, begin: AttemptStart) -> None:
        self._begin = begin
        self._steps: deque[float] = deque(maxlen=GRACE_STEPS)
        self.steps_done = 0
        """Steps that were measured since this rank started."""
        self._samples = 0
        self._saves: deque[float] = deque(maxlen=GRACE_SAVES)
        known = [] if begin.evaluation_seconds is None else [begin.evaluation_seconds]
        self._evaluations: deque[float] = deque(known, maxlen=GRACE_SAVES)
        self._evaluated_samples = 0

    def after_step(self, step: Step) -> None:
        self.step(step.step_seconds + (step.hooks_seconds or 0.0), step.global_batch_size)

    def after_save(self, commit: CheckpointCommit) -> None:
        self.save(commit.seconds)

    def at_evaluation(self, result: ValidationResult) -> None:
        self.evaluation(result.seconds)

    def step(self, seconds: float, samples: int) -> None:
        """A step with this global batch size; the steps of smaller ones before it count as if they had had this one."""
        if samples > self._samples:
            if self._samples:
                self._steps = deque((old * samples / self._samples for old in self._steps), maxlen=GRACE_STEPS)
            self._samples = samples
        self._steps.append(seconds)
        self.steps_done += 1

    def save(self, seconds: float) -> None:
        """A save took so long, from its start to its commit; those of earlier attempts come first."""
        self._saves.append(seconds)

    def evaluation(self, seconds: float) -> None:
        """An evaluation took so many seconds, all validation sets together."""
        self._evaluations.append(seconds)

    def expect_evaluation(self, samples: int) -> None:
        """There will be evaluations, of this many samples over all validation sets."""
        self._evaluated_samples = samples

    @property
    def estimates_evaluation(self) -> bool:
        """Whether the lead has room for an evaluation although the run has measured none."""
        return bool(self._evaluated_samples and self._steps and not self._evaluations)

    @property
    def step_median(self) -> float | None:
        return percentile(self._steps, 0.5) if self._steps else None

    @property
    def step_p95(self) -> float | None:
        return percentile(self._steps, 0.95) if self._steps else None

    @property
    def step_p99(self) -> float | None:
        return percentile(self._steps, 0.99) if self._steps else None

    @property
    def save_p95(self) -> float | None:
        return percentile(self._saves, 0.95) if self._saves else None

    def lead(self, *, under_way: float | None = None) -> float:
        """Seconds before the end of the job at which to leave; what the attempt began with until steps and saves
        are measured (with room for an evaluation), and for good where its bounds leave no choice.

        `under_way`: seconds since the start of a save that is not over.
        """
        estimate = self._estimated_evaluation() if self.estimates_evaluation else 0.0
        return current_grace_period(
            self._begin,
            self._steps,
            self._saves,
            under_way=under_way,
            evaluation_seconds=self._evaluations,
            estimate=estimate,
        )

    def _estimated_evaluation(self) -> float:
        """Half a step for each batch: a forward pass is a third of a step's work, and the first one is slow."""
        return self._evaluated_samples / self._samples * percentile(self._steps, 0.95) / 2


log = logging.getLogger(__name__)

SHORTEST_STEP_LIMIT = 60.0
SHORTEST_OTHER_LIMIT = 120.0
LIMIT_FACTOR = 10
MEASURED_STEPS = 20
"""Steps that must be measured; the limits follow after so many more."""
STEP_SECTIONS = ("forward", "optimizer")


class SectionReporter:
    """This rank's sections; nothing is written where no agent has a folder for them."""

    def __init__(self, folder: Path | None, rank: int, *, timings: Timings, hang_timeout: float) -> None:
        self._page: ActivityPage | None = None
        self._timings, self._hang_timeout = timings, hang_timeout
        self._measured_at = 0
        self._limits: dict[str, float] = {}
        self._now = "start"
        self._iteration = 0
        if folder is not None:
            try:
                self._page = ActivityPage(folder, rank)
            except OSError as error:  # the supervisor looks for hangs, too
                log.warning("the agent does not learn where this rank stands: %s", error)

    def enter(self, section: str, iteration: int | None = None) -> None:
        """This rank is now in this section, with so many iterations behind it (None: as before)."""
        self._now = section
        if iteration is not None:
            self._iteration = iteration
        if self._page is not None:
            self._page.enter(section, self._iteration, self.limit(section))

    def touch(self) -> None:
        """This rank came further within its section."""
        if self._page is not None:
            self._page.touch()

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """Inside it is this section, and then again the one before."""
        before = self._now
        self.enter(section)
        try:
            yield
        finally:
            self.enter(before)

    def limit(self, section: str) -> float:
        """Seconds without coming further after which a rank hangs in this section."""
        if self._timings.steps_done - self._measured_at >= MEASURED_STEPS:
            self._measured_at = self._timings.steps_done
            self._limits.clear()
        if section not in self._limits:
            self._limits[section] = self._limit(section)
        return self._limits[section]

    def _limit(self, section: str) -> float:
        usual = self._timings.save_p95 if section == "save" else self._timings.step_p99
        if section == "start":  # the supervisor looks after it (chain.start_timeout)
            return math.inf
        if section == "hooks" or not self._measured_at or usual is None:
            return self._hang_timeout
        least = SHORTEST_STEP_LIMIT if section in STEP_SECTIONS else SHORTEST_OTHER_LIMIT
        return max(min(least, self._hang_timeout), LIMIT_FACTOR * usual)


Phase = Literal["start", "step", "save", "evaluation"]

HEARTBEAT_SECONDS = 1.0
"""Between two beats of one phase."""
RARE_HEARTBEAT_SECONDS = 60.0
"""Between two beats where the agent of the node looks for hangs; whoever reads them waits for so much longer."""


def node_name(environment: Mapping[str, str]) -> str:
    """Slurm's name of this node, or the host's where there is no Slurm."""
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


class HeartbeatWriter:
    """Writes the heartbeat of this node; does nothing where `active` is False.

    `rare`: the agent of this node sees how far its ranks are without it.
    """

    def __init__(
        self, folder: Path, *, node: str, active: bool, iteration: int, timings: Timings, rare: bool = False
    ) -> None:
        self._folder = folder
        self.node = node
        self._active = active
        self._rare = rare
        self._iteration = iteration
        self._phase: Phase = "start"
        self._timings = timings
        self._last: float | None = None
        """When it was last written, by the monotonic clock."""
        self._failing = False
        self.sections: SectionReporter | None = None
        """What the agent of this node is told besides, on every rank, once the config is known."""

    @property
    def phase(self) -> Phase:
        """What the main thread does now; `start` until the first step."""
        return self._phase

    def enter(self, phase: Phase, iteration: int) -> None:
        """The main thread now does `phase`, with `iteration` iterations behind it."""
        if phase != self._phase and (not self._rare or "start" in (phase, self._phase)):
            self._last = None
        self._phase, self._iteration = phase, iteration
        if self.sections is not None:
            self.sections.enter(phase, iteration)
        self.beat()

    def beat(self) -> None:
        """The main thread came further within its phase."""
        if self.sections is not None:
            self.sections.touch()
        now = time.monotonic()
        if not self._active or (
            self._last is not None and now - self._last < (RARE_HEARTBEAT_SECONDS if self._rare else HEARTBEAT_SECONDS)
        ):
            return
        self._last = now
        beat = Heartbeat(
            node=self.node,
            iteration=self._iteration,
            phase=self._phase,
            time=time.time(),
            step_p95=self._timings.step_p95,
            save_p95=self._timings.save_p95,
            interval=RARE_HEARTBEAT_SECONDS if self._rare else 0.0,
        )
        try:
            self._folder.mkdir(exist_ok=True)
            write_json(self._folder / f"{self.node}.json", asdict(beat), durable=False)
            self._failing = False
        except OSError as error:  # a full disk is no reason to stop; one line says it
            if not self._failing:
                log.warning("heartbeat of %s not written: %s", self.node, error)
            self._failing = True


def is_first_of_node() -> bool:
    return os.environ["LOCAL_RANK"] == "0"
