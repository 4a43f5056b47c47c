"""What the logs of an attempt say about its end."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from relayrun.control.chain import excluded_nodes
from relayrun.control.job_log import LOG_PREFIX
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import RankFailure
from relayrun.files import last_bytes

TAIL_BYTES = 200_000
EXCERPT_LINES = 30
SCHEDULER_LINES = 5
"""How many of srun's lines an excerpt keeps: it writes one for every task of a job, and the first ones tell all."""
REASON_CHARACTERS = 500
"""Characters of a rank's last words in a reason."""
NOT_STARTED_CODES = (126, 127)
"""Exit codes of a shell that may not execute a program, or does not find it."""

SIGNAL_EXIT_CODE = 128
"""A shell's exit codes from here on say that a signal ended the program: its node may have been the reason."""

_SCHEDULER = re.compile(
    r"(?:\[[^\]]*\] |\d+: )*(?:srun|slurmstepd\S*|slurmd\S*): |.*\berror: \*\*\* (?:STEP|JOB|REASON)\b"
)
_TROUBLE = re.compile(
    r"(?:\[rank\d+\]: )?Traceback\b|(?:\S+: )?(?:fatal )?error\b"
    r"|[\w.]*(?:Error|Exception)\b|.*: (?:No such file or directory|Permission denied|command not found)$",
    re.I,
)
_RAISED = re.compile(r"(?:\[rank\d+\]: )?[A-Za-z_][\w.]*(?::| \(|$)")
"""The last line of a traceback: type and message."""
_TYPED = re.compile(r"(?:FatalTrainingError|ConfigError): ")
_MISSING_MODULE = ("ModuleNotFoundError:", "ImportError:")


def stderr_file() -> str | None:
    """The file that this process's standard error goes to, if it is one."""
    try:
        path = os.readlink("/proc/self/fd/2")
    except OSError:
        return None
    return path if os.path.isfile(path) else None


def log_size(log: str | None) -> int:
    """Bytes of a log now."""
    return os.path.getsize(log) if log is not None and os.path.exists(log) else 0


def log_tail(log: str | None, *, since: int = 0) -> str:
    """The end of a log, at most TAIL_BYTES, nothing of it before byte `since`; empty where there is none."""
    if log is None:
        return ""
    try:
        return last_bytes(log, TAIL_BYTES, since=since).decode("utf-8", errors="replace")
    except OSError:
        return ""


def log_excerpt(log: str) -> str:
    """The lines that matter: from the first traceback or error on, without the supervisor's own and most of srun's.

    At most EXCERPT_LINES; of a traceback that is longer, its beginning and its end. Where nothing looks like an error,
    the last lines.
    """
    lines, of_scheduler = [], 0
    for line in log.splitlines():
        if not line.strip() or line.startswith(LOG_PREFIX):
            continue
        of_scheduler += 1 if (srun := _SCHEDULER.match(line) is not None) else 0
        if not srun or of_scheduler <= SCHEDULER_LINES:
            lines.append(line)
    first = next((n for n, line in enumerate(lines) if _TROUBLE.match(line) and not _SCHEDULER.match(line)), None)
    if first is None:
        return "\n".join(lines[-EXCERPT_LINES:])
    lines = lines[first:]
    end = _end_of_traceback(lines)
    if end < EXCERPT_LINES:
        return "\n".join(lines[:EXCERPT_LINES])
    head = EXCERPT_LINES // 3
    return "\n".join([*lines[:head], "  ...", *lines[end + 2 + head - EXCERPT_LINES : end + 1]])


def _end_of_traceback(lines: Sequence[str]) -> int:
    """Number of the line in which the traceback that begins with the first line ends, with those chained to it."""
    end = 0
    for number, line in enumerate(lines[1:], start=1):
        if "Traceback" in line:
            if "exception" not in lines[number - 1]:  # of another rank
                break
        elif "Traceback" in lines[0] and _RAISED.match(line) and not line.startswith(("During ", "The above ")):
            end = number
            following = lines[number + 1] if number + 1 < len(lines) else ""
            if not following.startswith(("During handling of the above", "The above exception")):
                break
    return end


