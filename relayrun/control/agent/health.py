"""The health of a job's nodes: what the agent of each node gathers, and what the coordinator does about it.

    agent → coordinator    health {facts} · clock {sent, here}
    coordinator → agent    clock {sent}

Before the first start of the ranks each node reports its facts; between restarts it reports what takes milliseconds. An
agent gathers facts in threads, since a file system may hang. `agent.node_facts` judges.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import statistics
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from relayrun.control.agent import node_facts
from relayrun.control.agent.job_nodes import NodeRanks
from relayrun.control.agent.messages import Message, MessageSocket
from relayrun.control.agent.node_facts import NodeFacts, TimedProgram
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.node_health import HealthFinding
from relayrun.control.rundir.plan import Plan

T = TypeVar("T")


class BackgroundWork:
    """Runs work in threads; the thread that made this object gets the results.

    Args:
        watch: the end of each piece is registered here; the data of its key is the function to call.
    """

    def __init__(self, watch: selectors.BaseSelector) -> None:
        self._done: SimpleQueue[tuple[int, Callable[[], None]]] = SimpleQueue()
        self._until: dict[int, tuple[float, Callable[[], None]]] = {}
        """Deadline of each piece by `time.monotonic`, and the function to call then."""
        self._number = 0
        self._heard, self._told = os.pipe()
        os.set_blocking(self._heard, False)
        os.set_blocking(self._told, False)
        watch.register(self._heard, selectors.EVENT_READ, self._take)

    def start(
        self, work: Callable[[], T], then: Callable[[T], None], *, seconds: float, otherwise: Callable[[str], T]
    ) -> None:
        """Run `work` in a thread, and call `then` with its result in this thread, by `attend` or the selector. After
        `seconds`, or after an error, `then` gets the result of `otherwise` for the error's words."""
        self._number += 1
        number = self._number
        self._until[number] = time.monotonic() + seconds, lambda: then(otherwise(f"no answer within {seconds:g} s"))

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
        """Take finished work, and end overdue work; called now and then."""
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
"""Number of questions to one clock at a time."""


class ClockOffsets:
    """The offsets of the nodes' clocks against this one, by node number."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[float, float]] = {}
        """Half of the fastest answer's round trip, and the offset by that answer."""

    def ask(self, links: Mapping[int, MessageSocket], nodes: Collection[int]) -> None:
        """Ask these nodes again; earlier answers are forgotten."""
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
        """Return each node's offset from the median and its uncertainty, in seconds; empty below two nodes."""
        if len(self._found) < 2:
            return {}
        middle = statistics.median(offset for _, offset in self._found.values())
        return {node: (offset - middle, half) for node, (half, offset) in self._found.items()}


FACTS_SECONDS = 10.0
"""Seconds for all facts, besides the limit of the site's own check: a disk may hang."""
BETWEEN_SECONDS = 5.0
"""Seconds for GPUs to answer between two restarts."""
FOLDERS_SECONDS = 10.0
"""Seconds for file systems to answer between two restarts."""
MARGIN_SECONDS = 2.0
"""Seconds of waiting for a program beyond its own time limit."""


