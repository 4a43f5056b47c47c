"""Due notices of a chain, from the records of the run directory.

The records are the truth, and the name of a notice follows from its event. So the next job or command writes the
notices that a killed supervisor, a full disk or a batch script's STOP left out, and none twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

from relayrun.control.chain_state import count_failed_attempts
from relayrun.control.diagnosis import first_cause
from relayrun.control.failure_signatures import cause_words, classify
from relayrun.control.notify import notices
from relayrun.control.notify.notices import Notice, NoticePolicy
from relayrun.control.rundir import node_health, storage_limits
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.evaluations import EvaluationResult, unqueued_iterations
from relayrun.control.rundir.mirror import MirrorPass, MirrorPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import STOP_IS_A_DIRECTORY, Run, parse_stop
from relayrun.control.rundir.storage_limits import QuotaUsage
from relayrun.errors import RelayrunError
from relayrun.files import free_space, last_bytes, read_json_lines_backwards

METRICS_LINES = 500
"""Maximum number of newest lines of metrics that are examined at a time."""
EVALUATION_RESULTS = 10
"""Number of newest results that are examined."""
NoticeSource = Callable[[Run, Plan, NoticePolicy, float], Iterator[Notice]]
"""Yields the notices of one kind, from a run, its plan, its policy and the time."""
WEEK_SECONDS = 7 * 86400.0
"""Interval between two notices about one quota."""
MIRROR_SECONDS = 3600.0
"""Age of a mirror's failure before it is told: a copy is tried again each quarter of an hour."""
NOT_COPIED_SECONDS = 21600.0
"""Time that a checkpoint may wait for its copy while a job runs that could make it."""


def write_due_notices(
    run: Run, plan: Plan, policy: NoticePolicy, *, now: float, at_work: bool, more: Sequence[Notice] = ()
) -> list[str]:
    """Write due notices that do not exist yet; return the errors in words.

    `at_work`: a job of the chain runs, and its progress is examined too; a person's command examines only ended
    attempts. `more`: further notices, which follow from no record.
    """
    there, goes_on = notices.known_notices(run), at_work and not run.stop.exists()
    sources: list[NoticeSource] = [_stop_notices, _attempt_notices, _evaluation_notices, lambda *_: iter(more)]
    sources += [_node_notices, _mirror_notices, *[_loss_notices, _disk_notices] * at_work]
    sources += [_progress_notices, _quota_notices] * goes_on
    complaints = []
    for source in sources:
        try:
            for notice in source(run, plan, policy, now):
                if notice.id not in there and policy.wants(notice.event) and notices.add_notice(run, notice, there):
                    there[notice.id] = {"json"}
        except (RelayrunError, OSError, ValueError, TypeError, KeyError) as error:
            complaints.append(getattr(error, "message", None) or f"{type(error).__name__}: {error}")
    return complaints


def _stop_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Yield the end of the chain."""
    try:
        ended, words = parse_stop(run.stop.read_text(encoding="utf-8", errors="replace"))
        seen = run.stop.stat().st_mtime
    except FileNotFoundError:
        return
    except IsADirectoryError:
        ended, words, seen = STOP_IS_A_DIRECTORY, "", now
    done = ended.state == "done"
    digest = hashlib.sha256(f"{policy.since} {ended.reason}".encode()).hexdigest()[:12]
    name = f"{'done' if done else 'stopped'}-{digest}"
    cause = "done" if done else name
    yield make_notice(run, plan, name, cause=cause, time=seen, reason=ended.reason, words=words.strip())


def _attempt_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Yield a hang or a series of failures that ends with the newest ended attempt."""
    for number in islice(reversed(run.attempt_numbers()), 2):  # of the newest two one may run
        record = run.attempt(number).read_end()
        if record is None:
            continue
        stops = record.verdict is not None and policy.wants("stopped")  # STOP says it
        if record.end_time < policy.since or stops:
            return
        cause = cause_words(record.failure, plan.chain.failure_signatures)
        words = f"attempt {number}: {record.reason}" + (f"; {cause}" if cause else "")
        if record.cause == "hang":
            yield make_notice(run, plan, f"hang-{number:04}", time=record.end_time, reason=words, attempt=number)
        failed = count_failed_attempts(run, plan, last=number)
        if failed >= policy.failed_attempts:
            reason = f"{failed} attempts in a row without a new checkpoint; {words}"
            yield make_notice(run, plan, f"failed-{number:04}", time=record.end_time, reason=reason, attempt=number)
        return


