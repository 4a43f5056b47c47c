"""The health of a job's nodes: what the agent of each node gathers, and what the coordinator does about it.

    agent → coordinator    health {facts} · clock {sent, here}
                           · probing · probed {matmul, exchange, on, wrong, devices, error}
    coordinator → agent    clock {sent} · probe {place, nodes, address, port}

Before the first start of the ranks each node reports its facts and is measured; between restarts it reports what
takes milliseconds. An agent gathers facts in threads, since a file system may hang. `agent.node_findings` judges.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from relayrun.control.agent import node_facts, node_findings
from relayrun.control.agent.job_nodes import NodeRanks
from relayrun.control.agent.messages import Message, MessageSocket
from relayrun.control.agent.node_facts import NodeFacts, TimedProgram
from relayrun.control.agent.node_findings import MEMORY_OF_RANKS
from relayrun.control.rundir import node_health
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.node_health import HealthFinding, NodeChecks, NodeHistory
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run

T = TypeVar("T")


class BackgroundWork:
    """What is done beside the thread that made this, and what that thread does with it then.

    Args:
        watch: where the end of each piece is registered; the data of each key is what to call then.
    """

    def __init__(self, watch: selectors.BaseSelector) -> None:
        self._done: SimpleQueue[tuple[int, Callable[[], None]]] = SimpleQueue()
        self._until: dict[int, tuple[float, Callable[[], None]]] = {}
        """When each piece has had its time, by `time.monotonic`, and what to do then."""
        self._number = 0
        self._heard, self._told = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(self._told, False)
        watch.register(self._heard, selectors.EVENT_READ, self._take)

    def start(
        self,
        work: Callable[[], T],
        then: Callable[[T], None],
        *,
        seconds: float,
        otherwise: Callable[[str], T],
    ) -> None:
        """Do `work` in a thread, and call `then` with its result in this one, by `attend` or the selector.

        After so many `seconds`, or where it raises, `then` is called with what `otherwise` makes of the words for that.
        """
        self._number += 1
        number = self._number
        self._until[number] = (
            time.monotonic() + seconds,
            lambda: then(otherwise(f"no answer within {seconds:g} s")),
        )

        def run() -> None:
            try:
                result = work()
            except Exception as error:
                words = f"{type(error).__name__}: {error}"
                self._done.put((number, lambda: then(otherwise(words))))
            else:
                self._done.put((number, lambda: then(result)))
            with contextlib.suppress(BlockingIOError):  # then it is awake
                os.write(self._told, b".")

        threading.Thread(target=run, name="aside", daemon=True).start()

    def attend(self) -> None:
        """Now and then: take what is done, and see whose time is over."""
        self._take()
        now = time.monotonic()
        for number, (until, late) in [*self._until.items()]:
            if now > until and self._until.pop(number, None) is not None:
                late()

    def _take(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._heard, 4096)
        with contextlib.suppress(Empty):
            while True:
                number, then = self._done.get_nowait()
                if self._until.pop(number, None) is not None:  # else its time was over
                    then()


CLOCK_QUESTIONS = 5
"""So many are asked at a time."""


class ClockOffsets:
    """The offsets of the nodes' clocks against this one, by node number."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[float, float]] = {}
        """Half of the time that the fastest answer took, and the offset by it."""

    def ask(self, links: Mapping[int, MessageSocket], nodes: Collection[int]) -> None:
        """Ask these nodes anew; what was known of them is forgotten."""
        for node in nodes:
            self._found.pop(node, None)
            for _ in range(CLOCK_QUESTIONS):
                links[node].send("clock", sent=time.time())

    def hear(self, node: int, answer: Message) -> None:
        """Take an answer that has just come."""
        sent, here, now = float(answer["sent"]), float(answer["here"]), time.time()
        half = max(0.0, now - sent) / 2
        self._found[node] = min(self._found.get(node, (float("inf"), 0.0)), (half, here - sent - half))

    def offsets(self) -> dict[int, tuple[float, float]]:
        """Offset of each node against the median of all, and how uncertain it is; seconds. Empty below two nodes."""
        if len(self._found) < 2:
            return {}
        middle = statistics.median(offset for _, offset in self._found.values())
        return {node: (offset - middle, half) for node, (half, offset) in self._found.items()}


FACTS_SECONDS = 10.0
"""How much longer than the site's own check the whole look may take: a disk may hang."""
BETWEEN_SECONDS = 5.0
"""How long GPUs may take to answer between two restarts."""
FOLDERS_SECONDS = 10.0
"""How long the file systems may take to answer between two restarts."""
MARGIN_SECONDS = 2.0
"""How much longer a program is waited for than it has itself."""


