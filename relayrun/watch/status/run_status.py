"""The full status of a run: chain, queue, progress, checkpoints, evaluations, and why the last attempt ended.

It is made of the records and the scheduler's answer; neither clock nor scheduler is read.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.control.chain import excluded_nodes, requested_options
from relayrun.control.chain.budget import BudgetEnd, budget_end
from relayrun.control.chain.quota import file_system_limit
from relayrun.control.chain_state import count_failed_attempts
from relayrun.control.failure_signatures import cause_words
from relayrun.control.notify.events import copier_failure
from relayrun.control.rundir import checkpoint_records, evaluations, node_health, restarts, storage_limits, triggers
from relayrun.control.rundir.campaign import iterations_held_by_campaign
from relayrun.control.rundir.checkpoint_records import BrokenCheckpoint, Lineage
from relayrun.control.rundir.evaluations import EvaluationResult
from relayrun.control.rundir.mirror import MirrorPass, MirrorPolicy
from relayrun.control.rundir.node_health import Straggler
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart, RefusedConnections
from relayrun.control.rundir.run import Run, stream_positions_path
from relayrun.control.rundir.storage_limits import QuotaUsage, format_amount
from relayrun.control.rundir.triggers import Trigger
from relayrun.control.scheduler import error_lines
from relayrun.control.scheduler.base import Job, JobEnd
from relayrun.errors import RunDirError
from relayrun.files import MIN_FREE_BYTES, file_sizes, read_json, read_json_lines
from relayrun.tokens.streams.lane_cursor import FAULT_REASONS, LaneCursor, skipped_rows
from relayrun.watch import unsent_notices
from relayrun.watch.status.cron_check_record import FolderCache
from relayrun.watch.status.queue import QueueStatus, waiting_evaluations
from relayrun.watch.status.summary import RunRecords, RunSummary, blocked_jobs, damaged_records_as_error
from relayrun.watch.text import format_time


@dataclass(frozen=True, kw_only=True)
class RunStatus(RunSummary):
    """The full status of a run. Times are seconds since 1970, ages and grace periods seconds."""

    mode: str
    auto_requeue: bool
    jobs: list[Job]
    """Pending and running jobs of the chain."""
    fallback_jobs: list[Job]
    """Small jobs that continue the chain if one of `jobs` fails."""
    scheduler_error: str | None
    changed_options: list[str]
    """Options of sbatch that a person changed in a waiting job, each as a sentence; the next jobs request them too."""
    last_job: JobEnd | None
    """End of the newest job, if no job runs and the scheduler remembers it."""
    go_on: str | None
    """The command that continues a failed chain, or lets a blocked job start."""
    phase: str | None
    """Phase of the slowest node of a running attempt: start, step, save or evaluation."""
    budget: BudgetEnd
    """The end of the chain's budget if its job runs on, or if a job begins now."""
    leave_time: float | None
    """Time at which a running attempt saves and exits, as computed when it began."""
    job_end_time: float | None
    """Time limit of a running attempt."""
    left_behind: list[BrokenCheckpoint]
    """Damaged or incomplete checkpoints of later iterations, newest first."""
    in_quarantine: list[BrokenCheckpoint]
    """All checkpoints in quarantine, also of iterations that were computed again."""
    evaluations: list[EvaluationResult]
    """Results of evaluations, by iteration."""
    waiting_evaluations: dict[int, str]
    """Iterations whose evaluation has no result, with its job and the job's state if known."""
    failed_restarts: int
    """Failures of ranks in the newest attempt; the ranks were restarted in the job, except perhaps after the last."""
    last_failed_restart: str | None
    """Rank and place of the last such failure, and the restart's steps and time."""
    sick_nodes: list[str]
    """Health problems of nodes in the newest attempt and the reaction to each, newest last."""
    refused_connections: RefusedConnections | None
    """Connections that did not prove that they belong to the newest attempt's job; None without one."""
    straggler: str | None
    """The rank that is slower than its peers, and in which part; None without one."""
    unmatched: list[str]
    """Settings of a foreign program that fit nothing of what the newest attempt prints and writes."""
    failed_saves: int
    """Failed saves of the whole run after which training continued."""
    last_failed_save: str | None
    """Iteration and reason of the newest failed save."""
    failed_attempts: int
    """Consecutive attempts, up to now, without a new checkpoint."""
    max_failed_attempts: int
    strikes: dict[str, int]
    """Number of unexpired failed attempts attributed to each node."""
    excluded: list[str]
    """Nodes that the next job excludes, if enough others are up."""
    used_again: list[str]
    """Excluded nodes that the newest attempt uses because there are too few others."""
    triggers: list[Trigger]
    """Touched triggers that no job has obeyed yet."""
    cost_per_node_hour: float | None = None
    currency: str = ""
    unsent_notices: int = 0
    """Number of overdue notices."""
    unsent_reason: str = ""
    """Reason why they were not sent."""
    mirror: MirrorPass | None = None
    """Result of the last mirror pass; None without one."""
    left_out: dict[str, dict[str, int]] = field(default_factory=dict)
    """Unreadable files and rows that streams skipped, by data set and reason, up to the newest record."""
    quotas: list[QuotaUsage] = field(default_factory=list)
    """Usage of a live chain's quotas."""
    quota_complaint: str | None = None
    """Reason why a quota is unknown."""
    unqueued_evaluations: dict[int, str] = field(default_factory=dict)
    """Iterations whose evaluation has no job, with the scheduler's refusal; empty: not submitted yet."""
    why: str = ""
    """Meaning of the newest end's failure, whose cause it is, and what to do next; empty if the run goes well."""
    disk: list[str] = field(default_factory=list)
    """File systems of the run that are full, or too full for a checkpoint, each as a sentence with what could go."""

    @property
    def has_job(self) -> bool:
        """True if a job of the chain runs, or waits and can start."""
        return self.state == "running" or (self.state == "queued" and bool(self.jobs or self.fallback_jobs))