def _node_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Yield sick or excluded nodes of the newest two attempts."""
    for number in run.attempt_numbers()[-2:]:
        found = node_health.read_findings(run.attempt(number))
        for count, each in enumerate(found, start=1):
            if (each.hard or each.action != "warned") and each.time >= policy.since:
                name, words = f"node-{number:04}-{count}", f"attempt {number}: {each.told}"
                yield make_notice(run, plan, name, time=each.time, reason=words, attempt=number)


def _evaluation_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    for iteration, refusal in unqueued_iterations(run).items() if run.evaluation_policy.exists() else ():
        if refusal:
            reason = f"evaluation of iteration {iteration} is wanted and not queued: {refusal}"
            name, cause = f"evaluation-{iteration:07}-unqueued", "evaluation-unqueued"
            yield make_notice(run, plan, name, cause=cause, time=now, reason=reason)
    for _, line in islice(read_json_lines_backwards(run.evaluations_view), EVALUATION_RESULTS):
        result = EvaluationResult.of(line)
        if result.time < policy.since:
            continue
        what = result.scores() if result.status == "done" else f"failed: {result.error}"
        reason = f"evaluation of iteration {result.iteration}: {what}"
        name = f"evaluation-{result.iteration:07}-{result.attempt:04}"
        cause = f"evaluation-{result.iteration}-{result.attempt}"
        yield make_notice(run, plan, name, cause=cause, time=result.time, reason=reason)


def copier_failure(run: Run) -> str:
    """Return why a copier ended before its first pass did, by its log; empty if the log names no cause."""
    log = run.mirror / "log"
    said = first_cause(last_bytes(log, 1 << 16).decode("utf-8", errors="replace")) if log.is_file() else None
    return "" if said is None else said.text


def _mirror_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    if found := mirror_notice(run, now):
        yield make_notice(run, plan, found[0], cause="disk", time=now, reason=found[1])


def mirror_notice(run: Run, now: float) -> tuple[str, str] | None:
    """Return id and words of a notice about a mirror that has copied nothing for MIRROR_SECONDS, and why; or, if no
    pass says why, about checkpoints that have waited for NOT_COPIED_SECONDS of a job; else None."""
    if MirrorPolicy.read(run.mirror_policy) is None:
        return None
    last, newest = MirrorPass.read(run.mirror_pass), run.newest_begun()
    begin = newest.read_begin() if newest and newest.read_end() is None else None
    since = (last and last.good_time) or run.mirror_policy.stat().st_mtime
    if why := last.complaint if last else copier_failure(run):
        told, words = now - since > MIRROR_SECONDS, f"checkpoints are not copied to the mirror: {why}"
        return (f"disk-mirror-{int(since)}", words) if told else None
    copied = (last and last.iteration) or 0
    newer = takewhile(lambda counted: counted.commit.iteration > copied, Lineage(run).backwards())
    waiting = [counted.commit.time for counted in newer if counted.published]
    if begin is None or not waiting or now - max(begin.start_time, min(waiting)) <= NOT_COPIED_SECONDS:
        return None
    words = f"{len(waiting)} checkpoints wait for their copy in the mirror; the newest copy is of {copied or 'none'}"
    return f"disk-mirror-{int(since)}", words


def _progress_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    if found := stalled_notice(run, policy.since, policy.no_progress, now):
        yield make_notice(run, plan, found[0], time=now, reason=found[1])


def stalled_notice(run: Run, since: float, patience: float, now: float) -> tuple[str, str] | None:
    """Return id and words of a notice if `patience` seconds of jobs brought no durable iteration; else None. Time in
    the queue before the first of these jobs does not count, and neither does time before `since`."""
    newest = next(Lineage(run).backwards(), None)
    numbers = run.attempt_numbers()
    first = next((number for number in numbers if newest is None or number > newest.attempt), None)
    begin = run.attempt(first).read_begin() if first is not None else None
    since = max(since, 0.0 if newest is None else newest.commit.time, 0.0 if begin is None else begin.start_time)
    iteration = 0 if newest is None else newest.commit.iteration
    times = int((now - since) // patience)
    if times < 1:
        return None
    reason = f"no new checkpoint for {(now - since) / 3600:.1f} h of jobs; the newest is {iteration}"
    return f"stalled-{iteration:07}-{numbers[-1] if numbers else 0}-{times}", reason


def _loss_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Yield iterations with a loss that is no number, skipped iterations, and rollbacks."""
    attempt = run.newest_begun()
    if attempt is None:
        return
    prefix = f"anomaly-{attempt.number:04}-"
    names = [name.removeprefix(prefix) for name in notices.known_notices(run) if name.startswith(prefix)]
    noted = max((int(name) for name in names if name.isdecimal()), default=0)
    for name, reason, count in (*_skipped_iterations(attempt, noted), *_rolled_back(attempt)):
        yield make_notice(run, plan, prefix + name, time=now, reason=reason, count=count)


