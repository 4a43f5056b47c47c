"""The runs of several people: who runs what, what is blocked and why, and the node hours of the last seven days.

Whose a run is says the user id of its directory. Records of other users are data: nothing that they name is started.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.chain.budget import SECONDS_PER_HOUR, used_node_seconds
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError, user_name
from relayrun.terminal import print_rows
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import UNFINISHED_STATES, DamagedRun, RunSummary
from relayrun.watch.text import format_optional

WEEK_SECONDS = 7 * 86400.0


@dataclass(frozen=True, kw_only=True)
class TeamRun:
    """A run in the view of a team."""

    user: str
    """Owner of its directory."""
    run: str
    """Name of the run, as project/name; of a damaged run its path."""
    path: str
    state: str
    """State of the run, see `summary.RunState`, or `damaged`."""
    iteration: int = 0
    total_steps: int | None = None
    week_node_hours: float | None
    """Node hours of its attempts in the last seven days; None if its records are damaged."""
    remaining_node_hours: float | None = None
    why: str
    """Reason of its end or error, or why it waits, in one line."""


def read_team_runs(runs: Sequence[Run], *, now: float) -> list[TeamRun]:
    """Return the runs by owner, and of each owner by their node hours, the largest first. `now`: seconds since 1970."""
    found = []
    for each in RunsWatcher().summaries(runs, now=now):
        try:
            user = user_name(Path(each.path).stat().st_uid)
        except OSError:  # removed meanwhile, or nobody else may look
            user = "?"
        found.append(_team_run(each, user, now))
    return sorted(found, key=lambda each: (each.user, -(each.week_node_hours or 0.0), each.run))


def _team_run(found: RunSummary | DamagedRun, user: str, now: float) -> TeamRun:
    hours = None
    try:
        run = Run(Path(found.path))
        seconds = used_node_seconds(run, Plan.load(run), until=now, since=now - WEEK_SECONDS)
        hours = seconds / SECONDS_PER_HOUR
    except (RunDirError, OSError, AttributeError, TypeError, ValueError):  # what others wrote into their records
        pass
    if isinstance(found, DamagedRun):
        words = " ".join(found.error.split())
        return TeamRun(user=user, run=found.path, path=found.path, state="damaged", week_node_hours=hours, why=words)
    return TeamRun(
        user=user,
        run=found.run,
        path=found.path,
        state=found.state,
        iteration=found.iteration,
        total_steps=found.total_steps,
        week_node_hours=hours,
        remaining_node_hours=None if found.remaining is None else found.remaining.node_hours,
        why=(found.stop or found.broken or "; ".join(found.pending.values())).partition("\n")[0],
    )


def print_team(found: Sequence[TeamRun]) -> None:
    """Print a table of the runs that have not ended or had nodes in the last seven days, and the sums by user."""
    shown = [each for each in found if each.week_node_hours or each.state in (*UNFINISHED_STATES, "blocked", "damaged")]
    rows = [
        [
            each.user,
            each.run,
            each.state,
            f"{each.iteration}/{each.total_steps or '?'}",
            format_optional(each.week_node_hours, ",.1f"),
            format_optional(each.remaining_node_hours, ",.1f"),
            "" if each.state == "done" else each.why,
        ]
        for each in shown
    ]
    print_rows(("user", "run", "state", "iteration|n", "node hours, 7 days|n", "left|n", "why"), rows)
    if left_out := len(found) - len(shown):
        print(f"{left_out} more runs have ended, and had no nodes in the last 7 days")
    sums = []
    for user in dict.fromkeys(each.user for each in found):
        own = [each for each in shown if each.user == user]
        states = [str(sum(each.state == state for each in own)) for state in ("running", "queued", "blocked")]
        sums.append([user, *states, f"{sum(each.week_node_hours or 0.0 for each in own):,.1f}"])
    print()
    print_rows(("user", "running|n", "queued|n", "blocked|n", "node hours, 7 days|n"), sums)
