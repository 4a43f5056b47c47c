"""The reason for the end of an attempt, from its logs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.control.diagnosis import Statement, find_statements, first_cause
from relayrun.control.failure_signatures import ENDS, UNLISTED, classify
from relayrun.control.job_log import LOG_PREFIX, stdout_beside
from relayrun.control.rundir import node_health, restarts, time_limit
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart, RankFailure
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import error_lines
from relayrun.control.trainers.registry import trainer_of
from relayrun.files import last_bytes, readable_text
from relayrun.terminal import one_line

TAIL_BYTES = 200_000
EXCERPT_LINES = 30
SCHEDULER_LINES = 5
"""Maximum number of srun's lines in an excerpt: srun writes one per task, and the first ones suffice."""
CERTAIN = ("flags", "syntax", "checkpoint-missing")
"""Causes that lie in no node, even if one rank alone reports them."""
SIGNAL_EXIT_CODE = 128
"""Exit codes of a shell from here on mean that a signal ended the program: its node may be the reason."""

_SCHEDULER = re.compile(
    r"(?:\[[^\]]*\] |\d+: )*(?:srun|slurmstepd\S*|slurmd\S*): |.*\berror: \*\*\* (?:STEP|JOB|REASON)\b"
)
_TROUBLE = re.compile(
    r"(?:\[rank\d+\]: )?Traceback\b|(?:\S+: )?(?:fatal )?error\b"
    r"|[\w.]*(?:Error|Exception)\b|.*: (?:No such file or directory|Permission denied|command not found)$",
    re.I,
)
_MODULES = re.compile(r"^(?:\w+\.)+(?=\w+(?::|$))")
"""Modules before the name of an exception: a traceback has them, a rank's record does not."""
_PLACE = re.compile(r"\((?:[^()]*/)?([^()/]+), line (\d+)\)\s*$")
"""File and line at the end of an error of a user's code, whose traceback is not in the log."""
_TYPED = re.compile(r"(?:FatalTrainingError|ConfigError): ")


@dataclass(frozen=True, kw_only=True)
class FailureReason:
    """Why an attempt without outcome failed."""

    words: str
    """The first failure, in one line."""
    fatal: str | None = None
    """Why every other attempt would fail too; None if that is not certain."""
    said: Statement | None = None
    """The words in a log or record that name the cause; None without any."""
    same: bool = False
    """The attempt before failed at the same place of the program."""