def first_failure_text(log: str, failures: Sequence[RankFailure]) -> str:
    """Who failed first by itself, and how, in one line; empty where nobody can be named. `log`: standard error."""
    first = excluded_nodes.first_failure(log, failures)
    if not isinstance(first, RankFailure) and (cause := excluded_nodes.cause_outside_nodes(log, first)):
        return _one_line(cause)
    if first is None:
        return ""
    if isinstance(first, RankFailure):
        return f"rank {first.rank} on {first.node}: {_one_line(first.error)}"
    who = f"task{'s' if len(first.tasks) > 1 else ''} {', '.join(map(str, sorted(first.tasks)[:4]))}"
    return f"{who} on {', '.join(first.nodes[:4])}: {first.what}"


def not_started_text(attempt: Attempt) -> str:
    """Why the batch script did not start the ranks; it may have had no room to say so."""
    try:
        words = attempt.not_started.read_text(encoding="utf-8", errors="replace")
    except OSError:
        words = ""
    return _one_line(words) or "the batch script could not start the ranks"


def setup_failure_text(attempt: Attempt, *, exit_code: int) -> str:
    """Which line of `job.setup` failed, in one line; empty where none did, or where a signal ended it."""
    try:
        words = attempt.setup_failed.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    return _one_line(words) if exit_code < SIGNAL_EXIT_CODE else ""


def fatal_reason(
    log: str,
    failures: Sequence[RankFailure],
    *,
    exit_code: int,
    ntasks: int,
    began: bool,
    worked_before: bool,
    program: str,
) -> str | None:
    """Why another attempt would fail in the same way, in one sentence; None where it need not.

    That is an error that a rank itself takes for one (`RankFailure.repeats`); a program that no rank could start, and a
    module that every rank lacks, unless an attempt since the last submit had them: then a file system may be away.

    Args:
        log: standard error of the attempt's job.
        exit_code: of all ranks together, as the task starter gave it.
        began: whether a rank of this attempt has given a sign of life.
        worked_before: whether an earlier attempt since the last submit came as far as its first step.
        program: what was to be started on every rank.
    """
    first = excluded_nodes.first_failure(log, failures)
    if isinstance(first, RankFailure) and first.repeats:
        return _TYPED.sub("", first_failure_text(log, failures))
    if worked_before:
        return None
    errors = {failure.error for failure in failures}
    if len(failures) >= ntasks and len(errors) == 1 and (error := errors.pop()).startswith(_MISSING_MODULE):
        return f"every rank: {_one_line(error)}"
    if exit_code in NOT_STARTED_CODES and not began and not failures and _no_task_started(log, ntasks):
        if cause := excluded_nodes.cause_outside_nodes(
            log, first
        ):  # the program is there, and what it was to run is not
            return _one_line(cause)
        what = "is not found" if exit_code == 127 else "cannot be executed"
        return (
            f"{program} {what} on any rank (exit code {exit_code}); see cluster.python and cluster.command_prefix, "
            "or command.run, in the config"
        )
    return None


def _no_task_started(log: str, ntasks: int) -> bool:
    """Whether srun says so of every task; the local starter names none, and has one node."""
    ends = excluded_nodes.task_ends(log)
    codes = tuple(f"Exited with exit code {code}" for code in NOT_STARTED_CODES)
    return not ends or len({task for end in ends if end.what.startswith(codes) for task in end.tasks}) >= ntasks


def _one_line(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= REASON_CHARACTERS else text[: REASON_CHARACTERS - 3] + "..."


def read_failures(attempt: Attempt, rank: int | None = None) -> list[RankFailure]:
    """What ranks, or one of them, said of their own end."""
    name = "rank-*.json" if rank is None else f"rank-{rank:04}.json"
    found = [RankFailure.read(path) for path in attempt.failures.glob(name)]
    return sorted((failure for failure in found if failure), key=lambda failure: failure.time)
