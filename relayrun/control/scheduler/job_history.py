"""The history of a chain's jobs, for people: how the last job ended, why jobs wait, and when the chain had nodes.

Slurm's accounting (`sacct`) is asked first; without it the controller, which forgets a job after some minutes. The
local queue keeps a file per job. Each command gets a few seconds; a missing answer is None.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import slurm_commands
from relayrun.control.scheduler.base import Allocation, JobEnd, JobHistory, is_live_state
from relayrun.control.scheduler.local_queue import LocalQueue
from relayrun.control.scheduler.slurm_commands import parse_timestamp
from relayrun.errors import SchedulerError

ANSWER_SECONDS = 10.0
RESIZING = "RESIZING"
"""Slurm's state in an accounting row that ended with the loss of a node while the job went on."""

SILENT_COMMANDS: set[str] = set()
"""Commands that timed out once; this process does not call them again."""


class SlurmHistory(JobHistory):
    """The history in Slurm's accounting, or in its controller."""

    def last_job(self, plan: Plan, *, since: float) -> JobEnd | None:
        return _last_job_by_sacct(plan, since) or _last_job_by_controller(plan)

    def pending_reasons(self, plan: Plan) -> dict[str, str]:
        names = ",".join([plan.job_name, plan.fallback_job_name])
        text = ask_slurm(["squeue", "--noheader", f"--name={names}", "--format=%i|%r"])
        rows = [line.partition("|") for line in (text or "").splitlines()]
        return {job_id: reason for job_id, _, reason in rows if reason not in ("", "None")}

    def other_jobs_are_hidden(self) -> bool:
        found = re.search(r"^PrivateData\s*=\s*(\S*)", ask_slurm(["scontrol", "show", "config"]) or "", re.M)
        return found is not None and "jobs" in found[1].split(",")

    def allocations(self, plan: Plan, *, since: float, job_ids: Sequence[str]) -> list[Allocation]:
        accounted = _allocations_by_sacct(f"--name={plan.job_name}", since)
        if missing := set(job_ids) - {each.job_id for each in accounted}:
            accounted += _allocations_by_sacct(f"--jobs={','.join(sorted(missing))}", since)
        known = {each.job_id for each in accounted}
        # the controller remembers a job for some minutes
        command = ["squeue", "--noheader", "--states=all", f"--name={plan.job_name}", "--format=%i|%T|%D|%V||%S|%e"]
        for row in [] if known >= set(job_ids) else _rows(command, 7):
            if (each := _allocation_of_row(row, source="squeue")) is not None and each.job_id not in known:
                accounted.append(each)
        return sorted(accounted, key=lambda each: each.start)


class LocalHistory(JobHistory):
    """The history in the files of a local queue."""

    def __init__(self, queue: LocalQueue) -> None:
        self._queue = queue

    def last_job(self, plan: Plan, *, since: float) -> JobEnd | None:
        jobs = [job for job in self._queue.every_job() if not job.auxiliary and job.end_time]
        ended = [job for job in jobs if not is_live_state(job.state)]
        ran = [job for job in ended if job.start_time is not None] or ended
        if not ran:
            return None
        job, code = ran[-1], ran[-1].exit_code or 0
        words = str(code) if code > 0 else f"signal {-code}" if code else ""
        return JobEnd(id=job.id, state=job.state, exit_code=words, end_time=job.end_time, source="the local queue")

    def abandoned_jobs(self) -> list[str]:
        if self._queue.is_being_run():
            return []
        old = time.time() - ANSWER_SECONDS  # a submit is followed by the start of the queue
        waiting = [job for job in self._queue.every_job() if job.state == "PENDING" and not job.auxiliary]
        return [job.id for job in waiting if self._queue.path(job.id).stat().st_mtime < old]

    def allocations(self, plan: Plan, *, since: float, job_ids: Sequence[str]) -> list[Allocation]:
        jobs = [job for job in self._queue.every_job() if not job.auxiliary]
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
            if job.start_time is not None and job.state != "PENDING"  # a requeued job has lost its earlier times
        ]


