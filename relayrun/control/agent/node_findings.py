"""What is wrong with a node, as pure functions of what it says, what was measured, and the limits.

Each check gives a finding with its figure and its limit, or none. A hard one: the ranks cannot train there, or what
they compute cannot be trusted. What every node of several has is no node's: a limit that is wrong must end no run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relayrun.control.rundir.node_health import HealthAction, HealthFinding, NodeChecks, NodeHistory

SLOWDOWN_REASONS = {
    0x8: "by hardware",
    0x40: "by heat (hardware)",
    0x80: "by the power brake",
    0x20: "by heat (software)",
}
"""Reasons of NVML for a clock that is held down, by their bit, as far as they are none of a usual load."""
MEMORY_OF_RANKS = "ranks_memory"
"""What the ranks of a node have taken, in the run's history."""
MEASUREMENTS = {"matmul": "a matrix product", "exchange": "an exchange with its neighbours"}
FEW_NODES = 2
"""From so many nodes on what all of them have is no node's."""


def findings_of_facts(
    node: str, facts: Mapping[str, Any], checks: NodeChecks, history: NodeHistory
) -> Iterator[HealthFinding]:
    """What is wrong with a node by its own words (`agent.node_facts`)."""
    if "answer" in facts:
        yield HealthFinding(node=node, check="answer", value=0, limit=1, hard=False, words=str(facts["answer"]))
    yield from _memory_findings(node, facts, checks, history)
    unwritable: Mapping[str, str] = facts.get("unwritable") or {}
    for check, why in unwritable.items():
        yield HealthFinding(node=node, check=check, value=0, limit=1, hard=True, words=f"cannot be written: {why}")
    for check, limit, what in (
        ("shm", checks.limits.shm_gb * 1e9, "/dev/shm"),
        ("tmp", checks.limits.tmp_gb * 1e9, "the folder for temporary files"),
    ):
        room = facts.get(check)
        if room is not None and room < limit and check not in unwritable:
            words = f"{_gb(room)} GB are free in {what}, {_gb(limit)} GB wanted"
            yield HealthFinding(node=node, check=check, value=room, limit=limit, hard=False, words=words)
    files = facts.get("open_files")
    if files is not None and files < checks.limits.open_files:
        words = f"a process may open {files} files, {checks.limits.open_files} wanted (`ulimit -Hn`)"
        yield HealthFinding(
            node=node, check="open_files", value=files, limit=checks.limits.open_files, hard=False, words=words
        )
    if "gpus" in facts:
        yield from _gpu_findings(node, facts, checks.gpus)
    elif facts.get("gpu_error"):
        words = f"its GPUs are not known: {facts['gpu_error']}"
        yield HealthFinding(node=node, check="gpus", value=0, limit=checks.gpus, hard=False, words=words)
    if (own := facts.get("command")) is not None and own["code"] != 0:
        words = f"the site's own check ({checks.command[0]}): {own['words'] or 'no words'}"
        words += "" if own["code"] is None else f" (exit status {own['code']})"
        value = -1 if own["code"] is None else own["code"]
        hard = own["code"] is not None  # one that does not answer says nothing of the node
        yield HealthFinding(node=node, check="command", value=value, limit=0, hard=hard, words=words)


def _memory_findings(
    node: str, facts: Mapping[str, Any], checks: NodeChecks, history: NodeHistory
) -> Iterator[HealthFinding]:
    free = facts.get("memory")
    taken = history.median(MEMORY_OF_RANKS)
    wanted = None if checks.limits.memory_gb == "auto" else checks.limits.memory_gb * 1e9
    limit = taken if wanted is None else wanted
    if free is None or limit is None or free >= limit:
        return
    words = f"{_gb(free)} GB of memory are free, " + (
        f"{_gb(limit)} GB wanted" if wanted is not None else f"and ranks of this run took {_gb(limit)} GB before"
    )
    hard = wanted is not None or free < limit / 2
    yield HealthFinding(node=node, check="memory", value=free, limit=limit, hard=hard, words=words)


