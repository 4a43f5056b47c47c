"""All that is known of a run: its chain and queue, how far it is, what is durable, why the last attempt ended.

`read_run_status` makes facts of the records and of what the scheduler answered; it asks neither clock nor scheduler.
`relayrun.watch.status.run_status_text` turns them into text.
"""

from __future__ import annotations

import contextlib
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.control.chain import excluded_nodes
from relayrun.control.chain.quota import file_system_limit
from relayrun.control.chain_state import count_failed_attempts
from relayrun.control.rundir import (
    checkpoint_records,
    evaluations,
    mirror,
    node_health,
    restarts,
    storage_limits,
    triggers,
)
from relayrun.control.rundir.checkpoint_records import BrokenCheckpoint, Lineage, ResumePoint
from relayrun.control.rundir.evaluations import EvaluationResult
from relayrun.control.rundir.mirror import MirrorPass
from relayrun.control.rundir.node_health import Straggler
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run, stream_positions_path
from relayrun.control.rundir.storage_limits import PurgeForecast, QuotaForecast
from relayrun.control.rundir.triggers import Trigger
from relayrun.control.scheduler.base import RESERVATION_GONE, Job
from relayrun.control.scheduler.job_history import JobEnd
from relayrun.errors import RunDirError
from relayrun.files import read_json, read_lines
from relayrun.tokens.streams.lane_cursor import FAULT_REASONS, LaneCursor, skipped_rows
from relayrun.watch import unsent_notices
from relayrun.watch.status.cron_check_record import FolderCache
from relayrun.watch.status.queue import QueueStatus, waiting_evaluations
from relayrun.watch.status.summary import RunRecords, RunSummary, damaged_records_as_error

MIN_FREE_BYTES = 1 << 16
"""A disk with less room for this user is full."""


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunSummary):
    """A run at one moment. Times are seconds since 1970, ages and leads seconds."""

    mode: str
    auto_requeue: bool
    jobs: list[Job]
    """Jobs of the chain that are queued or run."""
    fallback_jobs: list[Job]
    """Small jobs that go on with the chain where one of `jobs` fails."""
    scheduler_error: str | None
    pending: dict[str, str]
    """Why queued jobs wait, in the scheduler's words, by id."""
    last_job: JobEnd | None
    """How the newest job that ran ended, where nothing runs now and the scheduler remembers it."""
    go_on: str | None
    """The command that goes on with a broken chain."""
    phase: str | None
    """What the slowest node of a running attempt does: start, step, save or evaluation."""
    leave_time: float | None
    """When a running attempt saves and leaves, as reckoned when it began."""
    job_end_time: float | None
    """When the time limit of a running attempt is reached."""
    left_behind: list[BrokenCheckpoint]
    """Checkpoints of later iterations that are not whole, the newest first."""
    in_quarantine: list[BrokenCheckpoint]
    """Every checkpoint in quarantine, also those whose iterations have been computed again."""
    evaluations: list[EvaluationResult]
    """Results of the evaluations, by iteration."""
    waiting_evaluations: dict[int, str]
    """Iterations whose evaluation has no result yet, and its job with its state as far as it is known."""
    failed_rounds: int
    """How often the ranks of the newest attempt failed; all but perhaps the last time they were started again inside
    the job."""
    last_failed_round: str | None
    """Who failed then, where, and what it took to go on."""
    sick_nodes: list[str]
    """What was found wrong with nodes of the newest attempt, and what was done about it, the newest last."""
    straggler: str | None
    """Which rank is slower than its peers, and in what; None where none is."""
    failed_saves: int
    """Saves of the whole run that did not work, after which training went on."""
    last_failed_save: str | None
    """Iteration and reason of the newest failed save."""
    failed_attempts: int
    """Attempts in a row, up to now, without a new durable iteration."""
    max_failed_attempts: int
    strikes: dict[str, int]
    """Nodes with the number of failed attempts that they are blamed for and that still count."""
    excluded: list[str]
    """Nodes that the next job leaves out for their strikes, where Slurm has others in their place."""
    used_again: list[str]
    """Those among them that the newest attempt has all the same, as there were too few others."""
    triggers: list[Trigger]
    """Triggers that were touched and not yet obeyed."""
    unsent_notices: int = 0
    """Notices that somebody should have been told of by now."""
    unsent_reason: str = ""
    """Why they were not sent."""
    mirror: MirrorPass | None = None
    """How the last pass of copying checkpoints to a second place ended; None where there was none."""
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """Files and rows that streams could not read and left out, by data set and reason, up to the newest record."""
    purges: list[PurgeForecast] = field(default_factory=list)
    """When the newest checkpoint, and data of a chain that goes on, would be purged by the site."""
    quotas: list[QuotaForecast] = field(default_factory=list)
    """How full the quotas of a chain that goes on are, and its file system, and when they will be."""
    quota_complaint: str | None = None
    """Why a quota is not known."""
    unqueued_evaluations: dict[int, str] = field(default_factory=dict)
    """Iterations that are to be evaluated and have no job, and why the scheduler took none; empty: nobody has asked."""
    disk: list[str] = field(default_factory=list)
    """File systems of the run on which nothing can be written any more, each in words."""


