"""The first cause of a failure, from the lines of a log.

A log holds warnings, errors that a program survived, the last words of the program that failed first, and the words of
all others, which only saw it go. A last word that names a defect of a node counts first, then Slurm's word for an end,
unless a known cause stands before it, then the first last word of the newest group; without any, a warning that
explains an end. Words after which the program went on count nothing, but for those of a thread for which ranks waited
in vain. Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from relayrun.config.sections.chain import FailureSignature
from relayrun.control import failure_signatures
from relayrun.control.failure_signatures import ENDS, GENERAL, UNLISTED, WARNINGS, SignatureTable, line_kinds
from relayrun.control.job_log import LOG_PREFIX
from relayrun.terminal import one_line

SURVIVED = 40
"""Ordinary lines after which a program has survived an error."""
PROGRESS_WEIGHT = 14
"""Ordinary lines for which a line of progress stands."""
LONGEST_LINE = 4000
"""Characters of a longer line that are looked at: its beginning and its end."""
CONTEXT_LINES = 8
"""Lines behind an exception that may belong to its message."""

_TIME = r"\[?(?:ERROR |CRITICAL )?(?:(?:\d{4}-)?\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?Z?\]?:?"
_LEVEL = r"(?: [\w.-]+\[\w+\])?(?: +(?:ERROR|CRIT(?:ICAL)?|FATAL)\b:? ?)?"
_SPEAKER = rf"{_TIME}{_LEVEL}|\[[^\]\s]*\](?:<\w+>)?:?|\d+:|r\d+(?= )|\(\w+ pid=\d+[^)]*\)"
_LABEL = re.compile(rf"(?:\s*(?:{_SPEAKER})(?=[\s\w\[]))*(?: +[|+](?= ))? ?")
_RANK = re.compile(r"(?:\[(?:rank|default|\d+,)?|^\s*|\br)(\d+)(?:\]|:|$)")
_RAISED = re.compile(
    r"(?!INFO|NOTE|WARN|ERROR|jax.*frames)(?:[A-Za-z_]\w*\.)*(?:[A-Z]\w*|gaierror|timeout|error)(?::\s.*|)$", re.S
)
_FRAME = re.compile(r' *File "([^"]+)", line (\d+)(, in )?')
_HOST = re.compile(r"^(?!\d+: )([^\s(:\[]+: )(?:\[rank\d+\]: )?(?:Traceback \(most|Fatal Python error)", re.M)
"""A label before a traceback that is no rank's: pdsh writes the name of the node."""
_LAST_WORDS = re.compile(
    r"[\w.]*(?:Error|Exception|gaierror|Failed)(?::| \()|The (?:IPv4|server socket) |error: |terminate called"
    r"|(?:.*/)?(?:python[\d.]*|(?:ba|da|z|k)?sh|curl|wget|ssh|env|exec|numactl|mpirun|mpiexec)(?:: |\[\d)"
    r"|(?:tar|gzip|rsync|cp): |(?:nvcc|ptxas|nvlink) (?:fatal|error) *: |fatal error: "
    r"|\S+: .*: Assertion |\S*: (?:\w+ )?\d+ ?: |\S+: (?:fatal )?error: |FATAL|Fatal|fatal: |Lmod has"
    r"|Segmentation fault|Aborted|Killed|Bus error|slurmstepd\S*: error: |srun: (?:error|fatal): |pyxis: "
    r"|\S+: \S.*: (?:No such file|Permission denied)|.*\bMPI_ABORT was| *what\(\)|thread '.*' panicked"
    r"|F\d{4,8} \d\d:|ModuleCmd_\w+\.c|>> '--exit-on|ERROR: (?:LoadError|Unable to locate)|panic: |\w+: \*\*\* "
    r"|Can't locate |\w+\(\): (?:double|invalid|corrupted|memory)|double free or|corrupted |Timeout \(\d"
    r"|.*(?: failed \(exitcode: -|\] exits with return code = -|Watchdog caught collective operation timeout)"
)
"""Beginnings of lines with which a program ends: an exception, a message of an interpreter, shell or starter."""
_TASK_EXIT = re.compile(r"srun: error: \S+: tasks? [\d,\-\[\]]+: (?:Exited|Terminated|Killed)")
_ASIDE = re.compile(
    r"\s|$|srun: |slurmstepd|wandb: |[=-]{5}|frame #|\[relayrun |Traceback|The above |During handl|.*[Ww]arnings?\b"
)
"""Lines that programs write when they end, and lines of others: they do not show that training goes on."""
_IGNORED = "ignored"
_OF_THREAD = re.compile(r"Exception in thread |\bProcess \S+-\d+:$")
_PROGRESS = re.compile(r"\b(?:iteration|step|iter|epoch)\b\W{0,3}\d", re.I)
_TROUBLE = ("Traceback", "The above exception", "During handling", 'File "')
"""Words that mean something besides those of the table."""
_SLURM_ENDED = re.compile(r"CANCELLED AT \S+ \*|DUE TO (?:TIME|PREEMPT|NODE F)|oom[-_]kill event|Node failure on", re.I)
"""Slurm's words for an end: what ranks say of it, before or after, is no cause."""
_NAMED = re.compile(r"\w+(?:Error|Exception)\w*[:(]")
"""The name of an exception in the message of another one."""
_CONTINUED = re.compile(
    r"NCCL error|BackendError|terminate called|CalledProcess|CUDA error|:$|Last error|InductorError"
)


