"""Liveness of a rank: its section and restarts for the node's agent, its heartbeat file, its step and save times.

| section | hangs after |
|---|---|
| forward, optimizer | ten steps at their 99th percentile, at least SHORTEST_STEP_LIMIT |
| data, triggers, report, evaluation | ten steps at their 99th percentile, at least SHORTEST_OTHER_LIMIT |
| save | ten saves at their 95th percentile, at least SHORTEST_OTHER_LIMIT |
| hooks of a user | `chain.hang_timeout` |
| start (loading after a rollback) | never: the supervisor watches it |

Until MEASURED_STEPS steps are measured the limit is `chain.hang_timeout`, which also bounds the two minima. An
evaluation and a long step make progress with each micro-batch.

The main thread writes the heartbeat file, about once a second: a thread of its own would write on while the main thread
hangs. If the node's agent follows the ranks by pages in memory (`SectionReporter`), the file is for people and outside
observers: it is written once a minute, and at once when training starts or, after a rollback, starts again. It is not
synced: after a crash the attempt is over. Only the newest measurements count, since the speed of a run changes; saves
of earlier attempts count until there are enough new ones. Standard library only: the first heartbeat precedes torch.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from relayrun.control.agent import memory_copies
from relayrun.control.agent.hang_detection import ActivityPage
from relayrun.control.rundir import restarts
from relayrun.control.rundir.records import AttemptStart, CheckpointCommit, Heartbeat
from relayrun.control.rundir.time_limit import GRACE_SAVES, GRACE_STEPS, current_grace_period, percentile
from relayrun.errors import warned
from relayrun.files import write_json
from relayrun.train.hooks import Hook, Step, ValidationResult

log = logging.getLogger(__name__)


class RankTimings(Hook):
    """Seconds of the last steps, evaluations and saves on this rank."""

    def __init__(self, begin: AttemptStart) -> None:
        self._begin = begin
        self._steps: deque[float] = deque(maxlen=GRACE_STEPS)
        self.steps_done = 0
        """Steps since this rank started."""
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
        """Record a step with this global batch size; earlier steps with smaller batches are scaled to it."""
        if samples > self._samples:
            if self._samples:
                self._steps = deque((old * samples / self._samples for old in self._steps), maxlen=GRACE_STEPS)
            self._samples = samples
        self._steps.append(seconds)
        self.steps_done += 1

    def save(self, seconds: float) -> None:
        """Record the duration of a save, from its start to its commit; earlier attempts come first."""
        self._saves.append(seconds)

    def evaluation(self, seconds: float) -> None:
        """Record the duration of an evaluation over all validation sets."""
        self._evaluations.append(seconds)

    def expect_evaluation(self, samples: int) -> None:
        """Expect evaluations with this number of samples over all validation sets."""
        self._evaluated_samples = samples

    @property
    def estimates_evaluation(self) -> bool:
        """True if the grace period includes an evaluation that was not measured yet."""
        return bool(self._evaluated_samples and self._steps and not self._evaluations)

    def steps_within(self, share: float) -> float | None:
        """Return the seconds that this share of the steps does not exceed."""
        return percentile(self._steps, share) if self._steps else None

    @property
    def save_p95(self) -> float | None:
        return percentile(self._saves, 0.95) if self._saves else None

    def grace_period(self, *, under_way: float | None = None) -> float:
        """Return the grace period in seconds: the attempt's initial value until steps and saves are measured (plus an
        evaluation), and always if its bounds are equal.

        `under_way`: seconds since the start of the save in progress.
        """
        estimate = 0.0
        if self.estimates_evaluation:  # half a step per batch: a forward pass is a third, and the first one is slow
            estimate = self._evaluated_samples / self._samples * percentile(self._steps, 0.95) / 2
        return current_grace_period(
            self._begin,
            self._steps,
            self._saves,
            under_way=under_way,
            evaluation_seconds=self._evaluations,
            estimate=estimate,
        )


Phase = Literal["start", "step", "save", "evaluation"]
HEARTBEAT_SECONDS = 1.0
"""Seconds between heartbeats of one phase."""
RARE_HEARTBEAT_SECONDS = 60.0
"""Seconds between heartbeats if the node's agent detects hangs; readers wait correspondingly longer."""


@dataclass(kw_only=True)
class NodeHeartbeatWriter:
    """Writes the heartbeat of this node if `active`. `rare`: an agent follows the ranks of this node."""

    folder: Path
    node: str
    active: bool
    iteration: int
    timings: RankTimings
    rare: bool = False
    sections: SectionReporter | None = None
    """Reports sections to the agent, on every rank, once the config is known."""
    phase: Phase = "start"
    """Phase of the main thread; `start` until the first step."""
    _last: float | None = None
    """Time of the last write, by the monotonic clock."""
    _failing: bool = False

    def enter(self, phase: Phase, iteration: int) -> None:
        """Record that the main thread starts `phase`, after `iteration` iterations."""
        if phase != self.phase and (not self.rare or "start" in (phase, self.phase)):
            self._last = None
        self.phase, self.iteration = phase, iteration
        if self.sections is not None:
            self.sections.enter(phase, iteration)
        self.beat()

    def beat(self) -> None:
        """Record progress within the phase."""
        if self.sections is not None:
            self.sections.touch()
        now = time.monotonic()
        if not self.active or (
            self._last is not None and now - self._last < (RARE_HEARTBEAT_SECONDS if self.rare else HEARTBEAT_SECONDS)
        ):
            return
        self._last = now
        beat = Heartbeat(
            node=self.node,
            iteration=self.iteration,
            phase=self.phase,
            time=time.time(),
            step_p95=self.timings.steps_within(0.95),
            save_p95=self.timings.save_p95,
            interval=RARE_HEARTBEAT_SECONDS if self.rare else 0.0,
        )
        try:
            self.folder.mkdir(exist_ok=True)
            write_json(self.folder / f"{self.node}.json", asdict(beat), durable=False)
            self._failing = False
        except OSError as error:  # a full disk must not stop training; one line reports it
            if not self._failing:
                log.warning("heartbeat of %s not written: %s", self.node, error)
            self._failing = True