def read_run_status(
    run: Run, queue: QueueStatus, *, now: float, plan: Plan | None = None, cache: FolderCache | None = None
) -> RunStatus:
    """Return the status of a run. `plan`: the run's plan, if already read. `cache`: see `last_cron_check`.

    Raises RunDirError if the directory is not a run or its records are damaged.
    """
    with damaged_records_as_error(run):
        return _read_run_status(RunRecords(run, Plan.load(run) if plan is None else plan, queue, now=now), cache)


def _read_run_status(records: RunRecords, cache: FolderCache | None) -> RunStatus:
    run, plan, queue, now = records.run, records.plan, records.queue, records.now
    begin, durable, lineage = records.begin, records.durable, records.lineage
    strikes = excluded_nodes.read_node_failures(run)
    counts = Counter(each.node for each in strikes if now - each.time < excluded_nodes.FAILURE_EXPIRE_SECONDS)
    newest = None if records.number is None else run.attempt(records.number)
    failures = [line for number in run.attempt_numbers() for line in read_json_lines(run.attempt(number).failed_saves)]
    failed_restarts = restarts.read_failed_restarts(newest) if newest is not None else []
    beats = newest.read_heartbeats() if records.running and newest is not None else []
    end_time = newest.job_end_time(begin) if newest is not None and begin is not None and records.running else None
    quotas, quota_complaint = _quotas(run) if records.living else ([], None)
    excluded = excluded_nodes.worst_nodes(strikes, nodes=plan.nodes, now=now)
    late, why_late = unsent_notices.count_unsent(run, now=now)
    resume = [shlex.join(["relayrun", "resume", str(run.path)])] if records.broken else []
    mend = resume or [command for _, command in blocked_jobs(run, queue.jobs, queue.reasons)]
    return RunStatus(
        **vars(records.summary(cache)),
        mode=plan.chain.mode,
        auto_requeue=plan.chain.auto_requeue,
        cost_per_node_hour=plan.cost_per_node_hour,
        currency=plan.currency,
        jobs=queue.jobs,
        fallback_jobs=queue.fallback_jobs,
        scheduler_error=f"the scheduler did not answer: {queue.error}" if queue.error else queue.hidden,
        changed_options=requested_options.describe_changes(run),
        last_job=queue.last_job,
        go_on="; ".join(mend) or None,
        phase=min(beats, key=lambda beat: beat.time).phase if beats else None,
        budget=budget_end(run, plan, nodes=plan.nodes_of_job, start=now),
        leave_time=end_time - begin.grace_period if begin is not None and end_time is not None else None,
        job_end_time=end_time,
        left_behind=checkpoint_records.newer_broken_checkpoints(run, lineage, durable) if durable else [],
        in_quarantine=checkpoint_records.quarantined_checkpoints(run),
        evaluations=evaluations.evaluation_results(run),
        waiting_evaluations={
            iteration: f"job {job_id}" + (f", {queue.evaluations[job_id]}" if job_id in queue.evaluations else "")
            for iteration, job_id in waiting_evaluations(run)
        },
        unqueued_evaluations=evaluations.unqueued_iterations(run),
        failed_restarts=len(failed_restarts),
        last_failed_restart=failed_restarts[-1].told if failed_restarts else None,
        sick_nodes=[] if newest is None else [found.told for found in node_health.read_findings(newest)],
        refused_connections=None if newest is None else RefusedConnections.read(newest.refused_connections),
        straggler=Straggler.of(records.step["straggler"]).words if records.step.get("straggler") else None,
        unmatched=[] if newest is None else newest.read_unmatched(),
        failed_saves=len(failures),
        last_failed_save=f"iteration {failures[-1]['iteration']}: {failures[-1]['error']}" if failures else None,
        failed_attempts=count_failed_attempts(run, plan, last=(records.number or 0) - 1 if records.running else None),
        max_failed_attempts=plan.chain.max_failed_attempts,
        strikes=dict(counts),
        excluded=excluded,
        used_again=_used_again(excluded, strikes, begin),
        triggers=_pending_triggers(run),
        left_out=_skipped_documents(lineage),
        quotas=quotas,
        quota_complaint=quota_complaint,
        disk=_full_file_systems(records),
        why=cause_words(records.ended[1].failure, plan.chain.failure_signatures)
        if records.ended and not records.running
        else "",
        unsent_notices=late,
        unsent_reason=why_late,
        mirror=_last_mirror_pass(run, durable=durable is not None and durable.path is not None),
    )


