"""A chain in a time that jumps from event to event: the real coordinator and the real decisions, simulated ranks.

Real: `Coordinator` (restarts, spare nodes, copies in memory, the records of a restart), `decide_at_start` and
`decide_at_end` (the next job). Simulated: ranks, which do steps, copies and saves in the times of a `Setup`; Slurm,
which starts the next job after `queue` seconds with all nodes healthy; faults, which come as messages of agents or as
the loss of a connection. Heartbeats are left out: the time until a fault is noticed is part of the setup.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest import mock

from relayrun.control.agent.coordinator import Coordinator
from relayrun.control.agent.messages import MessageSocket
from relayrun.control.decisions import EndFacts, StartFacts, decide_at_end, decide_at_start
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.files import append_line
from tests.history import began, history_plan
from tests.plans import plan_with

BEGIN = 2e9
FOLDER = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A run and its costs; all times in seconds."""

    nodes: int
    spare_nodes: int = 0
    ranks_per_node: int = 8
    in_job: bool = True
    """Ranks are started again inside the job (`chain.recovery: node`); False: every failure ends the job."""
    seconds: float
    """Length of the run, from its first step on."""
    step: float
    """A step without copies and saves."""
    save_steps: int
    """Steps between two saves; they hold training up for `save_stall`, and are durable after `commit`."""
    save_stall: float = 0.0
    commit: float = 0.0
    copy_steps: int = 0
    """Steps between two copies in memory, which hold training up for `copy_stall`; 0: no copies."""
    copy_stall: float = 0.0
    noticed: dict[str, float]
    """From a fault of each kind (`rank`, `node`, `hang`) until the coordinator knows it."""
    end: float = 0.0
    """Until no rank is left."""
    restart: float
    """From the order to start until the first new step begins, with a state in memory; `disk`: added for another."""
    disk: float = 0.0
    neighbour: float = 0.0
    """Added if a neighbour's copy is sent."""
    max_failed_attempts: int = 3
    """Attempts in a row without a new checkpoint, after which the chain stops (`chain.max_failed_attempts`)."""
    job_limit: float = 1e12
    grace: float = 0.0
    """Before the limit, in which the ranks save and leave."""
    queue: float = 0.0
    job_start: float = 0.0
    """From the start of a job until its first step begins."""