def stderr_file() -> str | None:
    """Return the path of this process's standard error, if it is a file."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None


def log_tail(log: str | None, *, since: int = 0) -> str:
    """Return at most the last TAIL_BYTES of a log, from byte `since` on; empty if there is no log."""
    if log is None:
        return ""
    try:
        return last_bytes(log, TAIL_BYTES, since=since).decode("utf-8", errors="replace")
    except OSError:
        return ""


def log_excerpt(log: str) -> str:
    """Return at most EXCERPT_LINES relevant lines: from the first traceback or error on, or else the last ones. The
    supervisor's lines and most of srun's are left out; a longer traceback keeps its beginning and its end."""
    lines = [line for line in log.splitlines() if line.strip() and not line.startswith(LOG_PREFIX)]
    of_scheduler = [number for number, line in enumerate(lines) if _SCHEDULER.match(line)]
    left_out = set(of_scheduler[SCHEDULER_LINES:])
    lines = [line for number, line in enumerate(lines) if number not in left_out]
    first = next((n for n, line in enumerate(lines) if _TROUBLE.match(line) and not _SCHEDULER.match(line)), None)
    if first is None:
        return "\n".join(lines[-EXCERPT_LINES:])
    lines = lines[first:]
    end = next((each.line for each in find_statements("\n".join(lines)) if each.place), 0)  # of chained ones the last
    if end < EXCERPT_LINES:
        return "\n".join(lines[:EXCERPT_LINES])
    head = EXCERPT_LINES // 3
    return "\n".join([*lines[:head], "  ...", *lines[end + 2 + head - EXCERPT_LINES : end + 1]])


def first_failure_text(log: str, failures: Sequence[RankFailure], said: Statement | None = None) -> str:
    """Return in one line which rank failed first by itself, and how; empty if unknown. `log`: standard error. `said`:
    the first cause by all logs; None: by `log`."""
    first = error_lines.first_failure(log, failures)
    if isinstance(first, RankFailure):
        return f"rank {first.rank} on {first.node}: {one_line(first.error)}"
    said = said or first_cause(log)
    if said is not None and not said.secondary and (first is None or first.ended or not first.signalled):
        return said.text
    if first is None:
        return ""
    who = f"task{'s' if len(first.tasks) > 1 else ''} {', '.join(map(str, sorted(first.tasks)[:4]))}"
    return f"{who} on {', '.join(first.nodes[:4])}: {first.what}"


def why_failed(run: Run, plan: Plan, attempt: Attempt, started: AttemptStart, exit_code: int) -> FailureReason:
    """Return why an attempt without outcome failed."""
    if attempt.not_started.exists():  # on a full disk it is empty
        return FailureReason(
            words=one_line(readable_text(attempt.not_started)) or "the batch script could not start the ranks"
        )
    if exit_code < SIGNAL_EXIT_CODE and (line := one_line(readable_text(attempt.setup_failed))):
        return FailureReason(words=line, fatal=line)
    log, failures = first_failure_log(plan, attempt), read_failures(attempt)
    said = first_words(plan, attempt, log, failures)
    earlier = range(plan.submitted_after_attempt + 1, attempt.number)
    # a foreign trainer's heartbeat is the observer's, so it proves nothing
    began = any(attempt.heartbeats.glob("*.json")) if plan.trainer == "native" else attempt.started.exists()
    fatal = fatal_reason(
        log,
        failures,
        exit_code=exit_code,
        ntasks=plan.rank_count(started.options),
        began=began,
        worked_before=any(run.attempt(number).started.exists() for number in earlier),
        program=[*plan.command_prefix, *trainer_of(plan, run).command(started)][0],
        said=said,
        nodes=len(error_lines.expand_nodelist(started.nodes)),
    )
    failed = restarts.read_failed_restarts(attempt)[-1:]
    who = f"{failed[0].culprit}; {failed[0].reason}" if failed and not failed[0].again else ""
    who = who or node_health.why_health_ended_attempt(attempt)
    who = who or first_failure_text(log, failures, said)
    if not attempt.started.exists() and (said is None or said.secondary):  # else time was not short
        short = time_limit.explain_short_training_time(attempt, now=time.time(), asked=plan.time_limit)
        who = "; ".join(filter(None, [who, short]))
    who = "; ".join(filter(None, [who, *attempt.read_unmatched()]))
    return FailureReason(words=who, fatal=fatal, said=said, same=_came_again(run, earlier, said))


def first_words(plan: Plan, attempt: Attempt, log: str, failures: Sequence[RankFailure]) -> Statement | None:
    """Return the words that name the first cause: a rank's record, or a line of standard error or standard output."""
    more = plan.chain.failure_signatures
    first, said = error_lines.first_failure(log, failures), first_cause(log, more)
    if isinstance(first, RankFailure):
        words, named = one_line(first.error), _PLACE.search(first.error)
        alike = said is not None and words.startswith(_MODULES.sub("", said.words))
        place = said.place if said is not None and alike else f"{named[1]}:{named[2]}" if named else ""
        return Statement(line=0, words=words, signature=classify(first.error, more), place=place, rank=first.rank)
    started = attempt.read_begin()
    if (said is None or said.secondary or said.name in ENDS) and started is not None:
        others = [log_tail(stdout_beside(started.log), since=started.output_offset)]
        others += [log_tail(str(path)) for path in torchrun_logs(plan, started)]
        found = [output for text in others if (output := first_cause(text, more)) and not output.secondary]
        return next(iter(found), said)
    return said


