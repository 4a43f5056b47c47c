"""The runs of several people: who runs what, what is blocked and why, and the node hours of the last seven days.

Whose a run is says the user id of its directory. Records of other users are data: nothing that they name is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from relayrun.control.chain.budget import SECONDS_PER_HOUR, used_node_seconds
from relayrun.control.rundir.plan import Plan, cost_words
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError, user_name
from relayrun.terminal import print_rows
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun, RunSummary
from relayrun.watch.status.tables import RUN_COLUMNS, run_cells
from relayrun.watch.text import format_optional

WEEK_SECONDS = 7 * 86400.0
_STATES = ("running", "queued", "blocked")
OwnedRun = tuple[str, float | None, RunSummary | DamagedRun, Plan | None]
"""Owner of the run directory, node hours of the last seven days (None: a record is damaged), the run, and its plan."""


def read_team_runs(runs: Sequence[Run], *, now: float) -> list[OwnedRun]:
    """Return the runs by owner, and of each owner by their node hours, the largest first. `now`: seconds since 1970."""
    found: list[OwnedRun] = []
    for each in RunsWatcher().summaries(runs, now=now):
        run, user, hours, plan = Run(Path(each.path)), "?", None, None
        with contextlib.suppress(RunDirError, OSError, AttributeError, TypeError, ValueError):  # others wrote it
            user = user_name(run.path.stat().st_uid)
            plan = Plan.load(run)
            hours = used_node_seconds(run, plan, until=now, since=now - WEEK_SECONDS) / SECONDS_PER_HOUR
        found.append((user, hours, each, plan))
    return sorted(found, key=lambda entry: (entry[0], -(entry[1] or 0.0)))


def print_team(found: Sequence[OwnedRun]) -> None:
    """Print a table of the runs that have not ended or had nodes in the last seven days, and the sums by user."""
    shown = [entry for entry in found if entry[1] or isinstance(entry[2], DamagedRun) or entry[2].stop is None]
    rows = [
        [user, format_optional(hours, ",.1f") + (cost_words(hours or 0, plan) if plan else ""), *run_cells(each)]
        for user, hours, each, plan in shown
    ]
    print_rows(["user", "node hours, 7 days|n", *RUN_COLUMNS], rows)
    if left_out := len(found) - len(shown):
        print(f"{left_out} more runs have ended, and had no nodes in the last 7 days")
    sums = []
    for user in dict.fromkeys(entry[0] for entry in found):
        own = [entry for entry in found if entry[0] == user]
        states = [str(sum(getattr(run, "state", "") == state for _, _, run, _ in own)) for state in _STATES]
        hours, costs = sum(hours or 0.0 for _, hours, _, _ in own), dict[str, float]()
        for _, used, _, plan in own:
            if used and plan and plan.cost_per_node_hour:
                costs[plan.currency] = costs.get(plan.currency, 0.0) + used * plan.cost_per_node_hour
        money = ", ".join(f"{cost:,.2f} {currency}".rstrip() for currency, cost in costs.items())
        sums.append([user, *states, f"{hours:,.1f}" + (f" ({money})" if money else "")])
    print_rows(("user", *(f"{state}|n" for state in _STATES), "node hours, 7 days|n"), sums)
