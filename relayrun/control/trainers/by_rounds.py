"""Follows a foreign program whose ranks are started again inside their job: an observer for each round.

The watch calls it once a second. While a round runs its observer looks. When the coordinator has ended a round
(`rundir.hand_over`), the observer records what is left, and from then on nothing is touched here: the coordinator moves
what lies beyond the next round's start. So each record has one writer, and nothing is moved while it is recorded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from relayrun.control.logs import file_size, job_logs
from relayrun.control.rundir import hand_over
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.trainers.base import AttemptObserver


class RestartObserver:
    """The observer of whichever round there is.

    Args:
        attempt: whose rounds they are.
        begin: of the attempt.
        follow: makes the observer of a round from the begin that holds for it.
    """

    def __init__(
        self, attempt: Attempt, begin: AttemptStart, *, follow: Callable[[AttemptStart], AttemptObserver | None]
    ) -> None:
        self._attempt, self._begin, self._follow = attempt, begin, follow
        self._observer: AttemptObserver | None = None
        """None: nobody has looked since the round began, or since this process did."""

    def look(self) -> None:
        """Record what is new in a round that runs, or, once, what is left of one that is over. Raises OSError."""
        over = hand_over.pending_hand_over(self._attempt)
        if over is None:
            if (observer := self._of_round()) is not None:
                observer.look()
        elif not over.recorded:
            self.conclude(over.exit_code)
            output, log = [file_size(path) for path, _ in job_logs(self._begin)] or (0, 0)
            told = replace(over, recorded=True, log_offset=log, output_offset=output)
            told.write(self._attempt.hand_over)
            self._observer = None  # the next round has another base and another log

    def conclude(self, exit_code: int | None) -> None:
        """Record what is left of the newest round, and how the program ended if it did so on purpose.

        `exit_code`: of all ranks together; None where nobody saw it. Raises OSError.
        """
        if (observer := self._of_round()) is not None:
            observer.conclude(exit_code)

    def _of_round(self) -> AttemptObserver | None:
        if self._observer is None:
            self._observer = self._follow(hand_over.attempt_start_of_restart(self._attempt, self._begin))
        return self._observer
