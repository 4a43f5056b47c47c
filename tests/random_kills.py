"""Random kills of ranks and nodes: their cost in training time, and their effect on the result.

`living_ranks` and `signal_random_rank` reach the rank processes of this machine. `measure_timeline` computes the
share of time spent on new steps. `report_kills` compares a disturbed run with an undisturbed one, collects the figures
and lists the claims that do not hold. `benchmarks/kills.py` and tests use it.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from relayrun.control.rundir.restarts import RESTART_SECONDS, FailedRestart, read_failed_restarts, resets_iteration
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError
from relayrun.files import read_json_lines
from relayrun.lab.compare_runs import checkpoint_differences, loss_differences
from relayrun.lab.faults import processes
from relayrun.tokens.mixture.audit import audit_run, dataset_ledgers

_CLOCK_TOLERANCE_SECONDS = 0.05
"""Largest delay of a recorded fault time."""
MIN_TRAINING_SHARE = 0.9
"""Required share of effective training time."""
MAX_INTERVALS_LOST = {"memory": 1, "neighbour": 2}
"""Copy intervals that a restart may lose: the newest copy may be on its way to the neighbour."""


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A live rank process."""

    rank: int
    node: str
    """Slurm's name of its node; empty without Slurm."""
    pid: int


def living_ranks(run: Run) -> list[RankProcess]:
    """Return the live ranks that agents have forked; an agent's server has their command, not their process name."""
    found = []
    for pid, words, variables in processes.live_processes():
        name = processes.program_name(pid)
        if f"--run-dir={run.path}".encode() in words and name.startswith("rank-"):
            node = variables.get(b"SLURMD_NODENAME", b"").decode()
            found.append(RankProcess(rank=int(name.removeprefix("rank-")), node=node, pid=pid))
    return sorted(found, key=lambda process: process.rank)


def signal_random_rank(run: Run, generator: random.Random, number: signal.Signals) -> RankProcess | None:
    """Send a signal to a random live rank; return it, None if none is alive."""
    ranks = living_ranks(run)
    if not ranks:
        return None
    chosen = generator.choice(ranks)
    try:
        os.kill(chosen.pid, number)
    except ProcessLookupError:
        return None
    return chosen


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Division of a run's time, in seconds."""

    began: float
    """Begin of the first step, since 1970."""
    ended: float
    """End of the last step, since 1970."""
    effective: float
    """Time of steps that count."""
    steps: int
    """Number of steps that count."""
    steps_lost: int
    """Recorded steps that were done again."""
    step: float
    """Median time of a step that counts, including the time since the step before."""

    @property
    def seconds(self) -> float:
        """Time from the begin of the first step to the end of the last."""
        return self.ended - self.began

    @property
    def share(self) -> float:
        """Share of this time that is effective."""
        return self.effective / self.seconds


@dataclass(frozen=True)
class _FinishedSteps:
    iteration: int
    seconds: float
    """Since the step before; the step alone if the ranks started in between."""


def measure_timeline(run: Run) -> Timeline:
    """Return the timeline of a run. Raises ValueError if it has done no step."""
    done: list[_FinishedSteps] = []
    lost = 0
    began: float | None = None
    before = ended = 0.0
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        if (begin := attempt.read_begin()) is None:
            continue
        lost += _drop_steps_after(done, begin.base_iteration)
        failed = [(one.time, one.time + one.seconds.get("end", 0.0)) for one in read_failed_restarts(attempt)]
        first = True
        for line in read_json_lines(attempt.metrics):
            if resets_iteration(line):
                lost += _drop_steps_after(done, int(line["iteration"]))
            elif "loss" in line:
                now, own = float(line["time"]), float(line["step_seconds"]) + float(line.get("hooks_seconds") or 0.0)
                began = now - own if began is None else began
                # a restart after the newest iteration leaves no line in the metrics
                alone = first or any(before < over and now > noticed for noticed, over in failed)
                done.append(_FinishedSteps(int(line["iteration"]), own if alone else now - before))
                before = ended = now
                first = False
    if began is None:
        raise ValueError(f"{run.path} has done no step")
    seconds = [step.seconds for step in done]
    return Timeline(
        began=began,
        ended=ended,
        effective=sum(seconds),
        steps=len(done),
        steps_lost=lost,
        step=statistics.median(seconds),
    )