@dataclass(frozen=True, kw_only=True)
class Statement:
    """Words in a log that may say why a program ended."""

    line: int
    """Number of the line in the text, from 0."""
    words: str
    signature: FailureSignature | None
    """The entry of the table; None if no entry matches."""
    place: str = ""
    """File and line of the program, if the words end a traceback."""
    rank: int | None = None
    last: bool = True
    """The form of the words is that of a program's end, not of a warning."""
    thread: bool = False
    """The words ended a thread or a worker process alone: the program goes on until it needs their work."""
    secondary: bool = False
    """The words only report that another rank is gone."""

    @property
    def cause(self) -> str:
        """Whose cause it is."""
        return "unknown" if self.signature is None else self.signature.cause

    @property
    def name(self) -> str:
        """Name of the entry; empty without one."""
        return "" if self.signature is None else self.signature.name

    @property
    def text(self) -> str:
        """The words, with their place in the program."""
        return f"{self.words} ({self.place})" if self.place else self.words

    @property
    def key(self) -> str:
        """Words that are equal for the same failure: the kind of the exception and its place, or all but numbers."""
        kind = self.words.partition(":")[0]
        return f"{kind} at {self.place}" if self.place else re.sub(r"0x[0-9a-fA-F]+|\d+", "#", self.words)


def _lines_of(log: str) -> list[str]:
    """Return the lines: those of megabytes without their middle, of a traceback in JSON its last line."""
    return [line if len(line) < LONGEST_LINE and line[:1] != "{" else _shortened(line) for line in log.splitlines()]


