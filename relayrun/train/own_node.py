"""The first rank of a node looks at its node before it starts, where no agent does. Standard library only."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from relayrun.control.agent import node_facts, node_findings
from relayrun.control.rundir import node_health
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.node_health import HealthPlan, NodeHistory
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError

log = logging.getLogger(__name__)


class UnhealthyNode(RelayrunError):
    """Ranks cannot train on this node; they may on another one."""


def check_node_at_start(run: Run, attempt: Attempt, node: str) -> None:
    """Put on record what is wrong with this node. Raises SickNode where ranks cannot train here."""
    if not run.plan.exists():  # started by hand: nobody has said what to look for
        return
    plan = HealthPlan.looked_for(Plan.load(run).node_health)
    if plan is None:
        return
    facts = node_facts.gather_facts(plan, attempt.path)
    sick = ""
    for found in node_findings.findings_of_facts(node, facts, plan, NodeHistory.of(run)):
        seen = replace(found, time=time.time(), action="ended" if found.hard else "warned")
        log.warning("%s", seen.told)
        try:
            node_health.record_finding(attempt, seen)
        except OSError as error:
            log.warning("that is not on record: %s", error)
        sick = sick or (found.words if found.hard else "")
    if sick:
        raise UnhealthyNode(
            f"ranks cannot train on {node}: {sick}",
            hint="the next job leaves the node out; chain.node_health and chain.node_health_limits decide what is "
            "looked for",
        )
