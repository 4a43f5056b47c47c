"""What somebody is to be told of a chain, as it follows from the run directory's records.

The records are the truth, and a notice has a name that follows from what happened. So whoever looks next, a job or a
person's command, writes what a killed supervisor, a full disk or a batch script's STOP left out, and nothing twice.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from relayrun.control.chain_state import count_failed_attempts
from relayrun.control.notify import notices
from relayrun.control.notify.notices import Notice, NoticePolicy
from relayrun.control.rundir import node_health, storage_limits
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.evaluations import EvaluationResult
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import STOP_IS_A_DIRECTORY, Run, parse_stop
from relayrun.control.rundir.storage_limits import QuotaForecast
from relayrun.errors import RelayrunError
from relayrun.files import free_space, read_lines_backwards

METRICS_LINES = 500
"""The newest lines of metrics that are looked at, at a time."""
EVALUATION_RESULTS = 10
"""The newest results that are looked at."""
NoticeSource = Callable[[Run, Plan, NoticePolicy, float], Iterator[Notice]]
"""What gives the notices of one kind, of a run, its plan, who is told, and the time."""
DISK_FULL_ERRORS = ("No space left on device", "Disk quota exceeded")
"""What a save says that met a full disk."""


def write_due_notices(
    run: Run, plan: Plan, policy: NoticePolicy, *, now: float, at_work: bool, more: Sequence[Notice] = ()
) -> list[str]:
    """Write the notices that are due and not there; return what could not be looked at or written, in words.

    `at_work`: a job of the chain runs, and how it goes is looked at; a person's command looks at what has ended alone.
    `more`: what the caller has seen that follows from no record.
    """
    there = notices.known_notices(run)
    sources: list[NoticeSource] = [_stop_notices, _attempt_notices, _node_notices, _evaluation_notices]
    sources += [_progress_notices, _loss_notices, _disk_notices, _quota_notices] if at_work else []
    sources.append(lambda *_: iter(more))
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
    """The chain has ended: done, or for another reason."""
    try:
        ended, words = parse_stop(run.stop.read_text(encoding="utf-8", errors="replace"))
        seen = run.stop.stat().st_mtime
    except FileNotFoundError:
        return
    except IsADirectoryError:
        ended, words, seen = STOP_IS_A_DIRECTORY, "", now
    done = ended.state == "done"
    name = hashlib.sha256(f"{policy.since} {ended.reason}".encode()).hexdigest()[:12]
    yield make_notice(
        run,
        plan,
        f"{'done' if done else 'stopped'}-{name}",
        cause="done" if done else f"stopped-{name}",
        time=seen,
        reason=ended.reason,
        words=words.strip(),
    )


def _attempt_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """The newest attempt that has ended hung, or was the last of several that failed."""
    for number in islice(reversed(run.attempt_numbers()), 2):  # of the newest two one may run
        record = run.attempt(number).read_end()
        if record is None:
            continue
        stops = record.verdict is not None and policy.wants("stopped")  # STOP says it
        if record.end_time < policy.since or stops:
            return
        words = f"attempt {number}: {record.reason}"
        if record.cause == "hang":
            yield make_notice(run, plan, f"hang-{number:04}", time=record.end_time, reason=words, attempt=number)
        failed = count_failed_attempts(run, plan, last=number)
        if failed >= policy.failed_attempts:
            reason = f"{failed} attempts in a row without a new durable iteration; {words}"
            yield make_notice(run, plan, f"failed-{number:04}", time=record.end_time, reason=reason, attempt=number)
        return


def _node_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Nodes of the newest two attempts on which ranks cannot train, or that were left out."""
    if not policy.wants("node"):
        return
    for number in run.attempt_numbers()[-2:]:
        found = node_health.read_findings(run.attempt(number))
        for count, each in enumerate(found, start=1):
            if (each.hard or each.action != "warned") and each.time >= policy.since:
                yield make_notice(
                    run,
                    plan,
                    f"node-{number:04}-{count}",
                    time=each.time,
                    reason=f"attempt {number}: {each.told}",
                    attempt=number,
                )


def _evaluation_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Evaluations that have finished."""
    for _, line in islice(read_lines_backwards(run.evaluations_view), EVALUATION_RESULTS):
        result = EvaluationResult.of(line)
        if result.time < policy.since:
            continue
        scores = ", ".join(
            f"{task} {name} {value:.4g}"
            for task, metrics in result.results.items()
            for name, value in metrics.items()
            if "stderr" not in name
        )
        what = scores if result.status == "done" else f"failed: {result.error}"
        yield make_notice(
            run,
            plan,
            f"evaluation-{result.iteration:07}-{result.attempt:04}",
            cause=f"evaluation-{result.iteration}-{result.attempt}",
            time=result.time,
            reason=f"evaluation of iteration {result.iteration}: {what}",
        )


def _progress_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Nothing durable came for long while jobs ran."""
    if not policy.wants("stalled") or run.stop.exists():
        return
    found = stalled_notice(run, since=policy.since, patience=policy.no_progress, now=now)
    if found is not None:
        name, reason = found
        yield make_notice(run, plan, name, time=now, reason=reason)


