"""Decisions of a chain and of its agents, as pure functions of facts: no files, no clock, no scheduler, no processes.

For a chain: an attempt that raises the durable iteration earns its successor; one that does not is a failed attempt,
and after `max_failed_attempts` in a row the chain stops. A finished run, an exit trigger, a fatal error and a cancelled
job stop it at once. Exit codes decide nothing: only the outcome of rank 0 and the durable checkpoints count.

For the ranks inside a job the same rule holds one scale smaller: a restart that brings no later state counts as
failed, and after `max_failed_restarts` in a row the attempt ends. An error that would repeat ends it at once.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from relayrun.config.sections.chain import ChainSection
from relayrun.control.rundir.records import AttemptOutcomeName, ChainEnd, ChainEndState
from relayrun.control.rundir.restarts import FailedRestart

_NUMBER = re.compile(r"0x[0-9a-fA-F]+|\d+")


@dataclass(frozen=True, kw_only=True)
class Death:
    """The end of a rank, of the server that forks a node's ranks, or of a whole node."""

    rank: int
    """-1: the server, with which all ranks of its node die; or a hang of no known rank."""
    node: str
    code: int
    """Exit code; negative: the signal that ended it."""
    error: str = ""
    """Its own last words, if any."""
    repeats: bool = False
    """Every start would meet this error, by the rank's own record."""
    lost: bool = False
    """Its node is given up."""
    sick: bool = False
    """The node is given up for its health."""
    unended: bool = False
    """The node is given up because its ranks did not end."""
    late: int | None = None
    """Rank that the others waited for in a hang."""
    noticed: float = 0.0
    """Time of the notice by the coordinator's `time.monotonic`; for a lost node about its last message."""

    @property
    def words(self) -> str:
        """Its end in a few words."""
        if self.error and (self.code >= 0 or self.rank < 0):
            return self.error
        return f"killed by {signal_name(-self.code)}" if self.code < 0 else f"ended with exit code {self.code}"

    @property
    def exit_code(self) -> int:
        """Exit code as a shell reports it: 128 + signal for a killed process."""
        return self.code if self.code >= 0 else 128 - self.code


@dataclass(frozen=True, kw_only=True)
class RestartFacts:
    """Facts about a failed restart, when none of its ranks lives any more."""

    death: Death
    """The first failure."""
    iteration: int
    """The newest recorded iteration."""
    next_iteration: int
    """Iteration from which another restart would start."""
    base_iteration: int
    """Iteration from which this restart started."""
    left: bool
    """Rank 0 has recorded its outcome."""
    asked: str
    """Reason for which the ranks were asked to leave; empty if they were not."""
    lost: str
    """Loss that cannot be replaced, in words: a node without a spare node; empty without one."""
    earlier: Sequence[FailedRestart]
    """Earlier failed restarts of this attempt, oldest first."""
    chain: ChainSection
    complete: bool = False
    """The run ends at the saved checkpoint."""


def why_no_restart(facts: RestartFacts) -> str | None:
    """Return in words why the attempt ends with this restart; None if the ranks start again."""
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
    # anybody sends SIGKILL, and a node that is given up does not come back
    killed = facts.death.lost or facts.death.code == -signal.SIGKILL
    words = "" if killed else _without_numbers(facts.death.words)
    if words and any(
        (known.iteration, _without_numbers(known.words)) == (facts.iteration, words) for known in facts.earlier
    ):
        return f"the same failure as before, at the same iteration {facts.iteration}"
    if facts.next_iteration > facts.base_iteration:
        return None
    in_a_row = takewhile(lambda known: known.next_iteration <= known.base_iteration, reversed(facts.earlier))
    failed = 1 + len(list(in_a_row))
    if failed >= facts.chain.max_failed_restarts:
        return f"{failed} restart{'s' if failed > 1 else ''} in a row without a later state to start from"
    return None