class LocalNodeHealth:
    """The health of this node.

    Args:
        arguments: of a program of this run and attempt.
        attempt: the folder of the attempt.
        aside: where programs and file systems are waited for.
    """

    def __init__(self, checks: NodeChecks, arguments: list[str], attempt: Path, *, aside: BackgroundWork) -> None:
        self._checks, self._arguments, self._attempt, self._aside = checks, arguments, attempt, aside
        self._running = False
        """Whether a program is waited for; and which it is, when it has been started."""
        self._program: TimedProgram | None = None
        self._then: Callable[[NodeFacts], None] | None = None
        """What is told what is found, once the program has answered."""
        self._found: Callable[[int | None, str], NodeFacts] = _facts_of_answer
        self._early: NodeFacts = {}
        """What was found before anybody was to be told."""
        self._unknown = False
        """Whether nothing is known of GPUs here; it has been said once."""
        self._most = self._least = 0
        """Free memory when ranks were started, and the least since then."""

    def look(self, then: Callable[[NodeFacts], None]) -> None:
        """Look at all, and call `then` with it."""
        command = [sys.executable, "-P", "-m", "relayrun.control.agent.node_facts", *self._arguments]
        self._found, self._then = _facts_of_answer, then
        self._begin(command, FACTS_SECONDS + self._checks.limits.command_seconds * bool(self._checks.command))

    def ranks_start(self) -> None:
        """Ranks are about to take memory."""
        self._most = self._least = node_facts.available_memory() or 0

    def ranks_run(self) -> None:
        """Now and then: see how much they have taken."""
        if self._most:
            self._least = min(self._least, node_facts.available_memory() or self._least)

    def ranks_end(self) -> None:
        """Ranks are being ended: GPUs can be asked meanwhile."""
        if self._checks.gpus and self._checks.gpu_program and not self._running and not self._unknown:
            self._found, self._early = node_facts.gpu_facts, {}
            self._begin(self._checks.gpu_program, BETWEEN_SECONDS)

    def look_between(self, then: Callable[[NodeFacts], None], *, copies: Path | None) -> None:
        """No rank is left: look at what takes milliseconds, and call `then` with it when GPUs have answered, too.

        `copies`: the folder of ranks' copies in memory, which the next ranks take over.
        """
        taken, self._most, self._least = self._most - self._least, 0, 0

        def look(found: NodeFacts) -> None:
            if found["memory"] is not None and copies is not None:
                with contextlib.suppress(OSError):
                    found["memory"] += sum(path.stat().st_size for path in copies.glob("*"))
            if taken > 0:
                found[MEMORY_OF_RANKS] = taken
            if self._running:
                self._then = lambda of_gpus: then(found | of_gpus)
            else:
                early, self._early = self._early, {}
                then(found | early)

        self._aside.start(
            lambda: node_facts.quick_facts(self._attempt),
            look,
            seconds=FOLDERS_SECONDS,
            otherwise=lambda words: {
                "memory": node_facts.available_memory(),
                "answer": f"its folders cannot be looked at: {words}",
            },
        )

    def end(self) -> None:
        """Wait for nothing any more."""
        if self._program is not None:
            self._program.end()

    def _begin(self, command: Sequence[str], seconds: float) -> None:
        """Start a program, aside: what it is loaded from may hang, too."""
        self._running = True

        def run() -> tuple[int | None, str]:
            self._program = TimedProgram(command, seconds)
            return self._program.wait()

        self._aside.start(run, self._ended, seconds=seconds + MARGIN_SECONDS, otherwise=lambda words: (None, words))

    def _ended(self, answer: tuple[int | None, str]) -> None:
        """It has said something, or its time is over."""
        self._running, self._program = False, None
        found, then, self._then = self._found(*answer), self._then, None
        self._unknown = self._unknown or "gpu_error" in found
        if then is None:
            self._early = found
        else:
            then(found)


def _facts_of_answer(code: int | None, output: str) -> NodeFacts:
    """What `agent.node_facts` printed; `answer` in words where it did not."""
    try:
        found = json.loads(output.splitlines()[-1]) if code == 0 else None
    except (ValueError, IndexError):
        found = None
    if isinstance(found, dict):
        return found
    words = " ".join(output.split())[-node_facts.OUTPUT_CHARACTERS :]
    return {"answer": f"its own look did not end well: {words or f'exit code {code}'}"}


PROBE_SECONDS = 60.0
"""How long the measurement may take from when it has begun on every node; imports before that may take long."""


def job_health_of(run: Run, plan: Plan, attempt: Attempt, *, say: Callable[[str], None]) -> JobHealth | None:
    """Return what sees to the health of this attempt's nodes; None where the plan has nobody look."""
    looked_for = NodeChecks.of_plan(plan)
    return None if looked_for is None else JobHealth(run, attempt, looked_for, say=say)


