"""An account as tables for people and as JSON for programs.

Each table is a pair of columns (`|n` marks a column of numbers) and rows; the terminal and the HTML page show the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from relayrun.control.rundir.plan import cost_words
from relayrun.terminal import print_rows
from relayrun.watch.goodput.account import WAIT_KINDS, AllocationAccount, NodeTimeAccount
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, PARTS
from relayrun.watch.text import format_exact_seconds

PART_COLUMNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("steps", ("step",)),
    ("start", tuple(part.name for part in PARTS if part.group == "start")),
    ("data", ("data",)),
    ("save", ("save",)),
    ("evaluation", ("evaluation",)),
    ("redone", ("redone",)),
    ("lost", ("failed start", "hang", "recovery", "given up", "no attempt")),
    ("rest", ("between", "spare", "end")),
    ("unknown", ("unknown",)),
)
"""Columns of the table of attempts, and the parts in each."""


def account_summary(account: NodeTimeAccount) -> str:
    """Return the main figures of a run in a few lines."""
    shown = [name for name in WAIT_KINDS if account.waited[name] or name == WAIT_KINDS[0]]
    waits = [f"{name} {format_duration(account.waited[name])}" for name in shown]
    cost = cost_words(account.node_hours, account.plan)
    lines = [
        f"{account.plan.run}: {format_node_time(account.allocated)} allocated{cost}, goodput {account.goodput:.1%}",
        f"effective training time {account.effective_training_time:.1%} of {format_duration(account.elapsed)} "
        f"since the first submission; without nodes: {', '.join(waits)}",
    ]
    figures = []
    if account.tokens_per_node_hour is not None:
        figures.append(f"{account.tokens_per_node_hour:,.0f} tokens a node hour")
    if account.tflops is not None:
        figures.append(f"{account.tflops:,.1f} model TFLOP/s a GPU")
    if account.mfu is not None:
        figures.append(f"MFU {account.mfu:.1%}")
    if figures:
        lines.append(f"over all allocated time: {', '.join(figures)}")
    if account.evaluated_outside:
        lines.append("evaluations have jobs of their own, which are not in these figures")
    return "\n".join(lines)


class AccountTable(NamedTuple):
    """A table of an account."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self) -> None:
        print_rows(self.columns, self.rows, title=self.title)


def account_tables(account: NodeTimeAccount) -> list[AccountTable]:
    """Return the tables of an account: by part, by attempt, by cause of the end."""
    return [parts_table(account), allocations_table(account), lost_time_table(account)]


def parts_table(account: NodeTimeAccount) -> AccountTable:
    """Return the parts; they sum to the allocated time."""
    total = account.allocated
    shown = [part for part in PARTS if account.parts[part.name] or part.name in ("step", "unknown")]
    rows = [(part.name, *_time_and_share(account.parts[part.name], total), part.words) for part in shown]
    columns = ("part", "node time|n", "share|n", "what the nodes did")
    return AccountTable("where the node time went", columns, [*rows, ("allocated", *_time_and_share(total, total), "")])


def _time_and_share(amount: int, total: int) -> tuple[str, str]:
    return format_node_time(amount), format_share(amount, total)


def allocations_table(account: NodeTimeAccount) -> AccountTable:
    """Return the attempts, with the parts as shares of the attempt's allocation."""
    rows = [
        (
            "–" if each.attempt is None else str(each.attempt),
            each.allocation.job_id,
            str(each.allocation.nodes),
            each.cause,
            format_duration(each.waited["queued"]),
            format_node_time(each.allocated),
            *(format_share(sum(each.parts.get(n, 0) for n in names), each.allocated) for _, names in PART_COLUMNS),
        )
        for each in account.allocations
    ]
    columns = (
        "attempt|n",
        "job|n",
        "nodes|n",
        "ended",
        "queued|n",
        "node time|n",
        *(f"{name}|n" for name, _ in PART_COLUMNS),
    )
    return AccountTable("by attempt", columns, rows)