def first_death(deaths: Sequence[Death], said_at: dict[int, float]) -> Death:
    """Return the first failure among ranks that ended by themselves, in the order in which they were noticed.

    A killed rank closes its connections, and its neighbours fail in their collectives: so a killed rank comes first.
    Without one, the rank that recorded its error first does; `said_at`: time of each rank's record. A death of no rank
    (a server, a node, a hang) that was noticed first is the cause of all others; a lost node is the cause of all deaths
    after it.
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
    """Return `SIGKILL` for 9, and `signal 70` for a signal without a name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _without_numbers(words: str) -> str:
    """Remove process ids, ports and addresses, which differ each time."""
    return _NUMBER.sub("#", words)


Action = Literal["run", "stop", "continue", "retry", "end"]
"""The supervisor's next step. run: start the ranks. stop: end the chain, write STOP, leave nothing queued. continue:
the successor goes on. retry: a successor goes on after a delay. end: this job was the only one; nothing is queued."""

UNKNOWN_EXIT_CODE = -1
"""Exit code of an attempt whose end no process saw."""

BACKOFF_SECONDS = 30
WAIT_SECONDS = 300
"""First delay after a failure of a network or a file system."""
BACKOFF_CEILING_SECONDS = 1800


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, its reason, and the delay of a `retry` in seconds."""

    action: Action
    reason: str
    chain_end: ChainEndState | None = None
    """How the chain ends, if the action is `stop`; None for other actions."""
    delay: int = 0


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """Facts before the ranks of a job start."""

    stopped: ChainEnd | None
    """The content of STOP; None if the chain has not ended."""
    durable_iteration: int
    total_steps: int | None
    stop_after: int | None = None
    exit_trigger: str | None
    """User who touched triggers/exit."""
    predecessor_cancelled: bool
    """The job of the newest attempt was cancelled and could not record it."""
    verdict: ChainEnd | None
    """How the chain ends by the record of the newest attempt, which may have been killed before it wrote STOP."""
    failed_attempts: int
    """Attempts in a row so far without durable progress."""
    chain: ChainSection
    budget: str = ""
    """Sentence about the end of the chain's budget, if too little of it is left for this job; else empty."""


@dataclass(frozen=True, kw_only=True)
class EndFacts:
    """Facts after the ranks of a job have gone."""

    outcome: AttemptOutcomeName | None
    """Outcome of rank 0; None without one (crash, kill, node failure)."""
    outcome_reason: str
    exit_code: int
    hang: str | None
    """The hang for which the supervisor ended the ranks, in words."""
    cancelled: bool
    cancelled_by: str | None = None
    """User who cancelled the job, if that is known."""
    base_iteration: int
    durable_iteration: int
    total_steps: int | None
    stop_after: int | None = None
    failed_attempts: int
    """Attempts in a row before this one without durable progress."""
    chain: ChainSection
    failure: str = ""
    """The first failure in words, if it is known."""
    same_again: bool = False
    """The attempt before failed with the same error at the same place of the program."""
    waits: bool = False
    """The cause may pass, in minutes rather than seconds: a network or a file system."""
    reservation: str = ""
    """Sentence about the end of the chain's reservation or budget, if it is over or nearly so; else empty."""
    attempts_without_time: int = 0
    """Attempts in a row, with this one, that saved and left without time to train in between."""


def decide_at_start(facts: StartFacts) -> Decision:
    """Decide whether the ranks start."""
    if facts.stopped is not None:
        return _stop(facts.stopped.state, facts.stopped.reason)
    if (reason := _all_done_reason(facts)) is not None:
        return _stop("done", reason)
    if facts.exit_trigger is not None:
        return _stop("stopped", f"exit trigger by {facts.exit_trigger}, before this job began")
    if facts.predecessor_cancelled:
        return _stop("stopped", "the job before this one was cancelled")
    if facts.verdict is not None:
        return _stop(facts.verdict.state, facts.verdict.reason)
    if facts.failed_attempts >= facts.chain.max_failed_attempts:
        return _stop("failed", _too_many_failed(facts.failed_attempts))
    if facts.budget:
        return _stop("stopped", facts.budget)
    return Decision(action="run", reason=f"from iteration {facts.durable_iteration}")


