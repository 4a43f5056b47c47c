"""The table of failure signatures: what a line of a log means, and whose cause it is.

All trainers, strikes, `relayrun why`, STOP and notices use this one table, `failure_signatures.json`. A line belongs to
the first entry whose pattern it matches: special entries stand before general ones. A site adds entries by
`cluster.failure_signatures`, a run by `chain.failure_signatures`; they stand before these in the plan. Standard library
only.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.config.sections.chain import FailureSignature

log = logging.getLogger(__name__)

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Each of the `patterns` is one alternative. `any_line`: the entry counts in any line, if no program says with its last
words why it ended. `secondary`: words that only report that another rank or program is gone, or was told to end."""
_SECONDARY = [re.compile(pattern, re.I) for pattern in _TABLE["secondary"]]
WARNINGS = tuple(each["name"] for each in _TABLE["entries"] if "any_line" in each)
ENDS = ("abort", "crashed", "killed", "container-start")
"""Entries that say how a program ended: another line may say why."""
UNLISTED = ("unlisted", "assertion")
"""Entries of exceptions whose kind says nothing of the cause."""
OF_NODE = ("stale-handle",)
"""Entries that count against a node, if it alone says so, besides those of the cause `node`."""
OF_ANOTHER = ("node-check", "munge")
"""Entries of defects of a node that another one reports: it is blamed only if the words name it."""
GENERAL = ("exception", "shell", *UNLISTED, *ENDS)
"""Entries without a special cause."""


@functools.cache
def _literal(pattern: str) -> str:
    """Return the longest text outside groups and classes that each match of a pattern contains."""
    text = re.sub(r"\\.|\[[^]]*\]", "\n", pattern)
    while text != (inner := re.sub(r"\([^()]*\)", "\n", text)):
        text = inner
    return max(re.split(r".?(?:[?*]|\{\d+,?\d*\})|[\n.^$+]", text, flags=re.S), key=len)


@functools.cache
def signatures() -> list[tuple[re.Pattern[str], FailureSignature]]:
    """Return the compiled patterns of relayrun's own entries, each with its entry."""
    found = []
    for each in _TABLE["entries"]:
        fields = {name: value for name, value in each.items() if name not in ("patterns", "any_line")}
        known = FailureSignature(pattern="|".join(each["patterns"]), **fields)
        found += [(re.compile(pattern), known) for pattern in each["patterns"]]
    return found


_MASK = str.maketrans("123456789", "000000000")


def line_kinds(lines: Sequence[str]) -> list[str]:
    """Return each line with zeros for its digits: equal for lines that differ in numbers alone."""
    return "\n".join(lines).translate(_MASK).split("\n") if lines else []


@dataclass(frozen=True)
class SignatureTable:
    """The entries by which words are judged: those of a site or a run come first."""

    more: Sequence[FailureSignature] = ()
    own: Sequence[tuple[re.Pattern[str], FailureSignature]] = field(default_factory=signatures)
    secondary: Sequence[re.Pattern[str]] = tuple(_SECONDARY)

    @classmethod
    def of_lines(cls, lines: Sequence[str], more: Sequence[FailureSignature]) -> SignatureTable:
        """Return a table without the patterns that no line of a log can match: their longest text is not in it. Lines
        that differ in numbers alone are looked through once."""
        kinds = "\n".join({*line_kinds(lines)})
        own = [found for found in signatures() if _literal(found[0].pattern).translate(_MASK) in kinds]
        # these match in lower and in title case
        return cls(more, own, [each for each in _SECONDARY if _literal(each.pattern)[1:].translate(_MASK) in kinds])

    def texts(self) -> set[str]:
        """Return parts of words of which every line outside a traceback that means something holds one. A pattern
        without any, a bare name of an exception, counts in a traceback alone."""
        of_own = {_literal(pattern.pattern) for pattern, _ in self.own}
        return (of_own | {_literal(each.pattern)[1:] for each in self.secondary}) - {""}

    def classify(self, words: str) -> FailureSignature | None:
        """Return the entry of a line of words; None if no entry matches."""
        of_site = (each for each in self.more if each not in _too_slow and _matches(each, words))
        # a pattern's own text is found sooner than the pattern
        likely = (known for known in self.own if _literal(known[0].pattern) in words)
        return next(of_site, None) or next((each for pattern, each in likely if pattern.search(words)), None)

    def is_secondary(self, words: str, known: FailureSignature | None) -> bool:
        """Return whether words only report that another rank is gone, or that it was told to end. `known`: their
        entry."""
        general = known is None or known.name in GENERAL or "Error: Caught " in words
        return general and any(each.search(words) for each in self.secondary)


def classify(words: str, more: Sequence[FailureSignature] = ()) -> FailureSignature | None:
    """Return the entry of a line of words, `more` of a site or a run first; None if no entry matches."""
    return SignatureTable(more).classify(words)


PATTERN_SECONDS = 1.0
"""Processor time after which a pattern of a site or a run is too slow for a line, and counts no more."""
_too_slow: set[FailureSignature] = set()


def _matches(each: FailureSignature, words: str) -> bool:
    try:
        with time_limited(PATTERN_SECONDS):
            return re.search(each.pattern, words) is not None
    except TimeoutError:
        log.warning("the entry %s of the table of failures counts no more: its pattern is too slow", each.name)
        _too_slow.add(each)
        return False


@contextlib.contextmanager
def time_limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside after this processor time of the process. Only a signal ends a search. Outside the
    main thread, where Python receives no signals, there is no limit."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGVTALRM, interrupt)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def entry(name: str, more: Sequence[FailureSignature] = ()) -> FailureSignature:
    """Return the entry of this name; the most general one if there is none."""
    known = [*more, *(each for _, each in signatures())]
    return next((each for each in known if each.name == name), known[-1])


def cause_words(name: str, more: Sequence[FailureSignature] = ()) -> str:
    """Return the meaning of an entry, whose cause it is and what to do next, in one line; empty without an entry."""
    known = entry(name, more)
    words = f"{known.meaning} ({known.name}; whose: {known.cause}); next: {known.advice}"
    return words if known.name == name else ""


def is_secondary_error(words: str, more: Sequence[FailureSignature] = ()) -> bool:
    """True if words only report that another rank is gone, or that it was told to end."""
    return SignatureTable(more).is_secondary(words, classify(words, more))