def _drop_steps_after(done: list[_FinishedSteps], iteration: int) -> int:
    """Remove steps after this iteration; return their number."""
    many = sum(step.iteration > iteration for step in done)
    if many:
        del done[-many:]
    return many


@dataclass(frozen=True, kw_only=True)
class KillEvent:
    """An injected fault."""

    time: float
    """Seconds since 1970."""
    kind: str
    """`kill`, `stop` (SIGSTOP), `node`, or `host`: the batch host is lost."""
    rank: int | None = None
    node: str = ""


@dataclass(frozen=True, kw_only=True)
class KillReport:
    """A disturbed run beside an undisturbed run of the same config."""

    timeline: Timeline
    jobs: Sequence[str]
    """Job ids, one per attempt."""
    restarts: int
    """Number of times that Slurm requeued these jobs."""
    events: Sequence[KillEvent]
    failed: Sequence[FailedRestart]
    tensors: int
    faults: Mapping[str, Sequence[str]]
    """Differences from the undisturbed run, by `losses`, `weights` and `samples`."""
    memory_interval: int
    """Intervals in steps between copies in memory, in the order in which the run chose them."""

    def figures(self) -> dict[str, Any]:
        """Return all figures as plain values."""
        kinds = Counter(event.kind for event in self.events)
        names = [name for name in RESTART_SECONDS if any(name in failed.seconds for failed in self.failed)]
        return {
            "counted_share": self.timeline.share,
            "seconds": self.timeline.seconds,
            "step_seconds": self.timeline.step,
            "steps": self.timeline.steps,
            "steps_lost": self.timeline.steps_lost,
            "kills": kinds["kill"],
            "stops": kinds["stop"],
            "nodes_lost": kinds["node"],
            "hosts_lost": kinds["host"],
            "restarts": len(self.failed) + len(self.jobs),
            "restarts_from": dict(Counter(failed.source for failed in self.failed if failed.again)),
            "most_steps_lost_in_a_restart": max((failed.steps_lost for failed in self.failed), default=0),
            "restart_seconds": {
                name: _spread([failed.seconds[name] for failed in self.failed if name in failed.seconds])
                for name in names
            },
            "by_fault": self.by_fault(),
            "steps_between_copies": self.memory_interval,
            "jobs": len(set(self.jobs)),
            "job_restarts": self.restarts,
            "tensors_compared": self.tensors,
            "differences": {name: list(found)[:5] for name, found in self.faults.items()},
            "events": [asdict(event) | {"time": round(event.time - self.timeline.began, 1)} for event in self.events],
        }

    def by_fault(self) -> dict[str, dict[str, Any]]:
        """Return for each kind of fault the seconds until it was noticed, and from there to the next new step.

        A rank killed before the first step after its start counts as `kill in set-up`.
        """
        found: dict[str, list[tuple[float, FailedRestart]]] = {}
        for event, following in zip(self.events, [*self.events[1:], None], strict=False):
            until = float("inf") if following is None else following.time
            hit = [one for one in self.failed if event.time - _CLOCK_TOLERANCE_SECONDS <= one.time < until]
            if hit:
                kind = event.kind + (" in set-up" if hit[0].iteration <= hit[0].base_iteration else "")
                found.setdefault(kind, []).append((max(0.0, hit[0].time - event.time), hit[0]))
        return {
            kind: {
                "restarts": len(hits),
                "noticed": _spread([seconds for seconds, _ in hits]),
                "next_step": _spread([one.seconds["all"] for _, one in hits if "all" in one.seconds]),
                "most_steps_lost": max(one.steps_lost for _, one in hits),
            }
            for kind, hits in sorted(found.items())
        }

    def failed_claims(self, *, spares: int) -> list[str]:
        """Return the claims that do not hold for this run. `spares`: spare nodes of the job."""
        found = [f"{name}: {lines[0]}" for name, lines in self.faults.items() if lines]
        if not self.tensors:
            found.append("weights: no tensor was compared")
        lost = sum(event.kind == "node" for event in self.events)
        noticed = sum(len(failed.lost) for failed in self.failed)
        hosts = sum(event.kind == "host" for event in self.events)
        if spares >= lost and (len(set(self.jobs)), self.restarts) != (1, hosts):
            found.append(f"one job: it took {len(set(self.jobs))}, restarted {self.restarts} times, {hosts} hosts lost")
        if not self.events:
            found.append("nothing was killed")
        if noticed != lost + hosts:
            found.append(f"{lost + hosts} nodes were lost, and {noticed} are on record")
        if not lost + hosts <= len(self.failed) <= len(self.events):
            found.append(f"{len(self.events)} faults, and {len(self.failed)} failed restarts")
        interval = self.memory_interval
        for failed in self.failed if interval else ():
            most = interval * MAX_INTERVALS_LOST.get(failed.source, 0)
            if failed.again and most and failed.steps_lost > most:
                found.append(f"copies every {interval} steps at most: {failed.steps_lost} were lost ({failed.told})")
        return found