def decide_at_end(facts: EndFacts) -> Decision:
    """Decide whether the successor goes on, goes on later, or must not start."""
    if facts.outcome == "done" and facts.total_steps is None:
        return _stop("done", facts.outcome_reason)
    if facts.outcome in ("done", "saved") and (all_done := _all_done_reason(facts)) is not None:
        return _stop("done", all_done)
    if facts.outcome == "exit":
        return _stop("stopped", facts.outcome_reason)
    if facts.outcome == "fatal":
        return _stop("failed", f"fatal: {facts.outcome_reason}")
    if facts.cancelled:
        return _stop("stopped", "the job was cancelled" + (f" by {facts.cancelled_by}" if facts.cancelled_by else ""))
    reason = facts.reservation or facts.hang or facts.outcome_reason or _reason_without_outcome(facts)
    if facts.reservation and facts.chain.auto_requeue:
        return _stop("stopped", reason)
    spins = facts.attempts_without_time >= facts.chain.max_failed_attempts
    if spins and facts.chain.auto_requeue:
        return _stop("failed", f"{facts.attempts_without_time} attempts in a row had no time to train; {reason}")
    if facts.durable_iteration > facts.base_iteration:
        return Decision(action="continue" if facts.chain.auto_requeue else "end", reason=reason)
    failed = facts.failed_attempts + 1
    reason = f"{reason}; no new checkpoint"
    if not facts.chain.auto_requeue:
        return Decision(action="end", reason=reason)
    if failed >= facts.chain.max_failed_attempts:
        return _stop("failed", f"{_too_many_failed(failed)}; the last: {reason}")
    if facts.same_again:
        return _stop("failed", f"the same error at the same place as in the attempt before: {reason}")
    seconds = WAIT_SECONDS if facts.waits else BACKOFF_SECONDS
    delay = min(seconds * 2 ** (failed - 1), BACKOFF_CEILING_SECONDS)
    return Decision(action="retry", reason=reason, delay=delay)


def _stop(state: ChainEndState, reason: str) -> Decision:
    return Decision(action="stop", reason=reason, chain_end=state)


def end_cause(facts: EndFacts) -> str:
    """Return the end of an attempt in one word: done, saved, exit, fatal, cancelled, hang, failed or unknown."""
    if facts.cancelled and facts.outcome in (None, "saved"):
        return "cancelled"
    if facts.outcome is not None:
        return facts.outcome
    if facts.hang is not None:
        return "hang"
    return "unknown" if facts.exit_code == UNKNOWN_EXIT_CODE else "failed"


def default_signal_seconds(grace_period: float) -> int:
    """Return the seconds for `--signal`, the backstop of rank 0's own clock. Slurm may send it up to 60 s early, so it
    comes 60 s after the grace period begins, if that is long enough."""
    return max(1, round(max(grace_period - 60, grace_period / 2)))


def done_reason(iteration: int) -> str:
    return f"the last iteration, {iteration}, is saved"


def stop_after_reason(iteration: int) -> str:
    return f"iteration {iteration} is saved, and training.stop_after ends the run there"


def _all_done_reason(facts: StartFacts | EndFacts) -> str | None:
    if facts.total_steps is not None and facts.durable_iteration >= facts.total_steps:
        return done_reason(facts.durable_iteration)
    if facts.stop_after is not None and facts.durable_iteration >= facts.stop_after:
        return stop_after_reason(facts.durable_iteration)
    return None


def _reason_without_outcome(facts: EndFacts) -> str:
    if facts.exit_code == UNKNOWN_EXIT_CODE:
        return facts.failure or "the job ended without a word"
    return f"{facts.failure or 'the ranks left no outcome'} (exit code {facts.exit_code})"


def _too_many_failed(failed: int) -> str:
    return f"{failed} attempt{'s' if failed > 1 else ''} in a row without a new checkpoint"