SHORTEST_STEP_LIMIT = 60.0
SHORTEST_OTHER_LIMIT = 120.0
LIMIT_FACTOR = 10
MEASURED_STEPS = 20
"""Steps before the limits apply, and between their updates."""
STEP_SECTIONS = ("forward", "optimizer")


class SectionReporter:
    """Reports this rank's section; without an agent's `folder` nothing is written."""

    def __init__(self, folder: Path | None, rank: int, *, timings: RankTimings, hang_timeout: float) -> None:
        self._page: ActivityPage | None = None
        self._timings, self._hang_timeout = timings, hang_timeout
        self._measured_at = 0
        self._limits: dict[str, float] = {}
        self._now = "start"
        self._iteration = 0
        if folder is not None:
            with warned(log, "the agent does not learn where this rank stands"):  # the supervisor detects hangs, too
                self._page = ActivityPage(folder, rank)

    def enter(self, section: str, iteration: int | None = None) -> None:
        """Report a section, and the number of iterations done (None: unchanged)."""
        self._now = section
        if iteration is not None:
            self._iteration = iteration
        if self._page is not None:
            self._page.enter(section, self._iteration, self.limit(section))

    def touch(self) -> None:
        """Report progress within the section."""
        if self._page is not None:
            self._page.touch()

    @contextmanager
    def within(self, section: str) -> Iterator[None]:
        """Report `section` inside the `with` block and restore the previous one afterwards."""
        before = self._now
        self.enter(section)
        try:
            yield
        finally:
            self.enter(before)

    def limit(self, section: str) -> float:
        """Return the seconds without progress after which a rank hangs in this section."""
        if self._timings.steps_done - self._measured_at >= MEASURED_STEPS:
            self._measured_at = self._timings.steps_done
            self._limits.clear()
        if section not in self._limits:
            self._limits[section] = self._limit(section)
        return self._limits[section]

    def _limit(self, section: str) -> float:
        usual = self._timings.save_p95 if section == "save" else self._timings.steps_within(0.99)
        if section == "start":  # the supervisor watches it (chain.start_timeout)
            return math.inf
        if section == "hooks" or not self._measured_at or usual is None:
            return self._hang_timeout
        least = SHORTEST_STEP_LIMIT if section in STEP_SECTIONS else SHORTEST_OTHER_LIMIT
        return max(min(least, self._hang_timeout), LIMIT_FACTOR * usual)


AGENT_SOCKET_VARIABLE = "RELAYRUN_AGENT_SOCKET"
"""Descriptor of the agent's socket, in ranks that an agent's server has forked."""


def has_agent() -> bool:
    """True if an agent's server has forked this rank."""
    return AGENT_SOCKET_VARIABLE in os.environ


def tell_agent(kind: str, **values: object) -> None:
    """Send a message to the agent, if there is one. If the agent is gone, this rank ends soon."""
    descriptor = os.environ.get(AGENT_SOCKET_VARIABLE)
    if descriptor is not None:
        with contextlib.suppress(OSError):
            line = json.dumps({"kind": kind, "restart": restart_number(), **values})
            os.write(int(descriptor), line.encode() + b"\n")


class FirstStepNotice(Hook):
    """Notifies the agent after the first step of a restart."""

    def __init__(self) -> None:
        self._told = False

    def after_step(self, step: Step) -> None:
        if not self._told:
            self._told = True
            tell_agent("stepped", time=step.time)


def restart_number() -> int:
    """Return the number of this restart; 1 without an agent."""
    return int(os.environ.get(restarts.RESTART_VARIABLE, "1"))


def memory_folder() -> Path | None:
    """Return the folder for copies of the state in memory; None without an agent."""
    folder = os.environ.get(memory_copies.MEMORY_FOLDER_VARIABLE)
    return Path(folder) if folder else None


def memory_iteration() -> int | None:
    """Return the iteration of the copies that this restart loads; None: load from disk."""
    text = os.environ.get(memory_copies.MEMORY_ITERATION_VARIABLE)
    return None if not text else int(text)


def node_name(environment: Mapping[str, str]) -> str:
    return environment.get("SLURMD_NODENAME") or socket.gethostname()


def is_first_of_node() -> bool:
    return os.environ["LOCAL_RANK"] == "0"
