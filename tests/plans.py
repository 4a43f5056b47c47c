"""Plans and checks of nodes for tests, whose settings are given by name, wherever they stand."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from relayrun.config.sections.chain import NodeHealthLimits
from relayrun.control.rundir.node_health import NodeChecks
from relayrun.control.rundir.plan import Plan

_PLAN = {each.name for each in fields(Plan)}
_LIMITS = {each.name for each in fields(NodeHealthLimits)}


def plan_with(plan: Plan, **changes: Any) -> Plan:
    """A plan with other values: its own fields, settings of its chain and limits of its node health."""
    limits = {name: changes.pop(name) for name in [*changes] if name in _LIMITS}
    chain = {name: changes.pop(name) for name in [*changes] if name not in _PLAN}
    section = replace(plan.chain, **chain)
    section = replace(section, node_health_limits=replace(section.node_health_limits, **limits))
    return replace(plan, **({"chain": section} | changes))


def node_checks(**values: Any) -> NodeChecks:
    """Checks of a node with these values and limits."""
    limits = {name: values.pop(name) for name in [*values] if name in _LIMITS}
    return NodeChecks(**values, limits=NodeHealthLimits(**limits))