def read_run_status(
    run: Run, queue: QueueStatus, *, now: float, plan: Plan | None = None, asked: FolderCache | None = None
) -> RunStatus:
    """Return the status of a run. `plan`: the run's, where it was read already. `asked`: see `last_cron_check`.

    Raises RunDirError, with one clear message, where the directory is no run or damaged.
    """
    with damaged_records_as_error(run):
        return _read_run_status(RunRecords(run, Plan.load(run) if plan is None else plan, queue, now=now), asked)


def _read_run_status(look: RunRecords, asked: FolderCache | None) -> RunStatus:
    run, plan, queue, now = look.run, look.plan, look.queue, look.now
    begin, durable, line = look.begin, look.durable, look.line
    strikes = excluded_nodes.read_node_failures(run)
    counts: dict[str, int] = {}
    for strike in strikes:
        if now - strike.time < excluded_nodes.FAILURE_EXPIRE_SECONDS:
            counts[strike.node] = counts.get(strike.node, 0) + 1
    newest = None if look.number is None else run.attempt(look.number)
    failures = [line for number in run.attempt_numbers() for line in read_lines(run.attempt(number).failed_saves)]
    failed_rounds = restarts.read_failed_restarts(newest) if newest is not None else []
    beats = newest.read_heartbeats() if look.running and newest is not None else []
    end_time = begin.job_end_time if begin is not None and look.running else None
    living = look.state != "stopped"
    quotas, quota_complaint = _quotas(run, now) if living else ([], None)
    excluded = excluded_nodes.worst_nodes(strikes, nodes=plan.nodes, now=now)
    late, why_late = unsent_notices.count_unsent(run, now=now)
    stuck = any(job.state == RESERVATION_GONE for job in queue.jobs)  # it has to be cancelled first
    return RunStatus(
        **vars(look.standing(asked)),
        mode=plan.mode,
        auto_requeue=plan.auto_requeue,
        jobs=queue.jobs,
        fallback_jobs=queue.fallback_jobs,
        scheduler_error=f"the scheduler did not answer: {queue.error}" if queue.error else queue.hidden,
        pending={job.id: queue.reasons[job.id] for job in queue.jobs + queue.fallback_jobs if job.id in queue.reasons},
        last_job=queue.last_job,
        go_on=None if look.state != "broken" or stuck else shlex.join(["relayrun", "resume", str(run.path)]),
        phase=min(beats, key=lambda beat: beat.time).phase if beats else None,
        leave_time=end_time - begin.lead if begin is not None and end_time is not None else None,
        job_end_time=end_time,
        left_behind=checkpoint_records.newer_broken_checkpoints(run, line, durable) if durable else [],
        in_quarantine=checkpoint_records.quarantined_checkpoints(run),
        evaluations=evaluations.evaluation_results(run),
        waiting_evaluations={
            iteration: f"job {job_id}" + (f", {queue.evaluations[job_id]}" if job_id in queue.evaluations else "")
            for iteration, job_id in waiting_evaluations(run)
        },
        unqueued_evaluations=evaluations.unqueued_iterations(run),
        failed_rounds=len(failed_rounds),
        last_failed_round=failed_rounds[-1].told if failed_rounds else None,
        sick_nodes=[] if newest is None else [found.told for found in node_health.read_findings(newest)],
        straggler=Straggler.of(look.step["straggler"]).words if look.step.get("straggler") else None,
        failed_saves=len(failures),
        last_failed_save=f"iteration {failures[-1]['iteration']}: {failures[-1]['error']}" if failures else None,
        failed_attempts=count_failed_attempts(run, plan) - (1 if look.running else 0),
        max_failed_attempts=plan.max_failed_attempts,
        strikes=counts,
        excluded=excluded,
        used_again=_used_again(excluded, strikes, begin),
        triggers=_pending_triggers(run),
        left_out=_skipped_documents(run, line),
        purges=_purges(run, plan, durable, living=living),
        quotas=quotas,
        quota_complaint=quota_complaint,
        disk=_full_file_systems(run),
        unsent_notices=late,
        unsent_reason=why_late,
        mirror=_last_mirror_pass(run, durable=durable is not None and durable.path is not None),
    )