def stalled_notice(run: Run, *, since: float, patience: float, now: float) -> tuple[str, str] | None:
    """Return the id and the words of a notice, where nothing durable came for `patience` seconds while jobs ran.

    The time in the queue before the first of them does not count, nor what was before `since`.
    """
    newest = next(Lineage(run).backwards(), None)
    numbers = run.attempt_numbers()
    first = next((number for number in numbers if newest is None or number > newest.attempt), None)
    begin = run.attempt(first).read_begin() if first is not None else None
    since = max(since, 0.0 if newest is None else newest.commit.time, 0.0 if begin is None else begin.start_time)
    iteration = 0 if newest is None else newest.commit.iteration
    times = int((now - since) // patience)
    if times < 1:
        return None
    reason = f"no new durable iteration for {(now - since) / 3600:.1f} h of jobs; the newest is {iteration}"
    return f"stalled-{iteration:07}-{numbers[-1] if numbers else 0}-{times}", reason


def _loss_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """Iterations whose loss is no number, that were left out, or before which training went back."""
    attempt = run.newest_begun()
    if attempt is None or not policy.wants("anomaly"):
        return
    prefix = f"anomaly-{attempt.number:04}-"
    names = [name.removeprefix(prefix) for name in notices.known_notices(run) if name.startswith(prefix)]
    noted = max((int(name) for name in names if name.isdecimal()), default=0)
    for name, reason, count in (_skipped_iterations(attempt, noted), _rolled_back(attempt)):
        if count:
            yield make_notice(run, plan, prefix + name, time=now, reason=reason, count=count)


def _skipped_iterations(attempt: Attempt, noted: int) -> tuple[str, str, int]:
    """The newest iteration behind `noted` that was left out or whose loss is no number, and how many there are."""
    found = [
        line
        for _, line in islice(read_lines_backwards(attempt.metrics), METRICS_LINES)
        if line["iteration"] > noted and (line.get("skipped") or not math.isfinite(line.get("loss", 0.0)))
    ]
    if not found:
        return "", "", 0
    newest = found[0]
    reason = newest.get("skipped") or f"loss {newest['loss']}"
    return str(newest["iteration"]), f"iteration {newest['iteration']}: {reason}", len(found)


def _rolled_back(attempt: Attempt) -> tuple[str, str, int]:
    for _, line in islice(read_lines_backwards(attempt.rollbacks), 1):
        at, base = line["iteration"], line["base_iteration"]
        reason = f"training went back to iteration {base} from iteration {at}: {line['reason']}"
        return f"rollback-{int(line['time'])}", reason, 1
    return "", "", 0


def _disk_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """The disk has room for few more checkpoints, or a save met its end."""
    attempt = run.newest_begun()
    if attempt is None or not policy.wants("disk"):
        return
    name = f"disk-{attempt.number:04}"
    for _, line in islice(read_lines_backwards(attempt.failed_saves), 1):
        error = str(line["error"])
        if any(words in error for words in DISK_FULL_ERRORS):
            reason = f"a save of iteration {line['iteration']} failed: {error}"
            yield make_notice(run, plan, f"{name}-{line['iteration']}", time=now, reason=reason)
    words = low_disk_text(run, checkpoints=policy.disk_checkpoints)
    if words is not None:
        yield make_notice(run, plan, name, time=now, reason=words)


def _quota_notices(run: Run, plan: Plan, policy: NoticePolicy, now: float) -> Iterator[Notice]:
    """A quota, or the disk, will be full soon: told once a week as long as that lasts."""
    if not policy.wants("disk") or run.stop.exists():
        return
    for each in storage_limits.quota_forecasts(storage_limits.read_usage(run), now=now):
        if each.is_soon(now):
            yield make_notice(run, plan, quota_notice_id(each, now), time=now, reason=each.words(now))


def quota_notice_id(foreseen: QuotaForecast, now: float) -> str:
    """Return the id of the notice that tells it."""
    return f"disk-quota-{foreseen.name}-{int(now // storage_limits.USAGE_WINDOW_SECONDS)}"


def low_disk_text(run: Run, *, checkpoints: int) -> str | None:
    """Say that the disk has room for fewer than so many more checkpoints; None where it has, or none is known."""
    newest = next(Lineage(run).backwards(), None)
    size = 0 if newest is None else sum(newest.commit.files.values())
    free = free_space(run.checkpoints) if size else 0
    if not size or free >= checkpoints * size:
        return None
    return (
        f"{free / 1e9:.1f} GB are free at {run.checkpoints}: room for {free // size} more checkpoints of "
        f"{size / 1e9:.1f} GB"
    )


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
    """Return a notice with what is known of the attempt (the newest, where none is given) and of how far the run is.

    `name`: its id, which begins with the event. `cause`: the event, where none is given. `go_on`: the command that goes
    on, where it is not the usual one.
    """
    event = name.partition("-")[0]
    of = run.newest_begun() if attempt is None else run.attempt(attempt)
    begin = None if of is None else of.read_begin()
    end = None if of is None else of.read_end()
    newest = next(Lineage(run).backwards(), None)
    step = None if of is None else next(read_lines_backwards(of.metrics), None)
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
