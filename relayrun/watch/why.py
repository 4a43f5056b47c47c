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
from relayrun.control.diagnosis import Statement, cause_among, find_statements, last_line
from relayrun.control.failure_signatures import ENDS, GENERAL, UNLISTED, classify, entry, is_secondary_error
from relayrun.control.job_log import job_output_files
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, AttemptStart, Hang
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler import error_lines
from relayrun.control.scheduler.base import JobEnd
from relayrun.errors import RelayrunError
from relayrun.terminal import one_line
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
    """`seen`: a log or a record says so. `inferred`: facts show it, and no words. `unknown`: neither."""
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
    """The readable parts of one log: offset and bytes of each."""

    path: Path
    since: int
    until: int
    changed: float
    parts: list[tuple[int, bytes]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """A statement, with the text and the offset of the part of the log in which it stands."""

    said: Statement
    log: _Log
    offset: int
    text: str

    @property
    def weight(self) -> int:
        """How well the words name a cause: the less, the better."""
        said = self.said
        if said.secondary or said.signature is None:
            return 4
        if said.name in GENERAL:
            return 3 if said.name in ENDS else 2 if said.name in UNLISTED else 1
        return 0 if said.cause == "node" else 1 if said.last or said.cause == "Slurm" else 3


def explain(run: Run, number: int | None = None) -> Explanation:
    """Return why an attempt, by default the newest, ended."""
    plan = _read(partial(Plan.load, run))
    numbers = run.attempt_numbers()
    number = number if number is not None or not numbers else numbers[-1]
    attempt = run.attempt(number or 0)
    begin, end = _read(attempt.read_begin), _read(attempt.read_end)
    logs, not_read = _logs(run, number, begin, plan)
    job, why_not = _job_end(run, plan, begin)
    more = [] if plan is None else plan.chain.failure_signatures
    words = [each for log in logs for each in _causes(log, more)]
    said = min(words, key=lambda each: (each.weight, each.log.changed), default=None)
    around = _read(partial(Surroundings.read, attempt.surroundings))
    if around is None and end is None:
        around = observe([str(run.path)], [])
    ended = f"{end.cause}: {end.reason}" if end else _read(partial(stop_reason, run)) or "its end is not on record"
    made = Explanation(run=str(run.path), attempt=number, ended=ended, not_read=[*not_read, *why_not])
    starter = [_decode(data) for log in logs for _, data in log.parts if b"srun: error: " in data]
    ends = [each for text in starter for each in error_lines.task_ends(text)]
    facts = _Facts(made, attempt, begin, end, job, said, around, more, ends)
    found = next(facts.causes(), None) or _last_words(made, logs)
    known = entry(found.name, more)
    advice = known.advice.replace("{node}", found.node or "NODE") if known.name == found.name else ""
    logs_of = f"relayrun logs {run.path}" + (f" --attempt {number}" if number else "") + " -n 200"
    command = found.next or advice.replace("{job}", begin.job_id if begin else "JOB") or logs_of
    return replace(found, next=command, ruled_out=facts.ruled_out())


@dataclass(frozen=True)
class _Facts:
    made: Explanation
    attempt: Attempt
    begin: AttemptStart | None
    end: AttemptEnd | None
    job: JobEnd | None
    said: _Found | None
    around: Surroundings | None
    more: Sequence[FailureSignature]
    ends: list[error_lines.TaskEnd]

    def causes(self) -> Iterator[Explanation]:
        """Yield the explanations of all sources that name a cause, the surest first."""
        attempt, said, around = self.attempt, self.said, self.around
        state = "" if self.job is None else self.job.state
        if (self.end is None and state.startswith("CANCELLED")) or (self.end and self.end.cause == "cancelled"):
            words = state if state.startswith("CANCELLED") else self.made.ended
            yield self._by(words, "sacct", "cancelled", "person", "a person cancelled the job")
        if (outcome := _read(partial(AttemptOutcome.read, attempt.outcome))) is not None:
            yield self._by_outcome(outcome)
        for path in (attempt.setup_failed, attempt.not_started):
            if words := (_read(partial(path.read_text, encoding="utf-8", errors="replace")) or "").strip():
                yield self._by(words, path, "setup", "configuration", "a line before the ranks failed")
        yield from self._by_rank()
        hang = _read(partial(Hang.read, attempt.hang))
        if hang is not None and (said is None or said.said.name in (*GENERAL, "")):
            made = self._by(hang.words, attempt.hang, "hang", "unknown", "the ranks waited for one that did not go on")
            command = f"relayrun logs {self.made.run} --rank {hang.culprit or 0}"
            yield replace(made, time=hang.time, rank=hang.culprit, next=command)
        if said is not None and said.weight < 2:
            yield self._quoted(said)
        if self.job is not None and (known := classify(words := f"job {self.job.id}: {state}")) is not None:
            yield replace(self._by(words, self.job.source, known.name), time=self.job.end_time)
        if around is not None and around.oom_kills:
            words = f"{around.oom_kills} processes of the job were killed for memory"
            yield self._by(words, "memory.events of the job", "host-memory", certainty="inferred")
        if around is not None and around.full:
            words = f"nothing is free below {', '.join(around.full)}"
            yield self._by(words, "statvfs", "disk-full", certainty="inferred")
        if said is not None and said.weight < 4:
            yield replace(self._quoted(said), certainty="unknown" if said.said.name in UNLISTED else "inferred")
        for task in self.ends:
            if task.signalled and not task.ended and (known := classify(task.what, self.more)) is not None:
                made = self._by(task.line, "srun", known.name, certainty="inferred")
                yield replace(made, node=task.nodes[0], rank=min(task.tasks, default=None))
        if around is not None and around.unresolved:
            words = f"these names do not resolve: {', '.join(around.unresolved)}"
            yield self._by(words, "getaddrinfo on the batch host", "name-resolution", certainty="inferred")
        if said is not None:
            meaning = "a rank saw another one go; which one, and why, no log says"
            made = replace(self._quoted(said), name="", whose="unknown", meaning=meaning)
            yield replace(made, certainty="unknown", next="")

    def _by(
        self,
        words: str,
        where: str | Path,
        name: str,
        whose: str = "unknown",
        meaning: str = "",
        certainty: Certainty = "seen",
    ) -> Explanation:
        """Return the explanation by a source: by the entry of its words or its name, or else as given."""
        known = (classify(words, self.more) if meaning else None) or entry(name)
        if not meaning or known.name not in (*GENERAL, name):
            name, whose, meaning = known.name, known.cause, known.meaning
        found = replace(self.made, name=name, whose=whose, meaning=meaning, certainty=certainty)
        return replace(found, quote=one_line(words), file=str(where))

    def _by_outcome(self, outcome: AttemptOutcome) -> Explanation:
        name, place = outcome.outcome, self.attempt.outcome
        meanings = {"done": "the run is done", "exit": "a person asked it to leave", "saved": "it saved and left"}
        if name not in meanings:
            return self._by(outcome.reason, place, name, "program", "the program says that no attempt can go on")
        whose, quote = "person" if name == "exit" else "program", one_line(outcome.reason)
        found = replace(self.made, name=name, whose=whose, meaning=meanings[name], certainty="seen")
        return replace(found, quote=quote, file=str(place))

    def _by_rank(self) -> Iterator[Explanation]:
        for each in _read(partial(failure_reason.read_failures, self.attempt)) or []:
            if not is_secondary_error(each.error, self.more):
                name = (classify(each.error, self.more) or entry("exception")).name
                made = self._by(each.error, self.attempt.failures / f"rank-{each.rank:04}.json", name)
                if self.said is not None and self.said.said.words[:80] == one_line(each.error)[:80]:
                    made = self._quoted(self.said)
                yield replace(made, rank=each.rank, node=each.node, time=each.time)

    def _quoted(self, found: _Found) -> Explanation:
        said, known = found.said, found.said.signature or entry("exception")
        made = replace(self.made, name=known.name, whose=known.cause, meaning=known.meaning, certainty="seen")
        made = replace(made, quote=said.text, file=str(found.log.path), line=_line_number(found), rank=said.rank)
        first = next((end for end in error_lines.task_ends(found.text) if not end.ended), None)
        if first is not None and len(first.tasks) == 1:
            rank = next(iter(first.tasks)) if said.rank is None else said.rank
            made = replace(made, node=first.nodes[0], rank=rank)
        place = known.name == "exception" and said.place
        return replace(made, next=f"correct {place}, then relayrun resume {made.run}") if place else made

    def ruled_out(self) -> list[str]:
        """Return the causes that a look excluded, and what showed it."""
        found, around, begin = [], self.around, self.begin
        if around is not None and around.free_bytes and not around.full:
            path = min(around.free_bytes, key=lambda path: around.free_bytes[path])
            found.append(f"a full disk: {around.free_bytes[path]:,} bytes were free below {path}")
        if around is not None and around.oom_kills == 0:
            found.append("memory of the batch host: the kernel killed no process of the job")
        if begin is not None and begin.job_end_time is not None and self.end is not None:
            left = begin.job_end_time - self.end.end_time
            found += [f"the time limit: {left:.0f} s were left"] if left > 60 else []
        if self.job is not None and self.job.state in ("FAILED", "COMPLETED"):
            found.append(f"a lost node, preemption: {self.job.source} says {self.job.state}")
        return found


def _causes(log: _Log, more: Sequence[FailureSignature]) -> Iterator[_Found]:
    """Yield the first cause of the end of a log; without one, that of an earlier part with an error."""
    for offset, data in log.parts:
        text = _decode(data)
        words = find_statements(text, more)
        secondary = (each for each in reversed(words) if each.secondary)
        if (said := cause_among(text, words) or next(secondary, None)) is not None:
            yield _Found(said=said, log=log, offset=offset, text=text)
            return


def _last_words(made: Explanation, logs: Sequence[_Log]) -> Explanation:
    """Return an explanation without a cause, with the last line before the first end of a task, and that end."""
    for log in sorted(logs, key=lambda log: log.path.suffix != ".err"):
        lines = _decode(log.parts[0][1]).splitlines()
        end = next((n for n, line in enumerate(lines) if error_lines.TASK_END.match(line)), len(lines))
        if words := "; ".join(filter(None, [last_line("\n".join(lines[:end])), *lines[end : end + 1]])):
            meaning = "no log and no record names a cause; these are the last words"
            return replace(made, quote=words, file=str(log.path), meaning=meaning)
    return made


def _logs(run: Run, number: int | None, begin: AttemptStart | None, plan: Plan | None) -> tuple[list[_Log], list[str]]:
    """Return the logs of an attempt's ranks with their parts to read, and what is not read."""
    offsets = {Path(path): offset for path, offset in ([] if begin is None else job_output_files(begin))}
    if not offsets:
        with contextlib.suppress(RelayrunError, OSError):
            offsets = dict.fromkeys(job_log_files(run, None if begin is None else number), 0)
    if begin is not None and begin.log is not None and Path(begin.log) not in offsets:
        offsets[Path(begin.log)] = begin.log_offset
    beside = [path for each in list(offsets) for path in sorted(each.parent.glob(f"{each.stem}[-._]*"))]
    if plan is not None and begin is not None:
        beside += _read(partial(failure_reason.torchrun_logs, plan, begin)) or []
    if number is not None:
        beside += sorted(run.attempt(number).agents.glob("*")) + sorted(run.debug_of(number).glob("nccl*.txt"))
    offsets |= {path: 0 for path in beside if path not in offsets and path.is_file()}
    logs, not_read = [], []
    close = max(AROUND_BYTES, CLOSE_BYTES // max(len(offsets), 1))
    for path, since in offsets.items():
        try:
            found = path.stat()
            log = _Log(path, since, _next_attempt_offset(run, number, path, found.st_size), found.st_mtime)
            not_read += _read_parts(log, close)
            logs.append(log)
        except OSError as error:
            not_read.append(f"{path}: {error.strerror}")
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
    with contextlib.suppress(OSError), open(found.log.path, "rb") as file:
        if found.offset <= COUNTED_BYTES:
            return file.read(found.offset).replace(b"\r", b"\n").count(b"\n") + found.said.line + 1
    return None


def _job_end(run: Run, plan: Plan | None, begin: AttemptStart | None) -> tuple[JobEnd | None, list[str]]:
    """Return the end of the attempt's job by the scheduler, and why it is unknown."""
    if plan is None:
        return None, ["the scheduler: there is no readable plan.json"]
    try:
        queue = query_queue(run, plan, brief=True)
    except (RelayrunError, OSError) as error:
        return None, [f"the scheduler: {error}"]
    job = queue.last_job
    return job if job and (not begin or job.id == begin.job_id) else None, [*filter(None, [queue.error])]


def _read(read: Callable[[], T | None]) -> T | None:
    """Return what a record holds; None if it is missing or damaged."""
    try:
        return read()
    except (RelayrunError, OSError, ValueError, TypeError):
        return None


def explanation_lines(found: Explanation) -> list[str]:
    """Return an explanation as lines for people."""
    attempt = "no attempt" if found.attempt is None else f"attempt {found.attempt}"
    where = "" if found.file is None else found.file + (f":{found.line}" if found.line is not None else "")
    rank = "" if found.rank is None else f"rank {found.rank}"
    node, when = f"node {found.node}" if found.node else "", "" if found.time is None else format_time(found.time)
    rows = [
        ("run", f"{found.run}, {attempt}: {found.ended}"),
        ("cause", found.meaning + (f" ({found.name}; whose: {found.whose})" if found.name else "")),
        ("sure", found.certainty + (": no log says it in words" if found.certainty == "inferred" else "")),
        ("words", found.quote),
        ("where", ", ".join(filter(None, [where, rank, node, when]))),
        *(("ruled out", words) for words in found.ruled_out),
        *(("not read", words) for words in found.not_read),
        ("next", found.next),
    ]
    return [f"{name:10} {text}" for name, text in rows if text]
