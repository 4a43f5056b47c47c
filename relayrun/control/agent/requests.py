"""Requests to the ranks of an attempt: one process looks for them, and ranks are told without files.

    attempts/N/stop, triggers/exit, triggers/save  →  coordinator, once a second
                                                   →  the agent of rank 0's node  →  a mark in its memory  →  rank 0

The mark says that there is *no* request, and holds for seconds. Without it rank 0 looks at the files itself, and it
also does so to answer a request. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from relayrun.control.rundir import triggers
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import Hang
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError

LOOK_SECONDS = 1.0
"""Seconds between two looks of one process at the files."""
MARK_VALID_SECONDS = 10.0
"""Seconds for which a mark counts: the coordinator may stand still."""


class Requests:
    """The coordinator's look at files of the run directory that others leave there.

    Args:
        of_ranks: look for requests to ranks as well; those of a foreign program do not use them.
        say: writes a line into the job's log.
    """

    def __init__(self, run: Run, attempt: Attempt, *, of_ranks: bool, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._of_ranks, self._say = run, attempt, of_ranks, say
        self._looked: float | None = None
        self._complaint = ""
        self.hang: Hang | None = None
        """The supervisor's record of a hang, at the last look."""
        self.asked = of_ranks
        """The ranks may have a request."""

    def look(self) -> bool:
        """Look, at most every LOOK_SECONDS; return whether it was time for a look."""
        now = time.monotonic()
        if self._looked is not None and now - self._looked < LOOK_SECONDS:
            return False
        self._looked, self.hang = now, None
        with contextlib.suppress(OSError, RunDirError):  # it is looked for again soon
            self.hang = Hang.read(self._attempt.hang)
        if self._of_ranks:
            self._look_for_ranks()
        return True

    def _look_for_ranks(self) -> None:
        complaint = ""
        try:
            self.asked = self._attempt.stop.exists() or any(
                triggers.is_trigger_touched(self._run, one) for one in triggers.TRIGGER_NAMES
            )
        except OSError as error:  # ranks see for themselves
            self.asked, complaint = True, str(error)
        if complaint not in ("", self._complaint):
            self._say(f"could not look for stop and triggers: {complaint}")
        self._complaint = complaint


def tell_ranks(folder: Path, *, asked: bool) -> None:
    """Tell the ranks of this node whether they have a request. `folder`: of their agent."""
    mark = _mark(folder)
    with contextlib.suppress(OSError):  # without a mark ranks look at the files
        if asked:
            mark.unlink(missing_ok=True)
            return
        now = time.monotonic()  # of the whole node, and nobody sets it
        mark.touch(0o600)
        os.utime(mark, (now, now))


def nothing_asked(folder: Path) -> bool:
    """Return whether the agent of this node reported a moment ago that ranks have no request."""
    try:
        return time.monotonic() - os.stat(_mark(folder)).st_mtime < MARK_VALID_SECONDS
    except OSError:
        return False


def _mark(folder: Path) -> Path:
    return folder / "nothing-asked"
