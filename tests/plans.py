"""Plans for tests, whose settings are given by name, wherever they stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from relayrun.config.sections.chain import NodeHealthLimits
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from tests.history import history_plan

_PLAN = {each.name for each in fields(Plan)}
_LIMITS = {each.name for each in fields(NodeHealthLimits)}


def plan_with(plan: Plan, **changes: Any) -> Plan:
    """A plan with other values: its own fields, settings of its chain and limits of its node health."""
    limits = {name: changes.pop(name) for name in [*changes] if name in _LIMITS}
    chain = {name: changes.pop(name) for name in [*changes] if name not in _PLAN}
    section = replace(plan.chain, **chain)
    section = replace(section, node_health_limits=replace(section.node_health_limits, **limits))
    return replace(plan, **({"chain": section} | changes))


def node_checks(*, mode: str = "warn", gpus: int = 0, command: Sequence[str] = (), **values: Any) -> Plan:
    """A plan with these checks of nodes and limits."""
    plan = history_plan(Run(Path("run")), total_steps=100)
    return plan_with(plan, node_health=mode, gpus_per_node=gpus, node_health_command=[*command], **values)
