"""When a chain's jobs were queued, had nodes, and gave them back, for accounts of what the nodes did.

Slurm's accounting (`sacct`) knows every job of a chain, also one that was queued again under its id. Without it the
controller remembers a job for some minutes, and the local queue keeps a file for each.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import history
from relayrun.control.scheduler.base import is_live_state
from relayrun.control.scheduler.history import RESIZING
from relayrun.control.scheduler.job_text import parse_timestamp
from relayrun.control.scheduler.local_queue import LocalQueue


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """One time that a job had nodes. Times are seconds since 1970, as the scheduler's clock has them."""

    job_id: str
    nodes: int
    """At its start."""
    submit: float | None
    """When it was queued, or queued again; None where nobody says."""
    eligible: float | None
    """When nothing but a lack of nodes kept it from starting any more."""
    start: float
    end: float | None
    """None while it has its nodes."""
    source: str
    """Who says so: sacct, squeue or the local queue."""
    state: str = ""
    """How the job was, or has ended, in the scheduler's word."""
    resized: Sequence[tuple[float, int]] = ()
    """When nodes were taken from it, and how many it had from then on, oldest first."""


def allocations(plan: Plan, run: Run, *, since: float, job_ids: Sequence[str]) -> list[Allocation]:
    """Every allocation of the chain that a scheduler remembers, oldest first; none where it does not answer.

    `since`: seconds since 1970, before which no job of interest had nodes. `job_ids`: of the jobs that began an
    attempt. A first job may have had another name than the chain's when it was queued.
    """
    if plan.scheduler == "local":
        return _local_allocations(run)
    accounted = _allocations_by_sacct([f"--name={plan.job_name}"], since)
    if missing := set(job_ids) - {each.job_id for each in accounted}:
        accounted += _allocations_by_sacct([f"--jobs={','.join(sorted(missing))}"], since)
    known = {each.job_id for each in accounted}
    remembered = [] if known >= set(job_ids) else _allocations_by_controller(plan)
    return sorted([*accounted, *(each for each in remembered if each.job_id not in known)], key=lambda each: each.start)


def _local_allocations(run: Run) -> list[Allocation]:
    jobs = [job for job in LocalQueue(run.path / "local").every_job() if not job.auxiliary]
    return [
        Allocation(
            job_id=job.id,
            nodes=1,
            submit=job.submit_time,
            eligible=job.eligible_time,
            start=job.start_time,
            end=None if is_live_state(job.state) else job.end_time,
            source="the local queue",
            state=job.state,
        )
        for job in jobs
        if job.start_time is not None and job.state != "PENDING"  # one that is queued again lost the times it had
    ]


def _allocations_by_sacct(which: Sequence[str], since: float) -> list[Allocation]:
    text = history.ask_slurm(
        [
            "sacct",
            "--allocations",
            "--allusers",
            "--duplicates",  # a job that was queued again has a row for each time
            "--parsable2",
            "--noheader",
            *which,
            f"--starttime={time.strftime('%Y-%m-%dT%H:%M:%S', time.localtime(since))}",
            "--format=JobID,State,NNodes,Submit,Eligible,Start,End",
        ]
    )
    rows = [row for line in (text or "").splitlines() if len(row := line.split("|")) == 7]
    found = [_allocation_of_row(row, source="sacct") for row in rows]
    return join_resized([each for each in found if each is not None])


def join_resized(rows: Sequence[Allocation]) -> list[Allocation]:
    """Make one allocation of the rows of a job that lost nodes and went on: accounting begins another one each time.

    To it such a job is RESIZING in all rows but the last, and queued anew when the one before it ended.
    """
    found: list[Allocation] = []
    for each in sorted(rows, key=lambda row: row.start):
        at = next((at for at, before in enumerate(found) if _continues(before, each)), None)
        if at is None:
            found.append(each)
        else:
            before = found[at]
            resized = [*before.resized, (each.start, each.nodes)]
            found[at] = replace(before, end=each.end, state=each.state, resized=resized)
    return [replace(each, end=None) if each.state == RESIZING else each for each in found]


def _continues(before: Allocation, row: Allocation) -> bool:
    return before.state == RESIZING and before.job_id == row.job_id and before.end == row.start


def _allocations_by_controller(plan: Plan) -> list[Allocation]:
    command = ["squeue", "--noheader", "--states=all", f"--name={plan.job_name}", "--format=%i|%T|%D|%V||%S|%e"]
    rows = [row for line in (history.ask_slurm(command) or "").splitlines() if len(row := line.split("|")) == 7]
    found = [_allocation_of_row(row, source="squeue") for row in rows]
    return [each for each in found if each is not None]


def _allocation_of_row(row: Sequence[str], *, source: str) -> Allocation | None:
    """An allocation from id, state, nodes, and the times of submission, eligibility, start and end; None: it had none.

    What the controller says of the start of a queued job, and of the end of a running one, is a guess. To accounting a
    job that was queued again is REQUEUED, with an end, in the row of each time before.
    """
    job_id, state, nodes, submit, eligible, start, end = row
    began, ended = parse_timestamp(start), parse_timestamp(end)
    if began is None or state == "PENDING" or not nodes.isdecimal():
        return None
    return Allocation(
        job_id=job_id,
        nodes=int(nodes),
        submit=parse_timestamp(submit),
        eligible=parse_timestamp(eligible),
        start=began,
        end=ended if source == "sacct" or not is_live_state(state) else None,
        source=source,
        state=state.partition(" ")[0],  # behind it may stand who cancelled it
    )