class JobHealth:
    """What is known of the nodes of an attempt.

    Args:
        plan: what is looked for.
        say: writes a line into the job's log.
    """

    def __init__(self, run: Run, attempt: Attempt, checks: NodeChecks, *, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._checks, self._say = run, attempt, checks, say
        self._history = NodeHistory.of(run)
        self._clocks = ClockOffsets()
        self._facts: dict[int, Mapping[str, Any]] = {}
        self._probes: dict[int, Mapping[str, Any]] = {}
        self._asked: set[int] = set()
        """Nodes that are to be measured."""
        self._begun: dict[int, float] = {}
        """When each of them began with it, by `time.monotonic`."""

    def hear(self, node: int, message: Message, *, name: str) -> None:
        """Take what a node says of itself, of its clock, or what was measured on it."""
        if message["kind"] == "clock":
            self._clocks.hear(node, message)
        elif message["kind"] == "health":
            self._facts[node] = message["facts"]
            taken = message["facts"].get(node_findings.MEMORY_OF_RANKS)
            if taken:
                self._remember(name, "", **{node_findings.MEMORY_OF_RANKS: float(taken)})
        elif message["kind"] == "probing":
            self._begun[node] = time.monotonic()
        elif message["kind"] == "probed" and node in self._asked and node not in self._probes:
            self._begun.setdefault(node, time.monotonic())
            self._probes[node] = message

    def ask_for_clocks(self, links: Mapping[int, MessageSocket], nodes: Collection[int]) -> None:
        """Ask these nodes what time it is; what they say is there soon."""
        self._clocks.ask(links, nodes)

    def knows(self, node: int) -> bool:
        """Whether this node has said how it is."""
        return node in self._facts

    def probe(
        self, links: Mapping[int, MessageSocket], nodes: Collection[int], *, address: str | None, port: int
    ) -> None:
        """Have these nodes measured. `address`, `port`: where they meet; None: at MASTER_ADDR."""
        self._asked = set(nodes)
        for place, node in enumerate(sorted(nodes)):
            links[node].send("probe", place=place, nodes=len(nodes), address=address, port=port)

    def probed(self, nodes: Collection[int]) -> bool:
        """Whether those of these nodes that are measured have said how it went, or have had the time."""
        asked = self._asked & set(nodes)
        missing = asked - self._probes.keys()
        begun = [self._begun[node] for node in asked if node in self._begun]
        if missing and len(begun) == len(asked) and time.monotonic() - max(begun) > PROBE_SECONDS:
            late: Message = {"kind": "probed", "error": f"no answer within {PROBE_SECONDS:.0f} s"}
            self._probes |= dict.fromkeys(missing, late)
            missing = set()
        return not missing

    def look(self, names: Mapping[int, str], places: NodeRanks, *, ended_restart: int) -> tuple[dict[int, str], bool]:
        """Judge these nodes by what was heard since the last look, and put on record what is wrong with them.

        Returns the nodes that are to be left out, each with the reason, and whether the attempt ends: where a sick one
        cannot be spared. `ended_restart`: the one that is over; 0 before the first.
        """
        found: list[HealthFinding] = []
        offsets = self._clocks.offsets()
        for node, name in names.items():
            if (facts := self._facts.pop(node, None)) is not None:
                found += node_findings.findings_of_facts(name, facts, self._checks, self._history)
                if node in offsets:
                    found += node_findings.findings_of_clock(name, *offsets[node], self._checks)
            if (probe := self._probes.pop(node, None)) is not None:
                found += node_findings.findings_of_probe(name, probe, self._checks, self._history)
                values = {key: float(probe[key]) for key in node_findings.MEASUREMENTS if probe.get(key) is not None}
                if values:
                    self._remember(name, str(probe.get("on", "")), **values)
        now = time.time()
        found = [replace(each, restart=ended_restart, time=now) for each in found]
        found, sick = node_findings.judge_findings(found, nodes=len(names), mode=self._checks.mode)
        actions = node_findings.decide_actions(sick, left=places.left, fitting=places.fitting)
        for each in found:
            chosen = sick.get(each.node) is each
            self._record(each.done(*actions[each.node]) if chosen else each)
        left_out = {
            node: f"{sick[name].words} (node health)"
            for node, name in names.items()
            if name in sick and actions[name][0] != "warned"
        }
        return left_out, any(action == "ended" for action, _ in actions.values())

    def _record(self, found: HealthFinding) -> None:
        """Put a finding on record, and tell people of it."""
        self._say(found.told)
        try:
            node_health.record_finding(self._attempt, found)
        except OSError as error:
            self._say(f"that is not on record: {error}")

    def _remember(self, name: str, on: str, **values: float) -> None:
        with contextlib.suppress(OSError):
            node_health.record_measurement(
                self._run, attempt=self._attempt.number, time=time.time(), node=name, on=on, **values
            )