def report_kills(
    run: Run, reference: Run, *, last: int, events: Sequence[KillEvent], restarts: Mapping[str, int]
) -> KillReport:
    """Compare a disturbed run with the undisturbed one. `restarts`: Slurm's restart count by job id."""
    jobs, failed = [], []
    for number in run.attempt_numbers():
        attempt = run.attempt(number)
        if (begin := attempt.read_begin()) is not None:
            jobs.append(begin.job_id)
            failed += read_failed_restarts(attempt)
    tensors, different = checkpoint_differences(run.checkpoint(last), reference.checkpoint(last), tensors_only=True)
    return KillReport(
        timeline=measure_timeline(run),
        jobs=jobs,
        restarts=sum(restarts[job] for job in set(jobs)),
        events=events,
        failed=failed,
        tensors=tensors,
        faults={
            "losses": loss_differences(run, reference, last),
            "weights": different,
            "samples": sample_differences(run, reference, last),
        },
        memory_interval=audit_run(run).config.checkpoint.memory_interval,
    )


def _spread(values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p95": ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))],
        "max": ordered[-1],
    }


def sample_differences(run: Run, reference: Run, last: int) -> list[str]:
    """Return the faults in the samples of iterations 1 to `last`: missing, repeated, or of other data."""
    rows, others = (
        list(map(vars, dataset_ledgers(replace(audit_run(one), consumed_samples=_samples_consumed(one, last)))))
        for one in (run, reference)
    )
    return sample_gaps(run, last) + ([] if rows == others else [f"the ledger is {rows}, undisturbed {others}"])


def _samples_consumed(run: Run, last: int) -> int:
    """Samples after iteration `last`. Raises InputError if the run did not reach it."""
    for line in read_json_lines(run.metrics_view):
        if "loss" in line and line["iteration"] == last:
            return int(line["consumed_samples"])
    raise InputError(f"iteration {last} was not done", where=run.metrics_view)


def sample_gaps(run: Run, last: int) -> list[str]:
    """Return the first place where the samples of iterations 1 to `last` are not consecutive."""
    consumed = number = 0
    for line in read_json_lines(run.metrics_view):
        if "loss" not in line:
            continue
        number += 1
        consumed += line["global_batch_size"]
        if (line["iteration"], line["consumed_samples"]) != (number, consumed):
            return [
                f"iteration {line['iteration']} ends with {line['consumed_samples']} samples, where iteration {number} "
                f"was to end with {consumed}"
            ]
    return [] if number == last else [f"{number} iterations, not {last}"]
