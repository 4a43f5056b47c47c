"""The full status of one run as text for people."""

from __future__ import annotations

import math

from relayrun.control.rundir.plan import cost_words
from relayrun.control.scheduler.base import Job
from relayrun.terminal import format_table, terminal_width
from relayrun.watch.status.run_status import RunStatus
from relayrun.watch.status.summary import describe_job_end
from relayrun.watch.status.tables import cron_check_line
from relayrun.watch.text import format_optional, format_seconds, format_time

_USED_AGAIN = " (used again: there are too few others)"


def run_status_table(status: RunStatus, *, now: float) -> str:
    """Return a table with one fact of the run per line; facts without a value are omitted."""
    facts = [each for each in _lines(status, now) if each[1]]
    return format_table(("", ""), facts, title=status.run, width=terminal_width())


def _lines(status: RunStatus, now: float) -> list[tuple[str, str]]:
    attempt = ""
    if status.attempt is not None and status.begin_time is not None:
        begun = format_seconds(now - status.begin_time)
        attempt = f"{status.attempt}, job {status.job_id} on {status.nodes}, begun {begun} ago"
        attempt += f", now in {status.phase}" if status.phase else ""
    step = f"{status.iteration} of {status.total_steps}" if status.total_steps else f"{status.iteration}"
    step += f", {format_seconds(now - status.step_time)} ago" if status.step_time is not None else ""
    limit = ""
    if status.leave_time is not None and status.job_end_time is not None:
        leave, end = format_time(status.leave_time), format_time(status.job_end_time)
        limit = f"saves and leaves at {leave} or earlier, the job ends at {end}"
    failed = f"{status.failed_attempts} in a row without a new checkpoint; "
    failed += f"the chain stops at {status.max_failed_attempts}"
    return [
        ("directory", status.path),
        ("state", status.state + (f": {words}" if (words := status.stop or status.broken) else "")),
        ("go on", status.go_on or ""),
        ("chain", f"{status.mode}, auto_requeue {'on' if status.auto_requeue else 'off'}"),
        ("queue", _queue(status)),
        ("fallback job", ", ".join(_job(job, status.pending.get(job.id)) for job in status.fallback_jobs)),
        ("changed", "; ".join(status.changed_options)),
        ("last job", _last_job(status, now)),
        ("attempt", attempt or "none yet"),
        ("time limit", limit),
        ("iteration", step),
        ("left", _remaining(status)),
        ("budget", _budget(status)),
        ("loss", format_optional(status.loss, ".4f")),
        ("tokens/s", format_optional(status.tokens_per_second, ",.0f")),
        ("saved", _durable(status)),
        ("left out", _skipped_documents(status)),
        ("mirror", _mirror(status, now)),
        *(("disk", words) for words in status.disk),
        *(("quota", words) for words in _quotas(status, now)),
        ("damaged", _damaged_checkpoints(status)),
        ("quarantine", _quarantine(status)),
        ("last end", f"attempt {status.last_end_attempt}: {status.last_end}" if status.last_end else ""),
        ("why", f"{status.why}; relayrun why {status.path}" if status.why else ""),
        ("evaluations", _evaluations(status)),
        ("failed restarts", _count_and_last(status.failed_restarts, status.last_failed_restart)),
        ("node health", _count_and_last(len(status.sick_nodes), next(reversed(status.sick_nodes), None))),
        ("refused", status.refused_connections.told if status.refused_connections else ""),
        ("straggler", status.straggler or ""),
        ("no match", "; ".join(status.unmatched)),
        ("failed saves", _count_and_last(status.failed_saves, status.last_failed_save)),
        ("failed", failed if status.failed_attempts else ""),
        ("node failures", ", ".join(f"{node} {count}" for node, count in sorted(status.strikes.items()))),
        ("excluded", ", ".join(f"{node}{_USED_AGAIN * (node in status.used_again)}" for node in status.excluded)),
        ("triggers", ", ".join(f"{t.name} by {t.user}, {format_seconds(now - t.time)} ago" for t in status.triggers)),
        ("sentinel", "" if status.sentinel is None else cron_check_line(status.sentinel, now=now)),
        ("notices", f"{status.unsent_notices} not sent: " * bool(status.unsent_notices) + status.unsent_reason),
    ]


def _queue(status: RunStatus) -> str:
    if status.scheduler_error is not None:
        return f"unknown: {status.scheduler_error}"
    return ", ".join(_job(job, status.pending.get(job.id)) for job in status.jobs) or "no jobs"


def _job(job: Job, reason: str | None) -> str:
    return f"{job.id} ({job.state.lower()}" + (f": {reason})" if reason else ")")


def _last_job(status: RunStatus, now: float) -> str:
    job = status.last_job
    if job is None:
        return ""
    ago = f", {format_seconds(now - job.end_time)} ago" if job.end_time is not None else ""
    return f"{job.id}: {describe_job_end(job)}{ago} ({job.source})"


