"""The health of an attempt's nodes, for the coordinator: what agents say, what it means, and what is done about it.

    agent → coordinator    health {facts} · clock {sent, here}
                           · probing · probed {matmul, exchange, on, wrong, devices, error}
    coordinator → agent    clock {sent} · probe {place, nodes, address, port}

Before the first round each node says what it knows of itself, and is measured; between rounds it says what takes
milliseconds (in `ended`). `agent.node_findings` judges.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from relayrun.control.agent import node_findings
from relayrun.control.agent.clocks import ClockOffsets
from relayrun.control.agent.lines import Message, MessageSocket
from relayrun.control.agent.places import NodeRanks
from relayrun.control.rundir import node_health
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.node_health import HealthFinding, HealthPlan, NodeHistory
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run

PROBE_SECONDS = 60.0
"""How long the measurement may take from when it has begun on every node; imports before that may take long."""


def job_health_of(run: Run, plan: Plan, attempt: Attempt, *, say: Callable[[str], None]) -> JobHealth | None:
    """Return what sees to the health of this attempt's nodes; None where the plan has nobody look."""
    looked_for = HealthPlan.looked_for(plan.node_health)
    return None if looked_for is None else JobHealth(run, attempt, looked_for, say=say)


class JobHealth:
    """What is known of the nodes of an attempt.

    Args:
        plan: what is looked for.
        say: writes a line into the job's log.
    """

    def __init__(self, run: Run, attempt: Attempt, plan: HealthPlan, *, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._plan, self._say = run, attempt, plan, say
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

    def look(self, names: Mapping[int, str], places: NodeRanks, *, ended_round: int) -> tuple[dict[int, str], bool]:
        """Judge these nodes by what was heard since the last look, and put on record what is wrong with them.

        Returns the nodes that are to be left out, each with the reason, and whether the attempt ends: where a sick one
        cannot be spared. `ended_round`: the one that is over; 0 before the first.
        """
        found: list[HealthFinding] = []
        offsets = self._clocks.offsets()
        for node, name in names.items():
            if (facts := self._facts.pop(node, None)) is not None:
                found += node_findings.findings_of_facts(name, facts, self._plan, self._history)
                if node in offsets:
                    found += node_findings.findings_of_clock(name, *offsets[node], self._plan)
            if (probe := self._probes.pop(node, None)) is not None:
                found += node_findings.findings_of_probe(name, probe, self._plan, self._history)
                values = {key: float(probe[key]) for key in node_findings.MEASUREMENTS if probe.get(key) is not None}
                if values:
                    self._remember(name, str(probe.get("on", "")), **values)
        now = time.time()
        found = [replace(each, round=ended_round, time=now) for each in found]
        found, sick = node_findings.judge_findings(found, nodes=len(names), mode=self._plan.mode)
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
