"""The cost of a submit: the node hours that its jobs can use, what the run likely needs, and a question.

The maximum follows from the budget of the chain, or from the time limit of a single job. The need is what
is left of the run at the pace of its last attempts or, before those, at a measured speed.
"""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import dataclass

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.chain.budget import SECONDS_PER_HOUR, budget_end
from relayrun.control.rundir.plan import Plan, cost_words
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.submit.forecast import Forecast
from relayrun.watch.status.queue import QueueStatus
from relayrun.watch.status.summary import summarize_run


@dataclass(frozen=True, kw_only=True)
class ChainCost:
    """Node hours of the jobs of one or more submits."""

    most: float
    """Maximum; infinity for a chain without a budget."""
    likely: float | None
    """Node hours that the rest of the run needs; None: unknown."""
    config: CommonConfig

    @property
    def ask_above(self) -> float:
        """Node hours above which a submit asks; infinity: never."""
        own, site = self.config.chain.ask_above_node_hours, self.config.cluster.ask_above_node_hours
        return next((hours for hours in (own, site) if hours is not None), math.inf)

    @property
    def words(self) -> str:
        """One line for people."""
        most = "no maximum (chain.max_node_hours sets one)"
        if self.most < math.inf:
            most = f"at most {self._amount(self.most)}"
        return f"{most}; needed: {'not known' if self.likely is None else f'about {self._amount(self.likely)}'}"

    def _amount(self, node_hours: float) -> str:
        return f"{node_hours:,.2f}{cost_words(node_hours, self.config.cluster)}"


def chain_cost(config: CommonConfig, plan: Plan, run: Run, future: Forecast | None, *, now: float) -> ChainCost:
    """Return the cost of the jobs of a submit. `now`: seconds since 1970."""
    nodes, seconds = plan.nodes_of_job, math.inf if plan.chain.auto_requeue else plan.time_limit
    seconds = max(0.0, min(seconds, budget_end(run, plan, nodes=nodes, start=now).time - now))
    likely = None if future is None else future.node_hours
    with contextlib.suppress(RelayrunError, OSError):
        if run.attempt_numbers() and (left := summarize_run(run, QueueStatus(), now=now, plan=plan).remaining):
            likely = left.node_hours
    return ChainCost(most=seconds * nodes / SECONDS_PER_HOUR, likely=likely, config=config)


def confirm_cost(cost: ChainCost, *, yes: bool) -> None:
    """Print the node hours of a chain, and ask if they exceed the limit. Exits with 2 without a yes."""
    asks = cost.most > cost.ask_above
    if asks or cost.config.chain.auto_requeue:
        print(f"node hours {cost.words}", flush=True)
    if yes or not asks:
        return
    question = f"this can use more than {cost.ask_above:g} node hours (ask_above_node_hours)"
    if sys.stdin.isatty():
        print(f"{question}; submit it? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
        question = "nothing was submitted"
    print(f"error: {question}\n  -> add --yes, or set chain.max_node_hours", file=sys.stderr)
    sys.exit(2)