def _last_job_by_sacct(plan: Plan, since: float) -> JobEnd | None:
    # not its Reason, which explains the wait and not the end
    rows = _sacct_rows(f"--name={plan.job_name}", since, "JobID,State,ExitCode,NodeList,Start,End")
    if (row := _newest_ended(rows, ran=lambda row: parse_timestamp(row[4]) is not None)) is None:
        return None
    return JobEnd(
        id=row[0],
        state=row[1],
        exit_code=_exit_code(row[2]),
        nodes=_known_text(row[3]),
        end_time=parse_timestamp(row[5]),
        source="sacct",
    )


def _last_job_by_controller(plan: Plan) -> JobEnd | None:
    rows = _rows(["squeue", "--noheader", "--states=all", f"--name={plan.job_name}", "--format=%i|%T|%N"], 3)
    if (row := _newest_ended(rows, ran=lambda row: bool(row[2]))) is None:
        return None
    shown = ask_slurm(["scontrol", "show", "job", "--oneliner", row[0]]) or ""
    fields = slurm_commands.job_fields(shown, name=plan.job_name)
    return JobEnd(
        id=row[0],
        state=row[1],
        exit_code=_exit_code(fields.get("ExitCode", "")),
        nodes=row[2],
        reason=_known_text(fields.get("Reason", "")),
        end_time=parse_timestamp(fields.get("EndTime", "")),
        source="scontrol",
    )


def _sacct_rows(which: str, since: float, columns: str, *options: str) -> list[list[str]]:
    """Return the accounting of the jobs that the option `which` selects, one row per allocation since a time."""
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(since))
    command = ["sacct", "--allocations", "--allusers", *options, "--parsable2", "--noheader", which]
    return _rows([*command, f"--starttime={start}", f"--format={columns}"], columns.count(",") + 1)


def _rows(command: Sequence[str], columns: int) -> list[list[str]]:
    return [row for line in (ask_slurm(command) or "").splitlines() if len(row := line.split("|")) == columns]


def _newest_ended(rows: Sequence[list[str]], *, ran: Callable[[list[str]], bool]) -> list[str] | None:
    """Return the row of the newest job that ran and ended, else of one that never ran."""
    ended = [row for row in rows if not is_live_state(row[1])]
    best = [*filter(ran, ended)] or ended
    return max(best, key=lambda row: int(re.sub(r"\D.*", "", row[0]) or 0), default=None)


def _exit_code(text: str) -> str:
    """Parse Slurm's `code:signal`."""
    code, _, number = text.partition(":")
    if number not in ("", "0"):
        return f"signal {number}"
    return "" if code == "0" else code


def _known_text(text: str) -> str:
    return "" if text in ("None", "None assigned", "(null)") else text


def ask_slurm(command: Sequence[str]) -> str | None:
    """Return the output of a Slurm command; None if the command is missing, fails or times out."""
    if command[0] in SILENT_COMMANDS:
        return None
    try:
        return slurm_commands.run_slurm_command(command, seconds=ANSWER_SECONDS)
    except slurm_commands.TimedOutError:
        SILENT_COMMANDS.add(command[0])
    except SchedulerError:
        pass
    return None


def _allocations_by_sacct(which: str, since: float) -> list[Allocation]:
    # --duplicates: a requeued job has a row for each start
    rows = _sacct_rows(which, since, "JobID,State,NNodes,Submit,Eligible,Start,End", "--duplicates")
    return join_resized([each for row in rows if (each := _allocation_of_row(row, source="sacct")) is not None])


def join_resized(rows: Sequence[Allocation]) -> list[Allocation]:
    """Join the rows of each job that lost nodes and went on: accounting starts a new row at each loss. Such a job is
    RESIZING in all rows but the last, and each row starts at the end of the row before."""
    found: list[Allocation] = []
    for each in sorted(rows, key=lambda row: row.start):
        same = ((row.job_id, row.end, row.state) == (each.job_id, each.start, RESIZING) for row in found)
        at = next((at for at, goes_on in enumerate(same) if goes_on), None)
        if at is None:
            found.append(each)
        else:
            resized = [*found[at].resized, (each.start, each.nodes)]
            found[at] = replace(found[at], end=each.end, state=each.state, resized=resized)
    return [replace(each, end=None) if each.state == RESIZING else each for each in found]


def _allocation_of_row(row: Sequence[str], *, source: str) -> Allocation | None:
    """Parse id, state, nodes, and the times of submission, eligibility, start and end; None if the job had no nodes.
    The controller only guesses the start of a queued job and the end of a running one."""
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
        state=state.partition(" ")[0],  # `CANCELLED by 1000`
    )
