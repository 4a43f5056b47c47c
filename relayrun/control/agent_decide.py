"""Whether the ranks are started again inside the job, as pure functions of facts: no files, no clock, no processes.

The law is the chain's, one scale smaller: a round that brings no later state to start from (a checkpoint, or copies in
memory) counts, and after `max_failed_rounds` of them in a row the attempt ends as it would without rounds. An error
that would come again, or has come twice at the same iteration, ends it at once. SIGKILL says nothing of its cause, so
it counts by that law alone.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from relayrun.control.rundir.rounds import FailedRestart

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a rank, of the server that forks a node's ranks, with which they all die, or of a whole node."""

    rank: int
    """-1: the server; or nobody in particular, where nothing moved any more."""
    node: str
    code: int
    """Its exit code; negative: the signal that ended it."""
    error: str = ""
    """Its own last words, if it left some."""
    repeats: bool = False
    """Every start of it would meet that error, says the rank."""
    lost: bool = False
    """Its node is given up."""
    sick: bool = False
    """For its health."""
    unended: bool = False
    """For its ranks, which did not end."""
    late: int | None = None
    """Nothing moved any more, and the others waited for this rank."""
    noticed: float = 0.0
    """When, by the coordinator's `time.monotonic`; of a lost node about when it was last heard."""

    @property
    def words(self) -> str:
        """How it ended, in a few words."""
        if self.error and (self.code >= 0 or self.rank < 0):
            return self.error
        return f"killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"

    @property
    def exit_code(self) -> int:
        """As a shell reports it: 128 and the signal's number for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True, kw_only=True)
class RestartFacts:
    """What is known of a round that has failed, when none of its ranks lives any more."""

    death: Death
    """Who failed first."""
    iteration: int
    """The newest one on record."""
    next_iteration: int
    """From which another round would start."""
    base_iteration: int
    """From which the round started."""
    left: bool
    """Rank 0 has said how it leaves."""
    asked: str
    """Why the ranks were asked to leave, in words; empty where they were not."""
    lost: str
    """What is gone and cannot be replaced, in words: a node, where no spare one is left; empty where nothing is."""
    earlier: Sequence[FailedRestart]
    """The failed rounds of this attempt before this one, oldest first."""
    max_failed_rounds: int
    complete: bool = False
    """Nothing is left to train behind what is saved."""


def why_no_restart(facts: RestartFacts) -> str | None:
    """Why the attempt ends with this round, in words; None where the ranks are to be started again."""
    if facts.left:
        return "rank 0 had said how it leaves"
    if facts.complete:
        return f"iteration {facts.next_iteration} is the last one, and it is saved"
    if facts.asked:
        return f"the ranks had been asked to leave ({facts.asked})"
    if facts.lost:
        return facts.lost
    if facts.death.repeats:
        return "every start would meet this error"
    words = failure_signature(facts.death)
    if words and any(
        (known.iteration, _without_numbers(known.words)) == (facts.iteration, words) for known in facts.earlier
    ):
        return f"the same failure as before, at the same iteration {facts.iteration}"
    if facts.next_iteration > facts.base_iteration:
        return None
    failed = 1 + failed_restarts_in_a_row(facts.earlier)
    if failed >= facts.max_failed_rounds:
        return f"{failed} round{'s' if failed > 1 else ''} in a row without a later state to start from"
    return None


def failed_restarts_in_a_row(earlier: Sequence[FailedRestart]) -> int:
    """How many of the newest rounds brought no later state to start from."""
    return sum(1 for _ in takewhile(lambda known: known.next_iteration <= known.base_iteration, reversed(earlier)))


def failure_signature(death: Death) -> str:
    """Words by which the same failure is known again, without their numbers.

    Empty for SIGKILL, which anybody sends, and for a node that is given up: it does not come back.
    """
    return "" if death.lost or death.code == -signal.SIGKILL else _without_numbers(death.words)


def first_death(deaths: Sequence[Death], said_at: dict[int, float]) -> Death:
    """Who failed first, of ranks that ended by themselves, in the order in which their ends were noticed.

    A rank that is killed closes its connections, and its neighbours fail in their collectives: so a killed one comes
    first. Where none was, it is the one that wrote down its error first; `said_at`: when each rank did so. What is no
    rank's own end, and was noticed first, is the cause of all others; a lost node is that of all behind it.
    """
    if deaths[0].rank < 0:
        return deaths[0]
    deaths = list(takewhile(lambda death: not death.lost, deaths))
    killed = [death for death in deaths if death.code < 0]
    if killed:
        return killed[0]
    said = sorted((death for death in deaths if death.rank in said_at), key=lambda death: said_at[death.rank])
    return said[0] if said else deaths[0]


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; `signal 70` for one without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _without_numbers(words: str) -> str:
    """Words without process ids, ports and addresses, which differ each time."""
    return _NUMBER.sub("#", words)
