"""How tests wait for what happens beside them: one loop, always with a limit."""

from __future__ import annotations

import subprocess
import threading
from collections.abc import Callable
from time import monotonic, sleep  # bound here: a test may put its own clock into the module
from typing import IO, AnyStr, TypeVar

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T],
    seconds: float = 300.0,
    *,
    step: float = 0.02,
    words: str | Callable[[], object] = "",
) -> T:
    """What `condition` returns as soon as it is true; it is asked every `step` seconds.

    Raises AssertionError after `seconds`, with `words`: what was waited for, or a function that gives the state or a
    log. A condition that cannot come true any more asserts so itself, and ends the wait at once.
    """
    end = monotonic() + seconds
    while not (found := condition()):
        if monotonic() > end:
            said = words() if callable(words) else words
            raise AssertionError(f"did not happen within {seconds:g} s: {said or condition}")
        sleep(step)
    return found


def read_line(process: subprocess.Popen[AnyStr], stream: IO[AnyStr] | None = None, seconds: float = 300.0) -> AnyStr:
    """The next line of a program's standard output, or of `stream`; a program that says none in `seconds` is killed."""
    stream = stream or process.stdout
    assert stream is not None
    limit = threading.Timer(seconds, process.kill)
    limit.start()
    try:
        return stream.readline()
    finally:
        limit.cancel()