def _count_and_last(count: int, last: str | None) -> str:
    return f"{count}; the last: {last}" if count else ""


def _quarantine(status: RunStatus) -> str:
    """Quarantined checkpoints that are not in `left_behind`, and why."""
    told = {entry.path for entry in status.left_behind}
    rest = [entry for entry in status.in_quarantine if entry.path not in told]
    return "; ".join(f"{entry.iteration}, computed again since: {entry.why} ({entry.path})" for entry in rest)


def _mirror(status: RunStatus, now: float) -> str:
    last = status.mirror
    if last is None:
        return ""
    known = f"iteration {last.iteration} {'is' if last.seen else 'was'} copied and verified"
    what = "no copy yet" if last.iteration is None else known
    newest = status.durable_iteration or 0
    behind = f"; iteration {newest} is not copied yet" if newest > (last.iteration or 0) else ""
    why = f": {last.complaint}" if last.complaint else ""
    looked = f"looked {format_seconds(now - last.time)} ago"
    if last.complaint:
        well = last.good_time
        looked += "; never was all well" if well is None else f"; all was well {format_seconds(now - well)} ago"
    return f"{what}{behind}{why} ({looked})"


def _quotas(status: RunStatus, now: float) -> list[str]:
    told = [each for each in status.quotas if each.kind == "bytes" or each.is_scarce(1)]
    lines = [f"{each.words()} (looked {format_seconds(now - each.time)} ago)" for each in told]
    return [*lines, *filter(None, [status.quota_complaint])]


def _skipped_documents(status: RunStatus) -> str:
    return "; ".join(
        f"{name}: " + ", ".join(f"{count:,} {reason}" for reason, count in counts.items())
        for name, counts in status.left_out.items()
    )


def _damaged_checkpoints(status: RunStatus) -> str:
    """Group iterations by reason: two checkpoints are often damaged the same way."""
    parts: dict[tuple[bool, str], list[int]] = {}
    for entry in status.left_behind:
        parts.setdefault((entry.quarantined, entry.why), []).append(entry.iteration)
    texts = []
    for (quarantined, why), iterations in parts.items():
        where = "in quarantine" if quarantined else "not whole"
        texts.append(f"{', '.join(map(str, iterations))} ({where}): {why}")
    return "; ".join(texts)


def _evaluations(status: RunStatus) -> str:
    """The newest result, the number of results, and the last failure."""
    parts = []
    done = [result for result in status.evaluations if result.status == "done"]
    failed = [result for result in status.evaluations if result.status == "failed"]
    if done:
        parts.append(f"iteration {done[-1].iteration}: {done[-1].scores()}; {len(done)} done")
    if failed:
        parts.append(f"{len(failed)} failed, the last of iteration {failed[-1].iteration}: {failed[-1].error}")
    if waiting := status.waiting_evaluations:
        parts.append("no result yet: " + ", ".join(f"iteration {n} ({job})" for n, job in waiting.items()))
    if unqueued := status.unqueued_evaluations:
        numbers = ", ".join(map(str, list(unqueued)[:5])) + ", ..." * (len(unqueued) > 5)
        why = next((f": {words}" for words in reversed(unqueued.values()) if words), "")
        parts.append(f"{len(unqueued)} wanted and not queued (iteration {numbers}){why}")
    return "; ".join(parts)


def _durable(status: RunStatus) -> str:
    if status.durable_iteration is None:
        return status.durable_fault or ""
    if status.durable_path is None:
        return "nothing saved yet"
    age = f", {format_seconds(status.durable_age)} old" if status.durable_age is not None else ""
    return f"iteration {status.durable_iteration}{age}: {status.durable_path}"


def _remaining(status: RunStatus) -> str:
    left = status.remaining
    if left is None or not left.iterations:
        return ""
    pace = f"the last {left.attempts} attempts" if left.attempts > 1 else "one attempt"
    text = f"{format_seconds(left.seconds)} of running jobs, {left.node_hours:,.1f} node hours"
    text += f"{cost_words(left.node_hours, status)}, at the pace of {pace}"
    if left.earliest_end is not None:
        text += f"; done at {format_time(left.earliest_end)} if no job waits"
    if left.queue_seconds is not None:
        text += f"; the last jobs waited {format_seconds(left.queue_seconds)} each, which is not in it"
    return text


def _budget(status: RunStatus) -> str:
    end, left = status.budget, status.remaining
    text = end.words
    if math.isfinite(end.left):
        text += f"; {end.left:,.2f} node hours are left{cost_words(end.left, status)}"
        if left is not None and left.iterations:
            text += f", and the run needs about {left.node_hours:,.2f}{cost_words(left.node_hours, status)}"
    if status.state == "running" and end.setting:
        text += f"; over at {format_time(end.time)}"
    return text
