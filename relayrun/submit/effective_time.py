"""Expected effective training time of a chain on many nodes: the share of the wall time in steps that count.

Failures are a Poisson process. A formula adds what saves, copies in memory, failures and ends of jobs cost; the costs
are measured in a run, or assumed by name, each with a range. A test compares it with `benchmarks/simulator.py`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, pairwise

from relayrun.control.rundir import restarts
from relayrun.control.rundir.merged_metrics import newest_valid_lines
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.submit.forecast import SECONDS_PER_HOUR, daly_interval

ENOUGH = 0.95
"""Share of the jobs in which the spare nodes are enough."""
NEWEST_LINES = 20_000
"""Lines of the metrics in which saves are looked for."""


@dataclass(frozen=True, kw_only=True)
class CostRange:
    """A cost with its range, and its source."""

    low: float
    expected: float
    high: float
    words: str
    source: str = "assumed"


ASSUMED: Mapping[str, CostRange] = {
    "save": CostRange(low=0.5, expected=5, high=30, words="seconds that a save holds training up"),
    "restart": CostRange(
        low=20, expected=90, high=240, words="seconds from a failure to the next step, inside the job"
    ),
    "next_job": CostRange(
        low=180, expected=600, high=3600, words="seconds from the end of a job to the next one's first step"
    ),
    "hangs": CostRange(
        low=0, expected=15, high=30, words="seconds to notice a failure: one in twenty is a hang of 300 s"
    ),
    "copies": CostRange(low=0.002, expected=0.01, high=0.02, words="share of the time for copies in memory"),
    "node_share": CostRange(low=0.5, expected=0.75, high=1, words="share of the failures that cost a node"),
}


@dataclass(frozen=True, kw_only=True)
class EffectiveTime:
    """The expected effective training time of a chain. Shares are of the wall time from the first step on."""

    nodes: int
    node_mtbf_hours: float
    job_hours: float
    """Length of a job."""
    costs: Mapping[str, CostRange]

    @property
    def job_mtbf_hours(self) -> float:
        """Mean hours between two failures of the whole job."""
        return self.node_mtbf_hours / self.nodes

    @property
    def save_interval(self) -> float:
        """Seconds between two saves at the least cost, if each failure goes back to a save (Daly)."""
        return daly_interval(self.costs["save"].expected, self.job_mtbf_hours * SECONDS_PER_HOUR)

    @property
    def spare_nodes(self) -> int:
        """Spare nodes that are enough in ENOUGH of the jobs; lost nodes follow Poisson's distribution."""
        mean = self.job_hours / self.job_mtbf_hours * self.costs["node_share"].expected
        spares, term = 0, math.exp(-mean)
        reached = term
        while reached < ENOUGH and spares < self.nodes:
            spares += 1
            term *= mean / spares
            reached += term
        return spares

    def effective(self, *, in_job: bool) -> CostRange:
        """Return the effective training time. `low`: all costs at their upper ends."""
        low, expected, high = (self._effective(end, in_job=in_job) for end in ("high", "expected", "low"))
        how = "restarts inside the job (chain.recovery: node)" if in_job else "the next job after each failure"
        words = f"effective training time, {how}"
        return CostRange(low=low, expected=expected, high=high, words=words, source="computed")

    def _effective(self, end: str, *, in_job: bool) -> float:
        costs = {name: float(getattr(cost, end)) for name, cost in self.costs.items()}
        interval, failures = self.save_interval, self.job_mtbf_hours * SECONDS_PER_HOUR
        training = interval / (interval + costs["save"])
        each = by_job = costs["next_job"] + interval / 2
        if in_job:
            training *= 1 - costs["copies"]
            each = costs["restart"] + (1 - ENOUGH) * by_job * failures / (self.job_hours * SECONDS_PER_HOUR)
        ends = costs["next_job"] / (self.job_hours * SECONDS_PER_HOUR)
        return training / (1 + (costs["hangs"] + each) / failures + ends)


def measured_costs(run: Run) -> Iterator[tuple[str, CostRange]]:
    """Yield the costs that the records of a run hold, by the names of `ASSUMED`."""
    numbers = run.attempt_numbers()
    failed = [each for number in numbers for each in restarts.read_failed_restarts(run.attempt(number))]
    saves = (float(line.get("save_seconds") or 0) for line in islice(newest_valid_lines(run), NEWEST_LINES))
    found: dict[str, Iterable[float]] = {
        "restart": [each.seconds["all"] for each in failed if "all" in each.seconds],
        "save": [seconds for seconds in saves if seconds > 0],
        "next_job": _seconds_between_jobs(run, numbers),
    }
    for name, values in found.items():
        if values := sorted(values):
            middle, source = statistics.median(values), f"{len(values)} of this run"
            yield name, replace(ASSUMED[name], low=values[0], expected=middle, high=values[-1], source=source)


def _seconds_between_jobs(run: Run, numbers: list[int]) -> Iterator[float]:
    """Yield for each job after the first the seconds from the end of the job before to its first step."""
    for before, number in pairwise(numbers):
        ended = run.attempt(before).read_end()
        first = next((line["time"] for line in read_json_lines(run.attempt(number).metrics) if "loss" in line), None)
        if ended is not None and first is not None:
            yield max(0.0, float(first) - ended.end_time)