class LocalNodeHealth:
    """The health of this node.

    Args:
        arguments: of a program of this run and attempt.
        attempt: the folder of the attempt.
        aside: waits for programs and file systems.
    """

    def __init__(self, plan: Plan, arguments: list[str], attempt: Path, *, aside: BackgroundWork) -> None:
        self._plan, self._arguments, self._attempt, self._aside = plan, arguments, attempt, aside
        self._running = False
        """A program is awaited; `_program` is set once it has started."""
        self._program: TimedProgram | None = None
        self._then: Callable[[NodeFacts], None] | None = None
        """Gets the facts when the program has answered."""
        self._found: Callable[[int | None, str], NodeFacts] = _facts_of_answer
        self._early: NodeFacts = {}
        """Facts that were found before `_then` was set."""
        self._unknown = False
        """GPUs cannot be examined here; people were told once."""

    def look(self, then: Callable[[NodeFacts], None]) -> None:
        """Gather all facts, and call `then` with them."""
        command = [sys.executable, "-P", "-m", "relayrun.control.agent.node_facts", *self._arguments]
        self._found, self._then = _facts_of_answer, then
        chain = self._plan.chain
        seconds = chain.node_health_limits.command_seconds if chain.node_health_command else 0.0
        self._begin(command, FACTS_SECONDS + seconds)

    def ranks_end(self) -> None:
        """Ask GPUs while the ranks are ended."""
        if self._plan.gpus_per_node and self._plan.gpu_program and not self._running and not self._unknown:
            self._found, self._early = node_facts.gpu_facts, {}
            self._begin(self._plan.gpu_program, BETWEEN_SECONDS)

    def look_between(self, then: Callable[[NodeFacts], None]) -> None:
        """Gather quick facts after the end of all ranks; call `then` with them when GPUs have answered, too."""

        def look(found: NodeFacts) -> None:
            if self._running:
                self._then = lambda of_gpus: then(found | of_gpus)
            else:
                early, self._early = self._early, {}
                then(found | early)

        def failed(words: str) -> NodeFacts:
            return {"answer": f"its folders cannot be looked at: {words}"}

        quick_facts = partial(node_facts.quick_facts, self._attempt)
        self._aside.start(quick_facts, look, seconds=FOLDERS_SECONDS, otherwise=failed)

    def end(self) -> None:
        """End the program that is awaited."""
        if self._program is not None:
            self._program.end()

    def _begin(self, command: Sequence[str], seconds: float) -> None:
        """Start a program in the background: the disk that it is loaded from may hang, too."""
        self._running = True

        def run() -> tuple[int | None, str]:
            self._program = TimedProgram(command, seconds)
            return self._program.wait()

        self._aside.start(run, self._ended, seconds=seconds + MARGIN_SECONDS, otherwise=lambda words: (None, words))

    def _ended(self, answer: tuple[int | None, str]) -> None:
        self._running, self._program = False, None
        found, then, self._then = self._found(*answer), self._then, None
        self._unknown = self._unknown or "gpu_error" in found
        if then is None:
            self._early = found
        else:
            then(found)


def _facts_of_answer(code: int | None, output: str) -> NodeFacts:
    """Return the facts that `agent.node_facts` printed; without them `answer` has the error."""
    if (found := node_facts.printed_facts(code, output)) is not None:
        return found
    words = " ".join(output.split())[-node_facts.OUTPUT_CHARACTERS :]
    return {"answer": f"its own look did not end well: {words or f'exit code {code}'}"}


class JobHealth:
    """The health of the nodes of an attempt. `say`: writes a line into the job's log."""

    def __init__(self, attempt: Attempt, plan: Plan, *, say: Callable[[str], None]) -> None:
        self._attempt, self._plan, self._say = attempt, plan, say
        self._clocks = ClockOffsets()
        self._facts: dict[int, Mapping[str, Any]] = {}

    def hear(self, node: int, message: Message) -> None:
        """Take a node's facts, or its clock."""
        if message["kind"] == "clock":
            self._clocks.hear(node, message)
        else:
            self._facts[node] = message["facts"]

    def ask_for_clocks(self, links: Mapping[int, MessageSocket], nodes: Collection[int]) -> None:
        """Ask these nodes for their time."""
        self._clocks.ask(links, nodes)

    @property
    def reported(self) -> Collection[int]:
        """Nodes that have reported their facts."""
        return self._facts.keys()

    def look(self, names: Mapping[int, str], places: NodeRanks, *, ended_restart: int) -> tuple[dict[int, str], bool]:
        """Judge these nodes by the facts since the last look, and record the findings.

        Returns the nodes to exclude, each with the reason, and whether the attempt ends because a sick node cannot be
        spared. `ended_restart`: the restart that is over; 0 before the first.
        """
        found: list[HealthFinding] = []
        offsets = self._clocks.offsets()
        for node, name in names.items():
            if (facts := self._facts.pop(node, None)) is not None:
                found += node_facts.findings_of_facts(name, facts, self._plan)
                if node in offsets:
                    found += node_facts.findings_of_clock(name, *offsets[node], self._plan)
        now = time.time()
        found = [replace(each, restart=ended_restart, time=now) for each in found]
        found, sick = node_facts.judge_findings(found, nodes=len(names), mode=self._plan.chain.node_health)
        actions = node_facts.decide_actions(sick, left=places.left, fitting=places.fitting)
        for each in found:
            if sick.get(each.node) is each:
                action, reason = actions[each.node]
                each = replace(each, action=action, reason=reason)
            self._record(each)
        left_out = {
            node: f"{sick[name].words} (node health)"
            for node, name in names.items()
            if name in sick and actions[name][0] != "warned"
        }
        return left_out, any(action == "ended" for action, _ in actions.values())

    def _record(self, found: HealthFinding) -> None:
        self._say(found.told)
        try:
            found.append(self._attempt.node_health)
        except OSError as error:
            self._say(f"that is not on record: {error}")