def lost_time_table(account: NodeTimeAccount) -> AccountTable:
    """Return the node time lost to each cause."""
    rows = [
        (
            loss.cause,
            str(loss.times),
            format_node_time(loss.lost),
            format_node_time(loss.starts),
            format_duration(loss.waited),
            ", ".join(f"{node} ({count})" for node, count in loss.nodes.most_common()),
        )
        for loss in account.losses
    ]
    columns = ("ended", "times|n", "lost|n", "next starts|n", "waited|n", "nodes blamed")
    return AccountTable("by cause of the end", columns, rows)


def format_node_time(amount: int) -> str:
    """Format microseconds of all nodes as node seconds or node hours."""
    seconds = amount / MICROSECONDS_PER_SECOND
    return f"{seconds / 3600:,.2f} node h" if seconds >= 3600 else f"{seconds:,.1f} node s"


def format_duration(amount: int) -> str:
    return format_exact_seconds(amount / MICROSECONDS_PER_SECOND)


def format_share(amount: int, total: int) -> str:
    """Format a share in percent; empty for 0."""
    return f"{amount / total:.1%}" if amount and total else ""


def account_as_json(account: NodeTimeAccount) -> dict[str, Any]:
    """Return the account as plain values: node seconds, seconds, and shares between 0 and 1."""
    return {
        "run": account.plan.run,
        "path": str(account.run.path),
        "allocated_node_seconds": account.allocated / MICROSECONDS_PER_SECOND,
        "cost": account.node_hours * account.plan.cost_per_node_hour if account.plan.cost_per_node_hour else None,
        "currency": account.plan.currency,
        "elapsed_seconds": account.elapsed / MICROSECONDS_PER_SECOND,
        "goodput": account.goodput,
        "effective_training_time": account.effective_training_time,
        "tokens": round(account.work.tokens),
        "tokens_per_node_hour": account.tokens_per_node_hour,
        "model_tflops_per_gpu": account.tflops,
        "mfu": account.mfu,
        "iterations": account.work.iterations,
        "redone_iterations": account.work.redone_iterations,
        "redone_tokens": round(account.work.redone_tokens),
        "node_seconds": _seconds(account.parts),
        "without_nodes_seconds": _seconds(account.waited),
        "evaluation_jobs_left_out": account.evaluated_outside,
        "attempts": [_attempt_as_json(each) for each in account.allocations if each.attempt is not None],
        "jobs_without_attempt": [
            {**_allocation_as_json(each), "state": each.allocation.state, "why": each.allocation.reason}
            for each in account.allocations
            if each.attempt is None
        ],
        "losses": [
            {
                "cause": loss.cause,
                "times": loss.times,
                "lost_node_seconds": loss.lost / MICROSECONDS_PER_SECOND,
                "next_start_node_seconds": loss.starts / MICROSECONDS_PER_SECOND,
                "waited_seconds": loss.waited / MICROSECONDS_PER_SECOND,
                "nodes": dict(loss.nodes.most_common()),
            }
            for loss in account.losses
        ],
    }


def _allocation_as_json(each: AllocationAccount) -> dict[str, Any]:
    return {
        "job_id": each.allocation.job_id,
        "nodes": each.allocation.nodes,
        "start_time": each.start,
        "end_time": each.end,
        "running": not each.allocation.ended,
        "times_from": each.allocation.source,
        "cause": each.cause,
        "allocated_node_seconds": each.allocated / MICROSECONDS_PER_SECOND,
        "node_seconds": _seconds(each.parts),
        "without_nodes_seconds": _seconds(each.waited),
    }


def _attempt_as_json(each: AllocationAccount) -> dict[str, Any]:
    return {
        "attempt": each.attempt,
        **_allocation_as_json(each),
        "iterations": each.work.iterations,
        "redone_iterations": each.work.redone_iterations,
        "spare_nodes": each.allocation.spare_nodes,
    }


def _seconds(amounts: Mapping[str, int]) -> dict[str, float]:
    return {name: amount / MICROSECONDS_PER_SECOND for name, amount in amounts.items()}