def torchrun_logs(plan: Plan, started: AttemptStart) -> list[Path]:
    """Return the logs of ranks that torchrun wrote during an attempt because of `--log-dir`: below the job's working
    directory or beside its scripts."""
    folder, words = Path(started.folder or "."), [*plan.program, *map(str, plan.trainer_settings.get("run", ()))]
    scripts = [folder / word for word in words if word.endswith(".sh")]
    text = " ".join([*words, *(log_tail(str(path)) for path in scripts)])
    names = re.findall(r"--log[-_]dir[ =]+['\"]?([^\s'\"]+)", text)
    roots = dict.fromkeys([folder, *(path.parent for path in scripts)])
    logs = {path for root in roots for name in names for path in (root / name).glob("*/attempt_*/*/std*.log")}
    return [path for path in sorted(logs) if path.stat().st_mtime >= started.start_time]


def _came_again(run: Run, earlier: Sequence[int], said: Statement | None) -> bool:
    """Return whether the attempt before failed at the same place of the program, not for a node, network or port."""
    lasting = {"program", "configuration", "abort", *UNLISTED}
    if said is None or not said.place or said.name == "port" or not {said.cause, said.name} & lasting:
        return False
    end = next((end for n in reversed(earlier) if (end := run.attempt(n).read_end()) is not None), None)
    return end is not None and not end.progress and end.failure_key == said.key


def attempt_log(attempt: Attempt) -> str:
    """Return the standard error of the attempt's job since the attempt, or its last restart, began."""
    started = attempt.read_begin()
    since = max((failed.log_size for failed in restarts.read_failed_restarts(attempt) if failed.again), default=0)
    return "" if started is None else log_tail(started.log, since=max(since, started.log_offset))


def first_failure_log(plan: Plan, attempt: Attempt) -> str:
    """Return the log used to find the first failure, without srun's lines about agents, which all exit together."""
    log = attempt_log(attempt)
    if plan.chain.recovery == "job":
        return log
    return "\n".join(line for line in log.splitlines() if not error_lines.TASK_END.match(line))


def fatal_reason(
    log: str,
    failures: Sequence[RankFailure],
    *,
    exit_code: int,
    ntasks: int,
    began: bool,
    worked_before: bool,
    program: str,
    said: Statement | None = None,
    nodes: int = 2,
) -> str | None:
    """Return in one sentence why every other attempt would fail in the same way; None if that is not certain.

    Certain are: an error that a rank itself declares so (`RankFailure.repeats`); and, unless an earlier attempt worked,
    a program that no rank could start, and a cause that comes again by the table of failures if it is not one node's.

    `log`: standard error. `exit_code`: the task starter's. `began`: a rank of this attempt was alive. `worked_before`:
    an attempt since the last submit reached its first step. `said`: the words of the first cause; None: by `log`.
    """
    first = error_lines.first_failure(log, failures)
    if isinstance(first, RankFailure) and first.repeats:
        return _TYPED.sub("", first_failure_text(log, failures))
    if worked_before:
        return None
    errors = {failure.error for failure in failures}
    if failures:
        known = classify(failures[0].error)
        alike = len(failures) >= ntasks and len(errors) == 1
        return f"every rank: {one_line(errors.pop())}" if alike and known is not None and known.again else None
    said = said or first_cause(log)
    if exit_code in (126, 127) and not began and _no_task_started(log, ntasks):
        if said is not None and said.name == "script-missing":  # the program exists, but its script does not
            return said.text
        what = "is not found" if exit_code == 127 else "cannot be executed"
        return (
            f"{program} {what} on any rank (exit code {exit_code}); see cluster.python and cluster.command_prefix, "
            "or command.run, in the config"
        )
    if began or said is None or said.signature is None or not said.signature.again:
        return None
    alike_lines = sum(each.name == said.name for each in find_statements(log))
    return said.text if nodes == 1 or alike_lines > 1 or said.name in CERTAIN else None


def _no_task_started(log: str, ntasks: int) -> bool:
    """Return whether srun reports it of every task; the local starter names no tasks, and has one node."""
    ends = error_lines.task_ends(log)
    found = {task for end in ends if end.what.endswith(error_lines.NOT_STARTED_ENDS) for task in end.tasks}
    return not ends or len(found) >= ntasks


def read_failures(attempt: Attempt, rank: int | None = None) -> list[RankFailure]:
    """Return the records of ranks, or of one rank, about their own end."""
    name = "rank-*.json" if rank is None else f"rank-{rank:04}.json"
    found = [RankFailure.read(path) for path in attempt.failures.glob(name)]
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)