def _shortened(line: str) -> str:
    """Return a line of megabytes without its middle, and of JSON with a traceback the exception."""
    if len(line) >= LONGEST_LINE:
        line = line[: LONGEST_LINE // 2] + line[-LONGEST_LINE // 2 :]
    with contextlib.suppress(ValueError):  # JSON that is cut, or none
        if line.startswith("{") and "Traceback (" in line:
            told = [each for each in json.loads(line).values() if isinstance(each, str) and "Traceback (" in each]
            return told[0].strip().splitlines()[-1] if told else line
    return line


def first_cause(log: str, more: Sequence[FailureSignature] = ()) -> Statement | None:
    """Return the words that say why a program ended; None if no line does. `more`: entries of the site and the run."""
    return cause_among(log, find_statements(log, more))


def cause_among(log: str, found: Sequence[Statement]) -> Statement | None:
    """Return which of the words found in a log say why the program ended; None if no line does."""
    lines = _lines_of(log)
    cancelled = next((each for each in found if each.name == "cancelled"), None)
    if cancelled and (found[0] is not cancelled or any(map(_TASK_EXIT.match, lines[: cancelled.line]))):
        found = [each for each in found if each.name != "cancelled"]  # a consequence
    alive = _not_survived(lines, found)
    ended = next((each for each in alive if each.signature and _SLURM_ENDED.search(each.words)), None)
    own = [each for each in alive if not each.secondary]
    final = [each for each in own if each.place or each is ended or each.name in ("syntax", "variable")]
    spoken = [each for each in own if each.last and not _is_passed_over(each, final)]
    sick = [each for each in spoken if each.cause == "node" and each.name not in GENERAL]
    if all(each.name in _OF_DRIVER for each in sick[:1]):
        sick = [each for each in alive if each.name in _OF_KERNEL] + sick
    if sick and sick[0].name == "device-error":  # a client of a file server says this as well
        sick = [] if any(each.cause == "file system" and each.line < sick[0].line for each in spoken) else sick
    warned = [each for each in found if not each.last and not each.secondary]
    warned = [each for each in warned if each in alive] or warned[-1:]
    named = [each for each in spoken if each.name not in ENDS and (each.name not in GENERAL or each is spoken[0])]
    near = next((each.line for each in named if not _saw_another_go(each)), len(log))
    owned = [each for each in named if each.cause != "unknown" or each.name in UNLISTED]
    owned = [each for each in owned if each.line <= near or not _saw_another_go(each)]
    of_place = [each for each in warned if each.cause in ("node", "file system")]
    known = [each for each in [*sick, *of_place, *owned] if each in alive and each.name not in UNLISTED]
    if ended is not None and all(each.line >= ended.line for each in known):
        return ended
    said = next(iter([*sick, *owned]), None)
    before = [each for each in warned if said and each.line < said.line and _warns_of(each, said)]
    cause = next(iter([*before, *sick, *owned, *of_place, *named, *warned, *spoken]), None)
    of_threads = [each for each in found if each.thread and not each.secondary]
    if alive and of_threads and (cause is None or cause.name in ENDS):
        cause = replace(of_threads[-1], last=False)
    if cause is not None and cause.name == "abort" and ("DistBackendError" in cause.words or "Aborted" in cause.words):
        watchdog = (each for each in alive if each.secondary and each.line < cause.line)
        return next((replace(each, signature=cause.signature, secondary=False) for each in watchdog), cause)
    return cause


def last_line(log: str) -> str:
    """Return the last line that a program wrote, if it is no progress; empty without any."""
    lines = _lines_of(log)
    newest: dict[str, str] = {}  # of each kind, the newest first: a progress bar has a hundred thousand
    for kind, line in zip(reversed(line_kinds(lines)), reversed(lines), strict=True):
        newest.setdefault(kind, line)
    words = (line.strip() for line in newest.values() if not _ASIDE.match(_split_label(line)[1]))
    return next((one_line(line) for line in words if not _PROGRESS.search(line)), "")


def find_statements(log: str, more: Sequence[FailureSignature] = ()) -> list[Statement]:
    """Return all words in a log that may say why a program ended, in their order."""
    lines = _lines_of(log)
    table = SignatureTable.of_lines(lines, more)
    present = [*_TROUBLE, *table.texts()]
    found: list[Statement] = []
    frames: dict[int | str, str] = {}  # the last frame of the open traceback of each rank or host
    threads: set[int | str] = set()  # ranks and hosts whose open traceback is a thread's
    chained: dict[int | str, str] = {}  # how the next exception of each rank or host is chained
    hosts = set(_HOST.findall(log)) if "Traceback" in log or "Fatal Python" in log else ()
    telling = range(len(lines)) if more else _lines_with(present, lines)
    for number, line in enumerate(lines):
        if not frames and number not in telling:
            continue
        host = next((each for each in hosts if line.startswith(each)), "")
        rank, text = _split_label(line[len(host) :])
        of = host if rank is None else rank
        if line.startswith(LOG_PREFIX) or not text.strip():
            continue
        if text.startswith(("The above exception was the direct cause", "During handling of the above")):
            chained[of] = "cause" if text[0] == "T" else "handling"
            frames[of] = ""
        elif "Traceback (most recent call last)" in text:
            ignored = number and "Exception ignored in" in lines[number - 1]  # the program went on
            frames[of] = _IGNORED if ignored else ""
            if of not in chained:
                threads = threads | {of} if number and _OF_THREAD.search(lines[number - 1]) else threads - {of}
        elif text[0] == " " and (of in frames or 'File "' in text):
            if frames.get(of) != _IGNORED and (frame := _FRAME.match(text)) and (of in frames or frame[3]):
                frames[of] = f"{frame[1].rpartition('/')[2]}:{frame[2]}"
        elif frames.get(of) == _IGNORED:
            del frames[of]
        else:
            place = frames.pop(of) if of in frames and _RAISED.match(text) else None
            how = "" if place is None else chained.pop(of, "")
            made = _statement(lines, number, text, table, rank, place)
            earlier = next((each for each in reversed(found) if each.rank == rank), None) if how else None
            if made is not None and earlier is not None:
                found.remove(earlier)
                if _explains(earlier, made, how):
                    asked = made if made.name == "hub" else earlier
                    made = replace(earlier, line=made.line, signature=asked.signature)
            found += [] if made is None else [replace(made, thread=place is not None and of in threads)]
    return found


def _lines_with(words: Sequence[str], lines: Sequence[str]) -> set[int]:
    """Return the numbers of the lines that hold one of the words, by a search through all lines at once."""
    text, ends, found = "\n".join(lines), [*accumulate(len(line) + 1 for line in lines)], set()
    for word in words:
        at = text.find(word)
        while at >= 0:
            found.add(number := bisect_right(ends, at))
            at = text.find(word, ends[number])
    return found


def _statement(
    lines: Sequence[str], number: int, text: str, table: SignatureTable, rank: int | None, place: str | None
) -> Statement | None:
    """Return the words of a line; None if it says nothing. `place`: of the exception that it is; None for others."""
    raised, words, signature = place is not None, text, table.classify(text)
    secondary = table.is_secondary(text, signature)
    # what Slurm ended failed before
    last = raised or (_LAST_WORDS.match(text) is not None and "error: *** " not in text)
    behind = list(_continuation(lines, number, rank)) if last and _CONTINUED.search(text) else []
    if behind and (text.endswith(":") or "Last error:" in behind[:-1]):
        at = 0 if text.endswith(":") else behind.index("Last error:") + 1
        words = f"{text} {next((each for each in behind[at:] if _NAMED.match(each)), behind[at])}"
    if secondary or signature is None or signature.name in _OPEN:
        entries = ((each, table.classify(each)) for each in behind)
        better = next(((each, known) for each, known in entries if known and known.name not in _OPEN), None)
        if better is not None:
            secondary, signature, words = False, better[1], f"{text} {better[0]}"
    refused = place and _REFUSAL.search(f"{text} ({place})")
    if refused and not secondary and signature is not None and signature.name in UNLISTED:
        signature = failure_signatures.entry("settings", table.more)
    begins = signature is not None and signature.name not in GENERAL and re.match(signature.pattern, text)
    last = bool(last or begins or any(each is signature for each in table.more))
    warns = last or (signature is not None and signature.name in WARNINGS)
    if not raised and ((signature is None and not secondary) or not warns or _TASK_EXIT.match(text)):
        return None
    return Statement(
        line=number,
        words=one_line(words),
        signature=signature,
        place=place or "",
        rank=rank,
        last=last,
        secondary=secondary,
    )


def _continuation(lines: Sequence[str], number: int, rank: int | None) -> Iterator[str]:
    """Yield the lines of the same rank behind an exception that may belong to its message."""
    for line in lines[number + 1 : number + CONTEXT_LINES]:
        other, text = _split_label(line)
        of_another = None not in (other, rank) and other != rank
        if of_another or "Traceback" in line or text.startswith(("srun: ", "slurmstepd")):
            return
        yield text.strip()


_REFUSAL = re.compile(
    r"(?:^|[\s`'\"(])--[a-z][a-z\d]+(?:[-_][a-z\d]+)*\b|[\w*]\.(?:ya?ml|toml|json|ini|cfg)\b|\bdid you mean\b"
    r"|(?:[.,;:?!]|\bplease|\bor) (?:check (?!\w+ (?:inter|net|conn))|(?:provide|set|use|install|specify|pass|increase"
    r"|reduce|lower|raise|choose|enable|disable|upgrade|rebuild|add|remove)\b)"
    r"|\b(?:must|should|needs? to|ha(?:s|ve) to) be (?:set|given|specified|provided|passed|installed|enabled|one of)\b"
    r"|\b(?:is|are|was|were) not (?:set|given|specified|provided|installed|configured|registered)\b"
    r"|\b(?:unknown|invalid|unrecognized) (?:field|option|key|setting|argument|parameter|choice)\b"
    r"|\(\w*(?:config|arguments|settings)\w*\.py:\d+\)$",
    re.I,
)
"""Matches words of an exception that refuses a setting: an option, a file of settings, what to change, or its place."""
_OF_SHELL = ("program-missing", "script-missing", "module-missing", "library-missing", "package-versions")
"""Entries whose words outside a traceback may follow from one another. Before others, the script did without them."""
_OF_KERNEL, _OF_DRIVER = ("gpu-lost", "gpu-memory-error", "node-hardware"), ("gpu-error", "device-error")
"""Entries of defects that the kernel names, and of what a program saw of them."""
_EFFECTS = (*UNLISTED, "gpu-error", "file-missing", "data-damaged", "write-failed", "checkpoint-damaged")
"""Entries whose words an earlier warning of a node or file system explains."""
_EXPLAINED = (
    ("device-assert", "device-assert"),
    ("processes", "processes"),
    ("hangup", "hangup"),
    ("node-hardware", "shared-memory"),
    ("gpu-start", "exception"),
)
"""Entries of warnings of a kernel, each with the entry of later words that it explains."""
_DEFECTS = ("UnboundLocalError", "NameError")
"""Exceptions of a program's own mistakes, which no handler is for."""
_OPEN = (*GENERAL, "gpu-error", "gpu-library")
"""Entries whose words the next lines may explain."""


def _warns_of(warning: Statement, said: Statement) -> bool:
    """Return whether a warning names the cause of later words: of a node or a file system, a network, or a kernel."""
    if (warning.name, said.name) in _EXPLAINED:
        return True
    if warning.cause in ("node", "file system"):
        return said.name in _EFFECTS
    far = said.name == "hub" or "NCCL error" in said.words
    return far and warning.name != said.name and (warning.cause == "network" or warning.name == "network-interface")


def _saw_another_go(said: Statement) -> bool:
    """Return whether the words may follow from the end of another rank: its transfers fail then."""
    return said.name == "infiniband" or "remote process exited" in said.words


def _is_passed_over(said: Statement, final: Sequence[Statement]) -> bool:
    """Return whether the program or the script went on after these words, to one of its final words."""
    optional = said.name in _OF_SHELL or (said.name == "unlisted" and said.words.startswith(("fatal: ", "error: ")))
    later = (each for each in final if each.line > said.line and each.name not in _OF_SHELL)
    return optional and not said.place and any(later)


def _explains(one: Statement, other: Statement, chained: str) -> bool:
    """Return whether the first of two chained exceptions is the cause: the second is general and was raised from it, or
    no handler can mend the first; or the handler has a defect of its own."""
    general = other.name in (*GENERAL, "")
    if one.cause == other.cause in ("node", "file system", "network") or (other.secondary and one.name == "exception"):
        return True
    if chained == "handling":
        lasting = one.cause in ("node", "file system") and (general or other.name in _EFFECTS)
        named = one.name not in (*GENERAL, "") and other.name in (*UNLISTED, *ENDS, "")
        return lasting or named or any(each.words.startswith(_DEFECTS) for each in (one, other))
    return general and one.name not in ("", "exception") and (one.name not in UNLISTED or other.name in (*UNLISTED, ""))


def _split_label(line: str) -> tuple[int | None, str]:
    """Return the rank in the labels before a line, and the line without them."""
    label = _LABEL.match(line)
    end = 0 if label is None or not label[0].strip() else label.end()
    rank = _RANK.search(re.sub(_TIME, "", line[:end])) if end else None
    return (None if rank is None else int(rank[1])), line[end:]


def _not_survived(lines: Sequence[str], found: Sequence[Statement]) -> list[Statement]:
    """Return the statements of the newest group; none if training went on after it."""
    if not found:
        return []
    said, first = {each.line for each in found}, found[0].line
    weights = (
        0 if n in said or _ASIDE.match(_split_label(line)[1]) else PROGRESS_WEIGHT if _PROGRESS.search(line) else 1
        for n, line in enumerate(lines[first:], first)
    )
    after = [*accumulate(weights)]
    newest = after[found[-1].line - first]
    went_on = after[-1] - newest >= SURVIVED
    return [each for each in found if not went_on and newest - after[each.line - first] < SURVIVED]
