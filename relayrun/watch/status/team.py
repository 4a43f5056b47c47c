"""The runs of several people: who runs what, what is blocked and why, and the node hours of the last seven days.

Whose a run is says the user id of its directory. Records of other users are data: nothing that they name is started.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from relayrun.control.chain.budget import SECONDS_PER_HOUR, used_node_seconds
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError, user_name
from relayrun.terminal import print_rows
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun, RunSummary
from relayrun.watch.status.tables import RUN_COLUMNS, run_cells
from relayrun.watch.text import format_optional

WEEK_SECONDS = 7 * 86400.0
OwnedRun = tuple[str, float | None, RunSummary | DamagedRun]
"""Owner of the run directory, node hours of the last seven days (None if a record is damaged), and the run."""


def read_team_runs(runs: Sequence[Run], *, now: float) -> list[OwnedRun]:
    """Return the runs by owner, and of each owner by their node hours, the largest first. `now`: seconds since 1970."""
    found: list[OwnedRun] = []
    for each in RunsWatcher().summaries(runs, now=now):
        run, user, hours = Run(Path(each.path)), "?", None
        with contextlib.suppress(RunDirError, OSError, AttributeError, TypeError, ValueError):  # others wrote it
            user = user_name(run.path.stat().st_uid)
            hours = used_node_seconds(run, Plan.load(run), until=now, since=now - WEEK_SECONDS) / SECONDS_PER_HOUR
        found.append((user, hours, each))
    return sorted(found, key=lambda entry: (entry[0], -(entry[1] or 0.0)))


def print_team(found: Sequence[OwnedRun]) -> None:
    """Print a table of the runs that have not ended or had nodes in the last seven days, and the sums by user."""
    shown = [entry for entry in found if entry[1] or isinstance(entry[2], DamagedRun) or entry[2].stop is None]
    rows = [[user, format_optional(hours, ",.1f"), *run_cells(each)] for user, hours, each in shown]
    print_rows(["user", "node hours, 7 days|n", *RUN_COLUMNS], rows)
    if left_out := len(found) - len(shown):
        print(f"{left_out} more runs have ended, and had no nodes in the last 7 days")
    sums = []
    for user in dict.fromkeys(entry[0] for entry in found):
        own = [(hours or 0.0, getattr(each, "state", "")) for name, hours, each in found if name == user]
        states = [str(sum(state == each for _, state in own)) for each in ("running", "queued", "blocked")]
        sums.append([user, *states, f"{sum(hours for hours, _ in own):,.1f}"])
    print_rows(("user", "running|n", "queued|n", "blocked|n", "node hours, 7 days|n"), sums)