def _used_again(
    excluded: list[str], strikes: list[excluded_nodes.NodeFailureRecord], begin: AttemptStart | None
) -> list[str]:
    if begin is None or not excluded:
        return []
    struck = {strike.node for strike in strikes if strike.attempt >= begin.attempt}  # failed in this attempt
    return [node for node in excluded if node in error_lines.expand_nodelist(begin.nodes) and node not in struck]


def _quotas(run: Run) -> tuple[list[QuotaUsage], str | None]:
    try:
        return storage_limits.read_usage(run)
    except RunDirError as error:  # must not hide the run's status
        return [], error.message


def _full_file_systems(records: RunRecords) -> list[str]:
    """File systems of a run that are full, or that another checkpoint does not fit into while the chain lives, as `df`
    reports them; nothing is written. Full: less than a block of the largest file systems, too little for a record."""
    run, found = records.run, {}
    newest = next((sum(counted.commit.files.values()) for counted in records.lineage.backwards()), 0)
    for place in (run.path, run.checkpoints):
        with contextlib.suppress(OSError):
            free = {each.kind: each.limit - each.used for each in file_system_limit(place)}
            kind: storage_limits.QuotaKind = "files" if free.get("files", 1) <= 0 else "bytes"
            needed = newest if place == run.checkpoints and records.living and kind == "bytes" else 0
            if free.get(kind, MIN_FREE_BYTES) < (MIN_FREE_BYTES if kind == "bytes" else 1):
                words = f"full: {max(0, free[kind]):,} {kind} left below {place}"
                words += f"; no job can record anything until some is freed{_newest_record(records)}"
            elif free.get(kind, needed) < needed:
                words = f"too full for a checkpoint: {format_amount(free[kind], kind)} left below {place}"
            else:
                continue
            if needed:
                words += f"; a checkpoint takes {format_amount(newest, kind)}"
            found[place.stat().st_dev] = words
            with contextlib.suppress(RunDirError):  # a campaign that cannot be read keeps every checkpoint
                found[place.stat().st_dev] += _could_go(records, place.stat().st_dev)
    return list(found.values())


