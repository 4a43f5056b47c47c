"""Why an attempt ended: the first cause, quoted where it stands, how sure it is, and what to do next.

Reads what is there of a run: records, the logs of all ranks, Slurm's accounting if it answers, and the surroundings
that the job recorded at its end. Every source may be missing. Nothing is written.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from relayrun.config.sections.chain import FailureSignature
from relayrun.control.chain import failure_reason
from relayrun.control.chain.surroundings import Surroundings, observe
from relayrun.control.diagnosis import Statement, find_statements, first_cause, one_line
from relayrun.control.failure_signatures import ENDS, GENERAL, classify, entry, is_secondary_error
from relayrun.control.job_log import job_output_files
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, AttemptStart, Hang
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler import error_lines
from relayrun.control.scheduler.base import JobEnd
from relayrun.errors import RelayrunError
from relayrun.watch.follow import job_log_files
from relayrun.watch.status.queue import query_queue
from relayrun.watch.text import format_time

T = TypeVar("T")

TAIL_BYTES = 4 << 20
HEAD_BYTES = 256 << 10
"""Bytes of each log that are read."""
CLOSE_BYTES = 8 << 20
"""Bytes of all logs together that are read line by line; of the rest, only the lines around an error are."""
AROUND_BYTES = 32 << 10
COUNTED_BYTES = 64 << 20
"""Size of a log up to which the number of a line is counted."""
ERROR_WORDS = (b"Traceback (most recent", b"rror:", b"NVRM: Xid", b"Segmentation fault")
JOB_STATES = {
    "OUT_OF_MEMORY": "host-memory",
    "TIMEOUT": "time-limit",
    "DEADLINE": "time-limit",
    "NODE_FAIL": "node-failure",
    "BOOT_FAIL": "node-failure",
    "PREEMPTED": "preempted",
}
"""Entries of the table that Slurm's states of a job name."""

