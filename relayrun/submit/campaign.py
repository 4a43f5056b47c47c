"""Where the runs of a campaign stand, beside each other: settings that differ, state, loss, cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from relayrun.config.compose import yaml_file
from relayrun.control import chain_decide
from relayrun.control.chain.campaign import member_readiness
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember
from relayrun.errors import RelayrunError
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.standing import DamagedRun


@dataclass(frozen=True, kw_only=True)
class MemberStatus:
    """A run of a campaign at one moment."""

    member: str
    run: str
    """Name of the run, as project/name."""
    path: str
    settings: dict[str, Any]
    """What it has of its own."""
    begins: str
    """When it begins, in words; empty where at once."""
    state: str
    """Either `done` or the state of its chain, see `standing.State`."""
    iteration: int
    total_steps: int | None
    loss: float | None
    """Loss of the last step in nats per token; None before the first step."""
    node_hours: float | None
    """Node hours of all its jobs; None where they are not known."""
    attempts: int
    words: str
    """What it waits for, or why it ended."""


def read_campaign_status(folder: Path, *, now: float) -> list[MemberStatus]:
    """Look at every run of a campaign. Raises RunDirError where there is none."""
    whole = Campaign.load(folder)
    found = {status.path: status for status in RunsWatcher().look([member.run for member in whole.members], now=now)}
    return [_member_status(folder, whole, member, found[member.run_dir]) for member in whole.members]


def _member_status(
    folder: Path, whole: Campaign, member: CampaignMember, status: RunStatus | DamagedRun
) -> MemberStatus:
    common: dict[str, Any] = {
        "member": member.name,
        "path": member.run_dir,
        "settings": member.settings,
        "begins": start_condition(member),
    }
    if isinstance(status, DamagedRun):
        nothing: dict[str, Any] = {"iteration": 0, "total_steps": None, "loss": None, "node_hours": None, "attempts": 0}
        return MemberStatus(run=member.run.path.name, state="damaged", words=status.error, **nothing, **common)
    state, words = str(status.state), status.stop or status.broken or status.last_end or ""
    if status.stop is not None and chain_decide.is_done_reason(status.stop) and state == "stopped":
        state = "done"
    elif state == "waiting":
        words = _wait_reason(folder, whole, member)
    return MemberStatus(
        run=status.run,
        state=state,
        iteration=max(status.iteration, status.durable_iteration or 0),
        total_steps=status.total_steps,
        loss=status.loss,
        node_hours=_node_hours(member),
        attempts=status.attempt or 0,
        words=words.partition("\n")[0],
        **common,
    )


def _wait_reason(folder: Path, whole: Campaign, member: CampaignMember) -> str:
    stopped = campaign.campaign_stop_reason(folder)
    if stopped is not None:
        return f"nothing more begins: {stopped}"
    ready = member_readiness(folder, whole, member)
    return (ready.why if ready is not None else "") or "waits for its turn"


def start_condition(member: CampaignMember) -> str:
    """When a member begins, in words; empty where at once."""
    if member.after is not None:
        return f"after {member.after}"
    if member.source is None:
        return ""
    at = member.source if member.iteration is None else f"{member.source}:{member.iteration}"
    return f"from {at}" + (", evaluated" if member.evaluated else "")


def _node_hours(member: CampaignMember) -> float | None:
    try:
        return account_for_run(member.run).node_hours
    except (RelayrunError, OSError, ValueError):  # what it cost is worth no error where it stands
        return None


def campaign_table(entries: Sequence[MemberStatus]) -> Table:
    """Return a table with a line a run, the settings that differ in a column each."""
    differing = differing_settings(entries)
    ordered = any(entry.begins for entry in entries)
    made = Table(box=None, padding=(0, 2, 0, 0))
    made.add_column("run")
    for name in differing:
        made.add_column(name, justify="right")
    if ordered:
        made.add_column("begins")
    for name in ("state", "iteration", "loss", "node hours"):
        made.add_column(name, justify="left" if name == "state" else "right")
    made.add_column("")
    for entry in entries:
        loss = "" if entry.loss is None else f"{entry.loss:.4f}" if math.isfinite(entry.loss) else str(entry.loss)
        made.add_row(
            escape(entry.run),
            *(
                escape(yaml_file.value_in_line(entry.settings[name]) if name in entry.settings else "")
                for name in differing
            ),
            *([escape(entry.begins)] if ordered else []),
            entry.state,
            f"{entry.iteration}/{entry.total_steps or '?'}",
            loss,
            "" if entry.node_hours is None else f"{entry.node_hours:.2f}",
            escape("" if entry.state == "done" else entry.words),
        )
    return made


def differing_settings(entries: Sequence[MemberStatus]) -> list[str]:
    """Names of the settings that are not the same in all runs."""
    names = dict.fromkeys(name for entry in entries for name in entry.settings)
    return [
        name for name in names if any(entry.settings.get(name) != entries[0].settings.get(name) for entry in entries)
    ]