def _newest_record(records: RunRecords) -> str:
    """Clause about the newest file of the newest attempt: since then nothing was written."""
    if records.number is None:
        return ""
    folder = records.run.attempt(records.number).path
    entries = [entry for place in (folder, folder / "heartbeat") if place.is_dir() for entry in os.scandir(place)]
    times = [entry.stat().st_mtime for entry in entries if entry.is_file() and entry.stat().st_size]
    return f" (nothing was recorded since {format_time(max(times))})" if times else ""


def _could_go(records: RunRecords, device: int) -> str:
    """Clause about what a person may remove on a file system: older checkpoints, quarantine and logs of the run."""
    run, plan = records.run, records.plan
    kept = max(1, plan.checkpoints_kept or 1)
    held = iterations_held_by_campaign(run)
    line = [counted.commit for counted in records.lineage.backwards() if counted.published]
    older = [each for each in line if os.path.isdir(each.path)][kept:]
    older = [each for each in older if each.iteration not in held and os.stat(each.path).st_dev == device]
    numbers = ", ".join(str(each.iteration) for each in older[:3]) + ", ..." * (len(older) > 3)
    quarantine = [Path(each.path) for each in checkpoint_records.quarantined_checkpoints(run)]
    logs = [*Path(plan.log_folder).glob(f"{plan.job_name}-[0-9]*")]
    amounts = [
        (f"older checkpoints (iteration {numbers}; checkpoint.keep_last)", sum(sum(c.files.values()) for c in older)),
        (f"{run.checkpoints / '.quarantine'}", sum(sum(file_sizes(path).values()) for path in quarantine)),
        (f"logs in {plan.log_folder}", sum(path.stat().st_size for path in logs if path.stat().st_dev == device)),
    ]
    words = ", ".join(f"{format_amount(size, 'bytes')} in {name}" for name, size in amounts if size >= MIN_FREE_BYTES)
    return f"; could go: {words}" if words else ""


def _last_mirror_pass(run: Run, *, durable: bool) -> MirrorPass | None:
    """The last pass, or a complaint if a checkpoint waits for its first pass."""
    try:
        last = MirrorPass.read(run.mirror_pass)
        if last is not None or MirrorPolicy.read(run.mirror_policy) is None or not durable:
            return last
        since = run.mirror_policy.stat().st_mtime
        why = copier_failure(run) or f"{run.mirror}/log may say why"
        words = f"no pass has ended since the submit; {why}"
        return MirrorPass(time=since, iteration=None, behind=0, complaint=words, seen=False)
    except RunDirError as error:  # must not hide the run's status
        return MirrorPass(time=0.0, iteration=None, behind=0, complaint=error.message)


def _skipped_documents(lineage: Lineage) -> dict[str, dict[str, int]]:
    """Unreadable documents that streams skipped, from the newest checkpoint with lane positions."""
    commit = next((counted.commit for counted in lineage.backwards()), None)
    path = None if commit is None else stream_positions_path(Path(commit.path))
    if path is None or not path.is_file():
        return {}
    found: dict[str, dict[str, int]] = {}
    for name, standing in read_json(path).get("streams", {}).items():
        lanes = [LaneCursor(*cursor) for cursor in standing["cursors"]]
        counts = {"files": sum(lane.files for lane in lanes)} | skipped_rows(lanes)
        reasons = [reason for reason in counts if counts[reason] and reason in ("files", *FAULT_REASONS.values())]
        found |= {name: {reason: counts[reason] for reason in reasons}} if reasons else {}
    return found


def _pending_triggers(run: Run) -> list[Trigger]:
    try:
        return [trigger for name in triggers.TRIGGER_NAMES if (trigger := triggers.read_trigger(run, name))]
    except PermissionError:
        return []