@dataclass
class Outcome:
    """Where the time went."""

    effective: float = 0.0
    """Share of the time in steps that count, without copies and saves."""
    parts: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds by part: restart, redone, next job, saves and copies."""
    restarts: Counter[str] = field(default_factory=Counter)
    """By the source of the state."""
    faults: Counter[str] = field(default_factory=Counter)
    jobs: int = 0
    steps_lost: int = 0
    stopped: str = ""
    """Reason for which the chain stopped before its time."""


class _Link:
    """A connection to an agent that keeps the newest order."""

    def __init__(self) -> None:
        self.order: dict[str, Any] = {}

    def send(self, kind: str, **values: Any) -> None:
        if kind in ("start", "end", "leave", "stacks"):
            self.order = {"kind": kind, **values}


class SimulatedChain:
    """One chain. `faults`: time since the first step, kind, and a number that chooses the rank or node."""

    def __init__(self, setup: Setup, faults: Iterator[tuple[float, str, int]]) -> None:
        self.setup, self._faults = setup, faults
        self.outcome = Outcome()
        self.now = BEGIN
        self._durable = self._saved = 0
        self._from, self._base, self._copied = BEGIN, 0, 0
        """Begin of the first step of the restart, its base, and the newest copy that it started with; -1: none."""
        per_save = setup.save_stall / setup.save_steps
        self._pace = setup.step + per_save + (setup.copy_stall / setup.copy_steps if setup.copy_steps else 0.0)

    def play(self) -> Outcome:
        """Let the run go on for its time."""
        clock = lambda: self.now  # noqa: E731
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder, mock.patch.multiple(time, time=clock, monotonic=clock):
            self._play(Path(folder))
        return self.outcome

    def _play(self, folder: Path) -> None:
        setup, outcome = self.setup, self.outcome
        run = Run(folder / "run")
        run.path.mkdir()
        run.checkpoints.mkdir()
        plan = plan_with(
            history_plan(run, total_steps=1 << 40),
            nodes=setup.nodes,
            spare_nodes=setup.spare_nodes,
            ntasks_per_node=setup.ranks_per_node,
            recovery="node",
            max_failed_attempts=setup.max_failed_attempts,
        )
        self._run, self._plan = run, plan
        self._next = next(self._faults, (1e18, "none", 0))
        until, failed = BEGIN + setup.seconds, 0
        self._restarted(0.0, source="")
        while self.now < until and not outcome.stopped:
            start = decide_at_start(
                StartFacts(
                    stopped=None,
                    durable_iteration=self._durable,
                    total_steps=None,
                    exit_trigger=None,
                    predecessor_cancelled=False,
                    verdict=None,
                    failed_attempts=failed,
                    chain=plan.chain,
                )
            )
            if start.action != "run":
                outcome.stopped = start.reason
                break
            base = self._durable
            left_by_itself = self._job(until)
            if self.now >= until:
                break
            facts = EndFacts(
                outcome="saved" if left_by_itself else None,
                outcome_reason="time limit near" if left_by_itself else "",
                exit_code=0 if left_by_itself else 1,
                hang=None,
                cancelled=False,
                base_iteration=base,
                durable_iteration=self._durable,
                total_steps=None,
                failed_attempts=failed,
                chain=plan.chain,
            )
            decision = decide_at_end(facts)
            if decision.action == "stop":
                outcome.stopped = decision.reason
                break
            failed = 0 if self._durable > base else failed + 1
            self._restarted(decision.delay + setup.queue + setup.job_start, source="next job")
        steps = self._durable if outcome.stopped else self._iteration(until)
        outcome.effective = steps * setup.step / setup.seconds
        outcome.parts["saves and copies"] = steps * (self._pace - setup.step)

    def _job(self, until: float) -> bool:
        """Let one job run; return whether it left by itself, with a save."""
        setup, outcome = self.setup, self.outcome
        outcome.jobs += 1
        number, limit = outcome.jobs, self.now + setup.job_limit - setup.grace
        base = str(self._run.checkpoint(self._durable)) if self._durable else None
        began(self._run, number, base_iteration=self._durable, base_path=base, start_time=self.now)
        self._attempt = self._run.attempt(number)
        self._attempt.failures.mkdir()
        links: dict[int, _Link] = {}
        names = [f"n{node}" for node in range(setup.nodes + setup.spare_nodes)]
        self._links = links
        self._coordinator = coordinator = Coordinator(
            self._run,
            self._plan,
            self._attempt,
            nodes=len(names),
            names=names,
            links=cast("dict[int, MessageSocket]", links),
            say=lambda line: None,
        )
        for node in range(len(names)) if setup.in_job else ():
            links[node] = _Link()
            coordinator.hear(node, {"kind": "hello", "name": names[node], "port": 1})
        while True:
            at, kind, chosen = self._next
            if min(BEGIN + at, limit) >= until:
                self.now = until
                return True
            if BEGIN + at >= limit:
                self.now = limit
                self._durable = self._iteration(limit)
                self._commit()
                self.now += setup.grace
                outcome.parts["next job"] += setup.grace
                return True
            self._next = next(self._faults, (1e18, "none", 0))
            self.now = max(self.now, BEGIN + at)
            outcome.faults[kind] += 1
            if not self._fail(kind, chosen):
                return False

    def _iteration(self, now: float) -> int:
        return self._base + max(0, int((now - self._from) / self._pace + 1e-9))

    def _restarted(self, seconds: float, *, source: str) -> None:
        """Note that the ranks begin their next step so many seconds from now, with the durable state."""
        self.outcome.parts["next job"] += seconds
        self.now += seconds
        self._from, self._base, self._copied = self.now, self._durable, -1
        if source:
            self.outcome.restarts[source] += 1

    def _commit(self) -> None:
        """Write the records of the newest durable checkpoint, and remove the one before."""
        if self._durable == self._saved:
            return
        folder = self._run.checkpoint(self._durable)
        folder.mkdir()
        (folder / "data").write_bytes(b"12345")
        made = CheckpointCommit(
            iteration=self._durable,
            path=str(folder),
            consumed_samples=self._durable,
            time=self.now,
            seconds=self.setup.commit,
            files={"data": 5},
        )
        self._attempt.append_commit(made)
        if self._saved:
            shutil.rmtree(self._run.checkpoint(self._saved))
        self._saved = self._durable

    def _fail(self, kind: str, chosen: int) -> bool:
        """Let a fault happen now; return whether the ranks start again inside the job."""
        setup, outcome, coordinator = self.setup, self.outcome, self._coordinator
        reached, failed_at = self._iteration(self.now), self.now
        newest = self._iteration(self.now - setup.commit) // setup.save_steps * setup.save_steps
        self._durable = max(self._durable, newest)
        copied = self._copied
        if setup.copy_steps and (done := (reached - self._base) // setup.copy_steps * setup.copy_steps):
            copied = self._base + done
        if reached:
            append_line(self._attempt.metrics, {"iteration": reached}, durable=False)
        self._commit()
        self.now += setup.noticed[kind]
        if not setup.in_job:
            outcome.steps_lost += reached - self._durable
            outcome.parts["redone"] += (reached - self._durable) * self._pace
            outcome.parts["restart"] += self.now - failed_at
            return False
        places = coordinator._places
        at = chosen % setup.nodes
        node, number = places.nodes[at], coordinator._current.number
        if kind == "node":
            del self._links[node]
            coordinator.lose(node, "its agent is gone")
        elif kind == "rank":
            rank = at * setup.ranks_per_node
            dead = {"kind": "dead", "restart": number, "rank": rank, "code": -9, "error": "", "told": False}
            coordinator.hear(node, dead)
        else:
            self._hang(reached)
        self.now += setup.end
        self._end(copied)
        if coordinator.code is not None:
            outcome.steps_lost += reached - self._durable
            outcome.parts["redone"] += (reached - self._durable) * self._pace
            outcome.parts["restart"] += self.now - failed_at
            return False
        source = coordinator._current.source
        outcome.restarts[source] += 1
        self._base = coordinator._current.base
        self._copied = copied if source != "disk" else -1
        self.now += setup.restart + {"disk": setup.disk, "neighbour": setup.neighbour}.get(source, 0.0)
        self._from = self.now
        outcome.steps_lost += reached - self._base
        outcome.parts["redone"] += (reached - self._base) * self._pace
        outcome.parts["restart"] += self.now - failed_at
        return True

    def _hang(self, iteration: int) -> None:
        """Report ranks that stand still, as their agents do, until the coordinator ends them."""
        coordinator, ranks = self._coordinator, self.setup.ranks_per_node
        for place, node in enumerate(coordinator._places.nodes):
            one = range(place * ranks, (place + 1) * ranks)
            standing = [[rank, 9, "forward", iteration, 301.0, 300.0, ""] for rank in one]
            beat = {"kind": "beat", "restart": coordinator._current.number, "standing": standing}
            coordinator.hear(node, beat)
        for _ in range(2):
            coordinator.look()
            self.now += 2.1
        coordinator.look()

    def _end(self, copied: int) -> None:
        """Let each agent report that its ranks are gone, with the copies in its memory."""
        coordinator, ranks, memory = self._coordinator, self.setup.ranks_per_node, bool(self.setup.copy_steps)
        nodes = list(coordinator._places.nodes)
        place_of = {node: place for place, node in enumerate(nodes)}
        for node, link in list(self._links.items()):
            if link.order["kind"] != "end":
                continue
            place, found = place_of.get(node), list[tuple[int, int, str, bool]]()
            if place is not None and memory and copied >= 0:
                own = range(place * ranks, (place + 1) * ranks)
                before = (place - 1) % len(nodes)
                kept = range(before * ranks, (before + 1) * ranks)
                found = [(rank, copied, "h", False) for rank in own] + [(rank, copied, "h", True) for rank in kept]
            message = {"restart": link.order["restart"], "memory": found, "port": 1, "facts": {}}
            coordinator.hear(node, {"kind": "ended", **message})
