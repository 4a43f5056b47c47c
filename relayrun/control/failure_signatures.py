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
from pathlib import Path
from typing import Any

from relayrun.config.sections.chain import FailureSignature

log = logging.getLogger(__name__)

_TABLE: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
"""Each of the `patterns` is one alternative. `any_line`: the entry counts in any line, if no program says with its last
words why it ended. `secondary`: words that only report that another rank or program is gone, or was told to end."""
_SECONDARY = re.compile("|".join(_TABLE["secondary"]), re.I)
WARNINGS = tuple(each["name"] for each in _TABLE["entries"] if "any_line" in each)
ENDS = ("abort", "crashed", "killed", "container-start")
"""Entries that say how a program ended: another line may say why."""
UNLISTED = ("unlisted", "assertion")
"""Entries of exceptions whose kind says nothing of the cause."""
OF_NODE = ("stale-handle",)
"""Entries that count against a node, if it alone says so, besides those of the cause `node`."""
GENERAL = ("exception", "shell", *UNLISTED, *ENDS)
"""Entries without a special cause."""


def _entry(values: dict[str, Any]) -> FailureSignature:
    fields = {name: value for name, value in values.items() if name not in ("patterns", "any_line")}
    return FailureSignature(pattern="|".join(values["patterns"]), **fields)


def literals() -> list[str]:
    """Return parts of words of which every line outside a traceback that means something holds one: the longest text
    that each pattern needs. A pattern without any, a bare name of an exception, counts in a traceback alone."""
    found = {_literal(pattern) for each in _TABLE["entries"] for pattern in each["patterns"]}
    found |= {_literal(pattern)[1:] for pattern in _TABLE["secondary"]}  # these match in lower and in title case
    short: list[str] = []
    for text in sorted(found - {""}, key=len):
        short += [] if any(other in text for other in short) else [text]
    return short


def _literal(pattern: str) -> str:
    """Return the longest text outside groups and classes that each match of a pattern contains."""
    text = re.sub(r"\\.|\[[^]]*\]", "\n", pattern)
    while text != (inner := re.sub(r"\([^()]*\)", "\n", text)):
        text = inner
    return max(re.split(r".?[?*]|[\n.^$+]", text, flags=re.S), key=len)


@functools.cache
def signatures() -> list[tuple[re.Pattern[str], FailureSignature]]:
    """Return relayrun's own entries with their compiled patterns."""
    return [(re.compile(each.pattern), each) for each in map(_entry, _TABLE["entries"])]


def classify(words: str, more: Sequence[FailureSignature] = ()) -> FailureSignature | None:
    """Return the entry of a line of words, `more` of a site or a run first; None if no entry matches."""
    if found := next((each for each in more if each not in _too_slow and _matches(each, words)), None):
        return found
    return next((each for pattern, each in signatures() if pattern.search(words)), None)


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
    known = _SECONDARY.search(words) is not None
    return known and ((found := classify(words, more)) is None or found.name in GENERAL)
