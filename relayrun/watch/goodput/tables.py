"""An account as tables for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table

from relayrun.watch.goodput.account import WAIT_KINDS, AllocationAccount, NodeTimeAccount
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND, PARTS

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


RESTART_COLUMNS = ("round", "failed", "steps again", "node time")
"""First columns of the table of restarts, before `PART_COLUMNS`."""


def account_summary(account: NodeTimeAccount) -> str:
    """Return the main figures of a run in a few lines."""
    waits = [
        f"{name} {format_duration(account.waited[name])}"
        for name in WAIT_KINDS
        if account.waited[name] or name == WAIT_KINDS[0]
    ]
    lines = [
        f"{account.name}: {format_node_time(account.allocated)} allocated, goodput {account.goodput:.1%}",
        f"effective training time {account.effective_training_time:.1%} of {format_duration(account.elapsed)} "
        "since the first "
        f"submission; without nodes: {', '.join(waits)}",
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


def parts_table(account: NodeTimeAccount) -> Table:
    """Return a table of the parts; they sum to the allocated time."""
    table = Table(title="where the node time went", box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in ("part", "node time", "share", "what the nodes did"):
        table.add_column(name, justify="right" if name in ("node time", "share") else "left")
    for part in PARTS:
        amount = account.parts[part.name]
        if amount or part.name in ("step", "unknown"):
            table.add_row(part.name, format_node_time(amount), format_share(amount, account.allocated), part.words)
    table.add_row(
        "allocated", format_node_time(account.allocated), format_share(account.allocated, account.allocated), ""
    )
    return table


def allocations_table(account: NodeTimeAccount) -> Table:
    """Return a table of the attempts, each column a share of the attempt's allocation."""
    table = Table(title="by attempt", box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in ("attempt", "job", "nodes", "ended", "queued", "node time", *(name for name, _ in PART_COLUMNS)):
        table.add_column(name, justify="left" if name == "ended" else "right")
    for each in account.stays:
        sums = [sum(each.parts.get(part, 0) for part in parts) for _, parts in PART_COLUMNS]
        table.add_row(
            "–" if each.attempt is None else str(each.attempt),
            escape(each.stay.job_id),
            str(each.nodes),
            escape(each.cause),
            format_duration(each.waited["queued"]),
            format_node_time(each.allocated),
            *(format_share(amount, each.allocated) for amount in sums),
        )
    return table


def restarts_table(account: NodeTimeAccount) -> Table | None:
    """Return a table of the restarts inside attempts; None without restarts."""
    table = Table(title="by round", box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in (*RESTART_COLUMNS, *(name for name, _ in PART_COLUMNS)):
        table.add_column(name, justify="left" if name == "failed" else "right")
    for row in restart_rows(account):
        table.add_row(*map(escape, row))
    return table if table.row_count else None


def restart_rows(account: NodeTimeAccount) -> list[list[str]]:
    """Return the cells of the table of restarts, row by row."""
    rows = []
    for stay in account.stays:
        words = [failed.culprit for failed in stay.failed_rounds]
        for number, each in enumerate(stay.rounds if len(stay.rounds) > 1 else (), start=1):
            total = sum(each.parts.values())
            said = words[number - 1] if number <= len(words) else ""
            sums = [sum(each.parts.get(part, 0) for part in parts) for _, parts in PART_COLUMNS]
            shares = [format_share(amount, total) for amount in sums]
            rows.append(
                [f"{stay.attempt}.{number}", said, str(each.redone_iterations), format_node_time(total), *shares]
            )
    return rows


def lost_time_table(account: NodeTimeAccount) -> Table:
    """Return a table of the node time lost to each cause."""
    table = Table(title="by cause of the end", box=None, title_justify="left", padding=(0, 2, 0, 0))
    for name in ("ended", "times", "lost", "next starts", "waited", "nodes blamed"):
        table.add_column(name, justify="left" if name in ("ended", "nodes blamed") else "right")
    for loss in account.losses:
        table.add_row(
            escape(loss.cause),
            str(loss.times),
            format_node_time(loss.lost),
            format_node_time(loss.starts),
            format_duration(loss.waited),
            escape(", ".join(f"{node} ({count})" for node, count in loss.nodes.most_common())),
        )
    return table


def account_as_json(account: NodeTimeAccount) -> dict[str, Any]:
    """Return the account as plain values: node seconds, seconds, and shares between 0 and 1."""
    return {
        "run": account.name,
        "path": str(account.run.path),
        "allocated_node_seconds": account.allocated / MICROSECONDS_PER_SECOND,
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
        "google": as_ml_goodput(account),
        "without_nodes_seconds": _seconds(account.waited),
        "evaluation_jobs_left_out": account.evaluated_outside,
        "attempts": [
            {"attempt": each.attempt, **_allocation_as_json(each), **_attempt_as_json(each)}
            for each in account.stays
            if each.attempt is not None
        ],
        "jobs_without_attempt": [
            {**_allocation_as_json(each), "state": each.stay.state, "why": each.reason}
            for each in account.stays
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


def as_ml_goodput(account: NodeTimeAccount) -> dict[str, float]:
    """Return node seconds by the names of ml-goodput-measurement, where `TOTAL` is productive time."""
    sums: dict[str, int] = {}
    for part in PARTS:
        name = part.google or "TOTAL"
        sums[name] = sums.get(name, 0) + account.parts[part.name]
    return _seconds(sums)


def _allocation_as_json(each: AllocationAccount) -> dict[str, Any]:
    return {
        "job_id": each.stay.job_id,
        "nodes": each.nodes,
        "start_time": each.start,
        "end_time": each.end,
        "running": not each.stay.ended,
        "times_from": each.stay.source,
        "cause": each.cause,
        "allocated_node_seconds": each.allocated / MICROSECONDS_PER_SECOND,
        "node_seconds": _seconds(each.parts),
        "without_nodes_seconds": _seconds(each.waited),
    }


def _attempt_as_json(each: AllocationAccount) -> dict[str, Any]:
    return {
        "iterations": each.work.iterations,
        "redone_iterations": each.work.redone_iterations,
        "spare_nodes": each.stay.spare_nodes,
        "rounds": [
            {
                "round": number,
                "node_seconds": _seconds(part.parts),
                "iterations": part.iterations,
                "redone_iterations": part.redone_iterations,
                "failed": next((failed.culprit for failed in each.failed_rounds if failed.round == number), None),
            }
            for number, part in enumerate(each.rounds, start=1)
        ],
    }


def _seconds(amounts: dict[str, int]) -> dict[str, float]:
    return {name: amount / MICROSECONDS_PER_SECOND for name, amount in amounts.items()}


def format_node_time(amount: int) -> str:
    """Format microseconds of all nodes as node seconds or node hours."""
    seconds = amount / MICROSECONDS_PER_SECOND
    return f"{seconds / 3600:,.2f} node h" if seconds >= 3600 else f"{seconds:,.1f} node s"


def format_duration(amount: int) -> str:
    """Format microseconds: `4.2 s`, `3 min 20 s`, `5 h 10 min`."""
    seconds = amount / MICROSECONDS_PER_SECOND
    if seconds < 60:
        return f"{seconds:.1f} s"
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours} h {rest // 60} min" if hours else f"{rest // 60} min {rest % 60} s"


def format_share(amount: int, total: int) -> str:
    """Format a share in percent; empty for 0."""
    return f"{amount / total:.1%}" if amount and total else ""


def all_tables(account: NodeTimeAccount) -> Sequence[Table]:
    """Return all tables of an account."""
    rounds = restarts_table(account)
    return [parts_table(account), allocations_table(account), *([rounds] if rounds else []), lost_time_table(account)]