def _gpu_findings(node: str, facts: Mapping[str, Any], wanted: int) -> Iterator[HealthFinding]:
    gpus: Sequence[Mapping[str, Any]] = facts["gpus"]
    there = [gpu for gpu in gpus if not gpu.get("error")]
    if len(there) < wanted:
        errors = "".join(f"; GPU {gpu['index']}: {gpu['error']}" for gpu in gpus if gpu.get("error"))
        words = f"{len(there)} GPUs answer, and the job asks for {wanted}{errors}"
        yield HealthFinding(node=node, check="gpus", value=len(there), limit=wanted, hard=True, words=words)
    for gpu in there:
        name = f"GPU {gpu['index']}"
        if (count := gpu.get("ecc_uncorrected") or 0) > 0:
            words = f"{name}: {count} uncorrected ECC errors since the driver was loaded"
            yield HealthFinding(node=node, check="gpu_ecc", value=count, limit=0, hard=True, words=words)
        if gpu.get("rows_failed"):
            words = f"{name}: a row of its memory could not be remapped"
            yield HealthFinding(node=node, check="gpu_rows", value=1, limit=0, hard=True, words=words)
        elif gpu.get("rows_pending"):
            words = f"{name}: rows of its memory wait to be remapped, by a reset"
            yield HealthFinding(node=node, check="gpu_rows", value=1, limit=0, hard=False, words=words)
        slowed = [words for bit, words in SLOWDOWN_REASONS.items() if (gpu.get("slowed") or 0) & bit]
        if slowed:
            words = f"{name}: its clock is held down {', '.join(slowed)}"
            yield HealthFinding(node=node, check="gpu_slowed", value=gpu["slowed"], limit=0, hard=False, words=words)
    xids: Sequence[str] = facts.get("xids") or []
    if xids:
        words = f"{len(xids)} Xid errors in the kernel's log; the newest: {xids[-1]}"
        yield HealthFinding(node=node, check="gpu_xid", value=len(xids), limit=0, hard=False, words=words)


def findings_of_clock(node: str, offset: float, uncertainty: float, checks: NodeChecks) -> Iterator[HealthFinding]:
    """Whether a node's clock is certainly beyond the limit. Seconds against the median of all nodes."""
    if abs(offset) - uncertainty > checks.limits.clock_seconds:
        words = f"its clock is {abs(offset):.3g} s {'ahead' if offset > 0 else 'behind'} (± {uncertainty:.2g} s), "
        words += f"{checks.limits.clock_seconds:g} s allowed"
        yield HealthFinding(
            node=node, check="clock", value=abs(offset), limit=checks.limits.clock_seconds, hard=False, words=words
        )


def findings_of_probe(
    node: str, probe: Mapping[str, Any], checks: NodeChecks, history: NodeHistory
) -> Iterator[HealthFinding]:
    """What is wrong with a node by what was measured on it (`train.node_benchmark`)."""
    if (error := probe.get("error")) is not None:
        words = f"it could not be measured: {error}"
        yield HealthFinding(node=node, check="answer", value=0, limit=1, hard=False, words=words)
    if (devices := probe.get("devices")) is not None and devices < checks.gpus:
        words = f"torch sees {devices} GPUs, and the job asks for {checks.gpus}"
        yield HealthFinding(node=node, check="gpus", value=devices, limit=checks.gpus, hard=True, words=words)
    if (wrong := probe.get("wrong")) is not None:
        words = f"it computes wrong numbers: {wrong}"
        yield HealthFinding(node=node, check="result", value=1, limit=0, hard=True, words=words)
    for name, what in MEASUREMENTS.items():
        usual, seconds = history.median(name, on=str(probe.get("on", ""))), probe.get(name)
        if usual and seconds is not None and seconds > checks.limits.slower * usual:
            words = f"{what} takes {1000 * seconds:.3g} ms, {seconds / usual:.1f} times this run's median of "
            words += f"{1000 * usual:.3g} ms ({checks.limits.slower:g} times allowed)"
            limit = checks.limits.slower * usual
            yield HealthFinding(node=node, check=name, value=seconds, limit=limit, hard=False, words=words)


def judge_findings(
    findings: Sequence[HealthFinding], *, nodes: int, mode: str
) -> tuple[list[HealthFinding], dict[str, HealthFinding]]:
    """What is found on these nodes, and of the sick among them the finding for which each is to be left out.

    `nodes`: how many were looked at. With mode `warn` hard findings alone make a node sick, with `exclude` all do. What
    each of several nodes has makes none sick.
    """
    having = Counter(check for _, check in {(found.node, found.check) for found in findings})
    of_all = {check for check, count in having.items() if nodes >= FEW_NODES and count >= nodes}
    seen = [replace(found, reason="every node has it") if found.check in of_all else found for found in findings]
    sick: dict[str, HealthFinding] = {}
    for found in sorted(seen, key=lambda each: not each.hard):
        if found.check not in of_all and (found.hard or mode == "exclude"):
            sick.setdefault(found.node, found)
    return seen, sick


def decide_actions(
    sick: Mapping[str, HealthFinding], *, left: int, fitting: Callable[[int], int]
) -> dict[str, tuple[HealthAction, str]]:
    """What becomes of each sick node, and why it is not left out where it is not.

    `left`: nodes of the job that are not given up. `fitting`: with how many of so many training may go on. A node that
    is hard hit is left out where others can go on, and ends the attempt where they cannot; another one is left out only
    where as many train without it.
    """
    actions: dict[str, tuple[HealthAction, str]] = {}
    for node, found in sick.items():
        without = fitting(left - 1)
        if without == 0 and found.hard:
            actions[node] = ("ended", "no other node takes its place")
        elif not found.hard and without < fitting(left):
            actions[node] = ("warned", "no other node takes its place")
        else:
            actions[node], left = ("left out", ""), left - 1
    return actions


def _gb(size: float) -> str:
    return f"{size / 1e9:.3g}"