def _skipped_iterations(attempt: Attempt, noted: int) -> Iterator[tuple[str, str, int]]:
    """Yield the newest iteration after `noted` that was skipped or whose loss is no number, and their count."""
    found = [
        line
        for _, line in islice(read_json_lines_backwards(attempt.metrics), METRICS_LINES)
        if line["iteration"] > noted and (line.get("skipped") or not math.isfinite(line.get("loss", 0.0)))
    ]
    for newest in found[:1]:
        reason = newest.get("skipped") or f"loss {newest['loss']}"
        yield str(newest["iteration"]), f"iteration {newest['iteration']}: {reason}", len(found)


def _rolled_back(attempt: Attempt) -> Iterator[tuple[str, str, int]]:
    for _, line in islice(read_json_lines_backwards(attempt.rollbacks), 1):
        at, base = line["iteration"], line["base_iteration"]
        reason = f"training went back to iteration {base} from iteration {at}: {line['reason']}"
        yield f"rollback-{int(line['time'])}", reason, 1


def _disk_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Yield a disk with room for few more checkpoints, and a save that failed on a full disk."""
    attempt = run.newest_begun()
    if attempt is None:
        return
    name = f"disk-{attempt.number:04}"
    for _, line in islice(read_json_lines_backwards(attempt.failed_saves), 1):
        error = str(line["error"])
        if (known := classify(error)) is not None and known.name in ("disk-full", "quota"):
            reason = f"a save of iteration {line['iteration']} failed: {error}"
            yield make_notice(run, plan, f"{name}-{line['iteration']}", time=now, reason=reason)
    if words := low_disk_text(run, checkpoints=policy.disk_checkpoints):
        yield make_notice(run, plan, name, time=now, reason=words)


def _quota_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Yield a quota with room for few more checkpoints, once a week."""
    for each in storage_limits.read_usage(run)[0]:
        if each.is_scarce(policy.disk_checkpoints):
            yield make_notice(run, plan, quota_notice_id(each, now), time=now, reason=each.words())


def quota_notice_id(usage: QuotaUsage, now: float) -> str:
    """Return the id of the notice about this quota in this week."""
    return f"disk-quota-{usage.name}-{int(now // WEEK_SECONDS)}"


def low_disk_text(run: Run, *, checkpoints: int) -> str | None:
    """Return a warning if the disk has room for fewer than `checkpoints` more; else None."""
    newest = next(Lineage(run).backwards(), None)
    size = 0 if newest is None else sum(newest.commit.files.values())
    free = free_space(run.checkpoints) if size else 0
    if not size or free >= checkpoints * size:
        return None
    room = f"room for {free // size} more checkpoints of {size / 1e9:.1f} GB"
    return f"{free / 1e9:.1f} GB are free at {run.checkpoints}: {room}"


def make_notice(
    run: Run,
    plan: Plan,
    name: str,
    *,
    time: float,
    reason: str,
    cause: str = "",
    words: str = "",
    attempt: int | None = None,
    count: int = 1,
    go_on: str | None = None,
) -> Notice:
    """Return a notice with the facts of an attempt (default: the newest) and the progress of the run. `name`: its id,
    which begins with the event. `cause`: default: the event. `go_on`: default: the usual command."""
    event = name.partition("-")[0]
    of = run.newest_begun() if attempt is None else run.attempt(attempt)
    begin = None if of is None else of.read_begin()
    end = None if of is None else of.read_end()
    newest = next(Lineage(run).backwards(), None)
    step = None if of is None else next(read_json_lines_backwards(of.metrics), None)
    return Notice(
        id=name,
        event=event,
        cause=cause or event,
        time=time,
        reason=" ".join(reason.split()),
        words=words,
        attempt=None if of is None else of.number,
        job_id=None if begin is None else begin.job_id,
        nodes=None if begin is None else begin.nodes,
        iteration=None if step is None else step[1].get("iteration"),
        total_steps=plan.total_steps,
        durable_iteration=end.durable_iteration if end else newest.commit.iteration if newest else 0,
        log=None if begin is None else begin.log,
        go_on=f"relayrun resume {run.path}" if go_on is None and event == "stopped" else go_on,
        count=count,
    )