def _used_again(
    excluded: list[str], strikes: list[excluded_nodes.NodeFailureRecord], begin: AttemptStart | None
) -> list[str]:
    if begin is None or not excluded:
        return []
    struck = {strike.node for strike in strikes if strike.attempt >= begin.attempt}  # in this attempt
    return [node for node in excluded if node in excluded_nodes.expand_nodelist(begin.nodes) and node not in struck]


def _purges(run: Run, plan: Plan, durable: ResumePoint | None, *, living: bool) -> list[PurgeForecast]:
    if not plan.purge_days:
        return []
    found = [storage_limits.checkpoint_purge(durable.iteration, durable.path, plan.purge_days)] if durable else []
    found += [storage_limits.data_purge(run, plan.purge_days)] if living else []
    return [each for each in found if each is not None]


def _quotas(run: Run, now: float) -> tuple[list[QuotaForecast], str | None]:
    try:
        measures = storage_limits.read_usage(run)
        return storage_limits.quota_forecasts(measures, now=now), measures.complaint
    except RunDirError as error:  # it must not hide where the run stands
        return [], error.message


def _full_file_systems(run: Run) -> list[str]:
    """Which file systems of a run have no room for another file, or no number for it, as `df` tells; nothing is tried.

    What is left is less than a block of the largest file systems: too little for a record.
    """
    found = {}
    for place in (run.path, run.checkpoints):
        with contextlib.suppress(OSError):
            free = {each.kind: each.limit - each.used for each in file_system_limit(place)}
            kind: storage_limits.QuotaKind = "files" if free.get("files", 1) <= 0 else "bytes"
            if free.get(kind, MIN_FREE_BYTES) < (MIN_FREE_BYTES if kind == "bytes" else 1):
                left = f"{max(0, free[kind]):,} {kind} left"
                found[place.stat().st_dev] = (
                    f"full: {left} below {place}; no job can record anything until some is freed"
                )
    return list(found.values())


def _last_mirror_pass(run: Run, *, durable: bool) -> MirrorPass | None:
    """How the copies stood; where checkpoints wait for their first pass, that there was none."""
    try:
        last = mirror.read_last_pass(run)
        if last is not None or mirror.read_mirror_policy(run) is None or not durable:
            return last
        since = mirror.mirror_policy_path(run).stat().st_mtime
        words = f"no pass has ended since the submit; {mirror.mirror_folder(run)}/log may say why"
        return MirrorPass(time=since, iteration=None, behind=0, complaint=words, seen=False)
    except RunDirError as error:  # it must not hide where the run stands
        return MirrorPass(time=0.0, iteration=None, behind=0, complaint=error.message)


def _skipped_documents(run: Run, line: Lineage) -> dict[str, dict[str, int]]:
    """What streams could not read and left out, from the newest checkpoint that says where their lanes stood."""
    commit = next((counted.commit for counted in line.backwards()), None)
    path = None if commit is None else stream_positions_path(Path(commit.path))
    if path is None or not path.is_file():
        return {}
    found: dict[str, dict[str, int]] = {}
    for name, standing in read_json(path).get("streams", {}).items():
        lanes = [LaneCursor(*cursor) for cursor in standing["cursors"]]
        counts = {"files": sum(lane.files for lane in lanes)} | skipped_rows(lanes)
        faults = {
            reason: count for reason, count in counts.items() if count and reason in ("files", *FAULT_REASONS.values())
        }
        found |= {name: faults} if faults else {}
    return found


def _pending_triggers(run: Run) -> list[Trigger]:
    """Triggers that wait; none for who may not look into the folder."""
    try:
        return [trigger for name in triggers.TRIGGER_NAMES if (trigger := triggers.read_trigger(run, name))]
    except PermissionError:
        return []
