"""What a chain does next, as pure functions of facts: no files, no clock, no scheduler.

The law: an attempt that raises the durable iteration earns its successor. One that does not is a failed
attempt; after `max_failed_attempts` in a row the chain stops. A finished run, an exit trigger, a fatal
error and a cancelled job stop it at once. Exit codes decide nothing: only what rank 0 left and what is
durable count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from relayrun.control.rundir.records import AttemptOutcomeName
from relayrun.control.trainers.base import ENDED_BY_ITSELF

Action = Literal["run", "stop", "continue", "retry", "end"]
"""What the supervisor does next.

run         start the ranks
stop        end the chain, write STOP, leave nothing queued
continue    the successor goes on
retry       a successor goes on after a delay
end         this job was the only one; nothing is queued
"""

UNKNOWN_EXIT_CODE = -1
"""The exit code of an attempt whose end nobody saw."""

BACKOFF_SECONDS = 30
BACKOFF_CEILING_SECONDS = 1800


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What to do, why, and for `retry` after how many seconds."""

    action: Action
    reason: str
    delay: int = 0


@dataclass(frozen=True, kw_only=True)
class StartFacts:
    """What is known before the ranks of a job start."""

    stopped: str | None
    """The reason in STOP, where the chain was stopped."""
    durable_iteration: int
    total_steps: int | None
    stop_after: int | None = None
    exit_trigger: str | None
    """Who touched triggers/exit."""
    predecessor_cancelled: bool
    """The job of the newest attempt was cancelled and could not record it."""
    verdict: str | None
    """Why the newest attempt decided that the chain ends, where it could not write STOP any more."""
    failed_attempts: int
    """Attempts in a row, up to now, without durable progress."""
    max_failed_attempts: int


@dataclass(frozen=True, kw_only=True)
class EndFacts:
    """What is known after the ranks of a job have gone."""

    outcome: AttemptOutcomeName | None
    """What rank 0 left; None where it left nothing (crash, kill, node failure)."""
    outcome_reason: str
    exit_code: int
    hang: str | None
    """Where the supervisor ended the ranks because nothing moved any more."""
    cancelled: bool
    base_iteration: int
    durable_iteration: int
    total_steps: int | None
    stop_after: int | None = None
    failed_attempts: int
    """Attempts in a row before this one without durable progress."""
    max_failed_attempts: int
    auto_requeue: bool
    failure: str = ""
    """Who failed first and how, in words, where that is known."""
    reservation: str = ""
    """That the reservation which the chain's jobs ask for has ended or is about to, in words; empty otherwise."""


def decide_at_start(facts: StartFacts) -> Decision:
    """Whether to start the ranks."""
    if facts.stopped is not None:
        return Decision(action="stop", reason=facts.stopped)
    if (reason := _all_done_reason(facts)) is not None:
        return Decision(action="stop", reason=reason)
    if facts.exit_trigger is not None:
        return Decision(action="stop", reason=f"exit trigger by {facts.exit_trigger}, before this job began")
    if facts.predecessor_cancelled:
        return Decision(action="stop", reason="the job before this one was cancelled")
    if facts.verdict is not None:
        return Decision(action="stop", reason=facts.verdict)
    if facts.failed_attempts >= facts.max_failed_attempts:
        return Decision(action="stop", reason=_too_many_failed(facts.failed_attempts))
    return Decision(action="run", reason=f"from iteration {facts.durable_iteration}")


def decide_at_end(facts: EndFacts) -> Decision:
    """Whether the successor goes on, goes on later, or must not start."""
    if facts.outcome == "done" and facts.total_steps is None:
        return Decision(action="stop", reason=facts.outcome_reason)
    if facts.outcome in ("done", "saved") and (all_done := _all_done_reason(facts)) is not None:
        return Decision(action="stop", reason=all_done)
    if facts.outcome == "exit":
        return Decision(action="stop", reason=facts.outcome_reason)
    if facts.outcome == "fatal":
        return Decision(action="stop", reason=f"fatal: {facts.outcome_reason}")
    if facts.cancelled:
        return Decision(action="stop", reason="the job was cancelled")
    reason = facts.reservation or facts.hang or facts.outcome_reason or _reason_without_outcome(facts)
    if facts.reservation and facts.auto_requeue:
        return Decision(action="stop", reason=reason)
    if facts.durable_iteration > facts.base_iteration:
        return Decision(action="continue" if facts.auto_requeue else "end", reason=reason)
    failed = facts.failed_attempts + 1
    reason = f"{reason}; no new durable iteration"
    if not facts.auto_requeue:
        return Decision(action="end", reason=reason)
    if failed >= facts.max_failed_attempts:
        return Decision(action="stop", reason=f"{_too_many_failed(failed)}; the last: {reason}")
    delay = min(BACKOFF_SECONDS * 2 ** (failed - 1), BACKOFF_CEILING_SECONDS)
    return Decision(action="retry", reason=reason, delay=delay)


def end_cause(facts: EndFacts) -> str:
    """The end of an attempt in one word: done, saved, exit, fatal, cancelled, hang, failed or unknown."""
    if facts.cancelled and facts.outcome in (None, "saved"):
        return "cancelled"
    if facts.outcome is not None:
        return facts.outcome
    if facts.hang is not None:
        return "hang"
    return "unknown" if facts.exit_code == UNKNOWN_EXIT_CODE else "failed"


def default_signal_seconds(lead: float) -> int:
    """Seconds for `--signal`, the backstop of rank 0's own clock.

    Slurm may send it up to 60 s early, so it is set 60 s later than the deadline inside, where there is room.
    """
    return max(1, round(max(lead - 60, lead / 2)))


def done_reason(iteration: int) -> str:
    """The reason of a chain that has done all it was asked for."""
    return f"the last iteration, {iteration}, is durable"


def stop_after_reason(iteration: int) -> str:
    """The reason of a chain that went as far as `training.stop_after` asks."""
    return f"iteration {iteration} is durable, and training.stop_after ends the run there"


def is_done_reason(reason: str) -> bool:
    """Whether a chain that ended for this reason has done all it was asked for."""
    words = (done_reason(0), stop_after_reason(0))
    return reason == ENDED_BY_ITSELF or any(re.fullmatch(text.replace("0", r"\d+"), reason) for text in words)


def _all_done_reason(facts: StartFacts | EndFacts) -> str | None:
    """Why nothing is left to do; None where something is."""
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
    return f"{failed} attempt{'s' if failed > 1 else ''} in a row without a new durable iteration"
