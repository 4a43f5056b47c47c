"""A running attempt as lines on a terminal: one every few seconds."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

from relayrun.control.rundir.run import Run


class ProgressFollower:
    """Prints where a run stands. `poll` may be called as often as one likes."""

    def __init__(self, run: Run, *, total_steps: int | None, seconds: float = 10.0) -> None:
        self._run = run
        self._total = total_steps
        self._seconds = seconds
        self._attempt = 0
        self._offset = 0
        self._next = 0.0

    def poll(self) -> None:
        """Print a line if there is something new and the last one was long enough ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._seconds
        lines = self._new_lines()
        steps = [line for line in lines if not line.keys() & {"validation", "rewind", "round"}]
        if steps:
            last = steps[-1]
            speeds = [line["tokens_per_second"] for line in steps if "tokens_per_second" in line]
            speed = f"  {sum(speeds) / len(speeds):,.0f} tokens/s" if speeds else ""
            of = f"/{self._total}" if self._total else ""
            loss = f"  loss {last['loss']:.3f}" if "loss" in last else ""  # a foreign program need not say it
            print(
                f"{time.strftime('%H:%M:%S')} attempt {self._attempt}  iteration {last['iteration']}{of}{loss}{speed}",
                file=sys.stderr,
                flush=True,
            )

    def _new_lines(self) -> list[dict[str, Any]]:
        """Whole lines of the newest attempt since the last call."""
        newest = max(self._run.attempt_numbers(), default=0)
        if newest != self._attempt:
            self._attempt, self._offset = newest, 0
        try:
            with open(self._run.attempt(newest).metrics, "rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        found = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError):  # what a rank left that was killed, before a new round went on
                found.append(json.loads(line))
        return found