Certainty = Literal["seen", "inferred", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why an attempt ended."""

    run: str
    attempt: int | None
    ended: str
    """Cause and reason of the end by the records, or the state of an attempt without an end."""
    name: str = ""
    """Name of the cause in the table of failures; empty if it is unknown."""
    whose: str = "unknown"
    """Whose cause it is: node, program, configuration, network, file system, person, Slurm."""
    meaning: str = "no log and no record names a cause"
    certainty: Certainty = "unknown"
    """seen: a log or a record says so. inferred: facts show it, and no words. unknown: neither."""
    quote: str = ""
    """The words of the log or the record."""
    file: str | None = None
    line: int | None = None
    """Line of `file` with the words, from 1; None if it was not counted."""
    rank: int | None = None
    node: str | None = None
    time: float | None = None
    """Seconds since 1970; None if the words have no time."""
    ruled_out: list[str] = field(default_factory=list)
    """Causes that a look excluded, and what showed it."""
    not_read: list[str] = field(default_factory=list)
    """Sources that were not read, or not to the end."""
    next: str = ""
    """A command or a setting."""


@dataclass
class _Log:
    """The readable parts of one log."""

    path: Path
    since: int
    until: int
    changed: float
    parts: list[tuple[int, bytes]] = field(default_factory=list)
    """Offset and bytes of the parts that are read line by line."""


@dataclass(frozen=True, kw_only=True)
class _Found:
    statement: Statement
    log: _Log
    offset: int
    """Offset of the part of the log in which the statement stands."""
    text: str


def explain(run: Run, number: int | None = None) -> Explanation:
    """Return why an attempt, by default the newest, ended. Raises RunDirError for an attempt that is not there."""
    plan = _read(lambda: Plan.load(run))
    more = plan.chain.failure_signatures if plan is not None else []
    numbers = run.attempt_numbers()
    number = number if number is not None or not numbers else numbers[-1]
    attempt = run.attempt(number) if number is not None else None
    begin = None if attempt is None else _read(attempt.read_begin)
    end = None if attempt is None else _read(attempt.read_end)
    logs, not_read = _logs(run, number, begin)
    job, why_not = _job_end(run, plan, begin)
    made = Explanation(run=str(run.path), attempt=number, ended=_ended(run, end, job))
    facts = _Facts(run=run, attempt=attempt, begin=begin, end=end, job=job, logs=logs, more=more)
    found = replace(facts.explain(made), not_read=[*not_read, *why_not])
    return replace(found, next=_next(found, run, begin))


@dataclass(frozen=True, kw_only=True)
class _Facts:
    run: Run
    attempt: Attempt | None
    begin: AttemptStart | None
    end: AttemptEnd | None
    job: JobEnd | None
    logs: list[_Log]
    more: Sequence[FailureSignature]

    def explain(self, made: Explanation) -> Explanation:
        """Return the explanation by the first source that names a cause, and what the others rule out."""
        around = self._surroundings()
        made = replace(made, ruled_out=self._ruled_out(around))
        found = self._on_purpose(made) or self._record(made)
        if found is not None:
            return found
        said = self._said()
        if said is not None and said.statement.name not in (*ENDS, "") and not said.statement.secondary:
            return self._quoted(made, said)
        by_slurm = JOB_STATES.get(self.job.state.split()[0]) if self.job is not None else None
        if by_slurm is not None and self.job is not None:
            words = f"job {self.job.id}: {self.job.state}"
            return _of_entry(made, by_slurm, "seen", words, self.job.source, time=self.job.end_time)
        return self._inferred(made, around, said)

    def _on_purpose(self, made: Explanation) -> Explanation | None:
        """Return the explanation of an end that no failure brought."""
        end, cancelled = self.end, self.job is not None and self.job.state.startswith("CANCELLED")
        if (end is not None and end.cause == "cancelled") or (end is None and cancelled):
            words = self.job.state if cancelled and self.job is not None else (end.reason if end else "")
            meaning = "a person cancelled the job"
            return _seen(made, "cancelled", "person", meaning, words, self.job.source if cancelled and self.job else "")
        if self.attempt is None or (outcome := _read(partial(AttemptOutcome.read, self.attempt.outcome))) is None:
            return None
        if outcome.outcome == "fatal":
            known = classify(outcome.reason, self.more)
            meaning = known.meaning if known else "the program says that no attempt can go on"
            name, whose = (known.name, known.cause) if known else ("fatal", "program")
            return _seen(made, name, whose, meaning, outcome.reason, str(self.attempt.outcome), time=outcome.time)
        whose = "person" if outcome.outcome == "exit" else "program"
        meaning = {"done": "the run is done", "exit": "a person asked it to leave"}.get(
            outcome.outcome, "it saved and left"
        )
        return _seen(
            made, outcome.outcome, whose, meaning, outcome.reason, str(self.attempt.outcome), time=outcome.time
        )

    def _record(self, made: Explanation) -> Explanation | None:
        """Return the explanation by a record of the attempt: of a rank, of the batch script, of a hang."""
        if self.attempt is None:
            return None
        for path in (self.attempt.setup_failed, self.attempt.not_started):
            words = _text(path)
            if words:
                known = classify(words, self.more)
                name, whose = (known.name, known.cause) if known else ("setup", "configuration")
                return _seen(
                    made, name, whose, known.meaning if known else "a line before the ranks failed", words, str(path)
                )
        failures = _read(partial(failure_reason.read_failures, self.attempt)) or []
        primary = [each for each in failures if not is_secondary_error(each.error, self.more)]
        if primary:
            first = primary[0]
            known = classify(first.error, self.more) or entry("exception")
            path = self.attempt.failures / f"rank-{first.rank:04}.json"
            made = _seen(made, known.name, known.cause, known.meaning, first.error, str(path), time=first.time)
            said = self._said()
            if said is not None and said.statement.place and said.statement.words[:80] == one_line(first.error)[:80]:
                made = self._quoted(made, said)
            return replace(made, rank=first.rank, node=first.node, time=first.time)
        hang = _read(partial(Hang.read, self.attempt.hang))
        if hang is not None and not self._said_specially():
            meaning = "the ranks waited for each other, or for a rank that did not go on"
            made = _seen(made, "hang", "unknown", meaning, hang.words, str(self.attempt.hang), time=hang.time)
            return replace(made, rank=hang.culprit, next=f"relayrun logs {self.run.path} --rank {hang.culprit or 0}")
        return None

    def _said_specially(self) -> bool:
        said = self._said()
        return said is not None and not said.statement.secondary and said.statement.name not in GENERAL

    def _said(self) -> _Found | None:
        """Return the words of the log that name the cause best: of a sick node, of a program, a warning."""
        found = [each for log in self.logs for each in _causes(log, self.more)]
        return min(found, key=lambda each: (_rank_of(each.statement), each.log.changed), default=None)

    def _quoted(self, made: Explanation, found: _Found) -> Explanation:
        said, known = found.statement, found.statement.signature or entry("exception")
        ends = error_lines.task_ends(found.text)
        first = next((end for end in ends if not end.ended), None)
        node = first.nodes[0] if first is not None and len(first.nodes) == 1 else None
        rank = next(iter(first.tasks)) if first is not None and len(first.tasks) == 1 else None
        if known.name == "exception" and said.place:
            known = replace(known, advice=f"correct {said.place}, then relayrun resume {self.run.path}")
        made = _seen(made, known.name, known.cause, known.meaning, said.text, str(found.log.path))
        return replace(
            made,
            line=_line_number(found),
            rank=said.rank if said.rank is not None else rank,
            node=node,
            next=known.advice,
        )

    def _inferred(self, made: Explanation, around: Surroundings | None, said: _Found | None) -> Explanation:
        """Return the explanation by facts without words."""
        if around is not None and around.oom_kills:
            words = f"{around.oom_kills} processes of the job were killed for memory"
            return _of_entry(made, "host-memory", "inferred", words, "memory.events of the job")
        if around is not None and around.full:
            return _of_entry(
                made, "disk-full", "inferred", f"nothing is free below {', '.join(around.full)}", "statvfs"
            )
        if said is not None and not said.statement.secondary and said.statement.signature is not None:
            return replace(self._quoted(made, said), certainty="inferred")
        ends = [end for log in self.logs for _, data in log.parts for end in error_lines.task_ends(_decode(data))]
        first = next((end for end in ends if end.signalled and not end.ended), None)
        if first is not None and (known := classify(first.what, self.more)) is not None:
            made = _of_entry(made, known.name, "inferred", f"{', '.join(first.nodes)}: {first.what}", "srun")
            return replace(made, node=first.nodes[0], rank=min(first.tasks, default=None))
        if around is not None and around.unresolved:
            words = f"these names do not resolve: {', '.join(around.unresolved)}"
            return _of_entry(made, "name-resolution", "inferred", words, "getaddrinfo on the batch host")
        if said is not None:
            quoted = self._quoted(made, said)
            meaning = "a rank saw another one go; which one, and why, no log says"
            return replace(quoted, name="", whose="unknown", meaning=meaning, certainty="unknown", next="")
        return made

    def _surroundings(self) -> Surroundings | None:
        if self.attempt is None:
            return observe([str(self.run.path)], [])
        found = _read(partial(Surroundings.read, self.attempt.surroundings))
        return found or (observe([str(self.run.path)], []) if self.end is None else None)

    def _ruled_out(self, around: Surroundings | None) -> list[str]:
        found = []
        if around is not None:
            if not around.full and around.free_bytes:
                least = min(around.free_bytes, key=lambda path: around.free_bytes[path])
                found.append(f"a full disk: {around.free_bytes[least]:,} bytes were free below {least}")
            if around.oom_kills == 0:
                found.append("memory of the batch host: the kernel killed no process of the job")
            if self.attempt is not None and self.attempt.surroundings.exists() and not around.unresolved:
                found.append("names of the nodes: the batch host resolves them")
        if self.begin is not None and self.end is not None and self.begin.job_end_time is not None:
            left = self.begin.job_end_time - self.end.end_time
            found += [f"the time limit: {left:.0f} s were left"] if left > 60 else []
        if self.job is not None and self.job.state in ("FAILED", "COMPLETED"):
            found.append(f"a lost node, preemption: {self.job.source} says {self.job.state}")
        return found


def _rank_of(said: Statement) -> int:
    """Return how well words name a cause: the less, the better."""
    if said.secondary:
        return 4
    if said.cause == "node" and said.name not in GENERAL:
        return 0
    if said.name in ENDS or not said.last:
        return 2
    return 1 if said.signature is not None else 3


def _causes(log: _Log, more: Sequence[FailureSignature]) -> Iterator[_Found]:
    """Yield the first cause of the end of a log; without one, that of an earlier part with an error."""
    for offset, data in log.parts:
        text = _decode(data)
        said = first_cause(text, more) or next(iter(_secondary(text, more)), None)
        if said is not None:
            yield _Found(statement=said, log=log, offset=offset, text=text)
            return


def _secondary(text: str, more: Sequence[FailureSignature]) -> list[Statement]:
    return [each for each in find_statements(text, more) if each.secondary][-1:]


def _logs(run: Run, number: int | None, begin: AttemptStart | None) -> tuple[list[_Log], list[str]]:
    """Return the logs of an attempt's ranks with their parts to read, and what is not read."""
    offsets = {Path(path): offset for path, offset in ([] if begin is None else job_output_files(begin))}
    if not offsets:
        with contextlib.suppress(RelayrunError, OSError):
            offsets = dict.fromkeys(job_log_files(run, None if begin is None else number), 0)
    if begin is not None and begin.log is not None and Path(begin.log) not in offsets:
        offsets[Path(begin.log)] = begin.log_offset
    beside = [path for each in list(offsets) for path in sorted(each.parent.glob(f"{each.stem}[-._]*"))]
    if number is not None:
        beside += sorted(run.attempt(number).agents.glob("*")) + sorted(
            run.debug_of(number).rglob("*.[teol][xuro][trg]*")
        )
    offsets |= {path: 0 for path in beside if path not in offsets and path.is_file()}
    logs, not_read = [], []
    for path, since in offsets.items():
        try:
            found = path.stat()
            logs.append(_Log(path, since, _next_attempt_offset(run, number, path, found.st_size), found.st_mtime))
        except OSError as error:
            not_read.append(f"{path}: {error.strerror}")
    close = max(AROUND_BYTES, CLOSE_BYTES // max(len(logs), 1))
    for log in logs:
        try:
            not_read += _read_parts(log, close)
        except OSError as error:
            not_read.append(f"{log.path}: {error.strerror}")
    return logs, not_read


def _next_attempt_offset(run: Run, number: int | None, path: Path, size: int) -> int:
    """Return where the next attempt of the same job begins in this log, or its size."""
    following = None if number is None else _read(lambda: run.attempt(number + 1).read_begin())
    behind = [] if following is None else job_output_files(following)
    return next((offset for name, offset in behind if Path(name) == path), size) or size


def _read_parts(log: _Log, close: int) -> list[str]:
    """Read the end and the beginning of a log; return what is not read."""
    size = log.until - log.since
    tail, head = min(TAIL_BYTES, size), min(HEAD_BYTES, max(size - TAIL_BYTES, 0))
    with open(log.path, "rb") as file:
        file.seek(log.until - tail)
        end = file.read(tail)
        file.seek(log.since)
        start = file.read(head)
    at = max(tail - close, 0)
    log.parts = [(log.until - tail + at, end[at:])]
    for offset, data in ((log.until - tail, end[:at]), (log.since, start)):
        if (found := max((data.rfind(word) for word in ERROR_WORDS), default=-1)) >= 0:
            begin = max(found - AROUND_BYTES, 0)
            log.parts.append((offset + begin, data[begin : found + AROUND_BYTES]))
    left = size - tail - head
    return [f"{log.path}: {left:,} bytes between its first {head:,} and its last {tail:,}"] if left > 0 else []


def _decode(data: bytes) -> str:
    return data.replace(b"\0", b"").replace(b"\r", b"\n").decode("utf-8", errors="replace")


def _line_number(found: _Found) -> int | None:
    """Return the number of the statement's line in its log, from 1; None in a log that is too large to count."""
    if found.offset > COUNTED_BYTES:
        return None
    with contextlib.suppress(OSError), open(found.log.path, "rb") as file:
        before = file.read(found.offset).replace(b"\r", b"\n").count(b"\n")
        return before + found.statement.line + 1
    return None


def _job_end(run: Run, plan: Plan | None, begin: AttemptStart | None) -> tuple[JobEnd | None, list[str]]:
    """Return the end of the attempt's job by the scheduler, and why it is unknown."""
    if plan is None:
        return None, ["the scheduler: there is no readable plan.json"]
    try:
        queue = query_queue(run, plan, brief=True)
    except (RelayrunError, OSError) as error:
        return None, [f"the scheduler: {error}"]
    if queue.error is not None:
        return None, [f"the scheduler: {queue.error}"]
    job = queue.last_job
    return (job if job is not None and (begin is None or job.id == begin.job_id) else None), []


def _ended(run: Run, end: AttemptEnd | None, job: JobEnd | None) -> str:
    if end is not None:
        return f"{end.cause}: {end.reason}"
    stop = _read(lambda: stop_reason(run))
    return stop or (f"no end on record; job {job.id} is {job.state}" if job else "no end on record")


def _next(found: Explanation, run: Run, begin: AttemptStart | None) -> str:
    words = found.next or (entry(found.name).advice if entry(found.name).name == found.name else "")
    words = words.replace("{node}", found.node or "NODE").replace("{job}", begin.job_id if begin else "JOB")
    attempt = f" --attempt {found.attempt}" if found.attempt is not None else ""
    return words or f"relayrun logs {run.path}{attempt} -n 200"


def _seen(
    made: Explanation, name: str, whose: str, meaning: str, words: str, where: str, *, time: float | None = None
) -> Explanation:
    found = replace(made, name=name, whose=whose, meaning=meaning, certainty="seen", quote=one_line(words))
    return replace(found, file=where or None, time=time)


def _of_entry(
    made: Explanation, name: str, certainty: Certainty, words: str, where: str, *, time: float | None = None
) -> Explanation:
    known = entry(name)
    return replace(_seen(made, name, known.cause, known.meaning, words, where, time=time), certainty=certainty)


def _read(read: Callable[[], T | None]) -> T | None:
    """Return what a record holds; None if it is missing or damaged."""
    try:
        return read()
    except (RelayrunError, OSError, ValueError, TypeError):
        return None


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def explanation_lines(found: Explanation) -> list[str]:
    """Return an explanation as lines for people."""
    attempt = "no attempt" if found.attempt is None else f"attempt {found.attempt}"
    sure = {"seen": "seen", "inferred": "inferred: no log says it in words", "unknown": "unknown"}[found.certainty]
    who = ", ".join(
        filter(
            None,
            [
                f"rank {found.rank}" if found.rank is not None else "",
                f"node {found.node}" if found.node else "",
                format_time(found.time) if found.time is not None else "",
            ],
        )
    )
    where = "" if found.file is None else found.file + (f":{found.line}" if found.line is not None else "")
    lines = [
        f"run        {found.run}, {attempt}: {found.ended}",
        f"cause      {found.meaning}" + (f" ({found.name}; whose: {found.whose})" if found.name else ""),
        f"sure       {sure}",
    ]
    lines += [f"words      {found.quote}"] if found.quote else []
    lines += [f"where      {', '.join(filter(None, [where, who]))}"] if where or who else []
    lines += [f"ruled out  {words}" for words in found.ruled_out]
    lines += [f"not read   {words}" for words in found.not_read]
    return [*lines, f"next       {found.next}"]
