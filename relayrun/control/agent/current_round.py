"""What the coordinator knows of the newest round, and what it puts on record of it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from relayrun.control.agent.heard import AGENT_BEAT_SECONDS
from relayrun.control.agent.lines import Message
from relayrun.control.agent.memory_copies import NodeMemoryCopy
from relayrun.control.agent_decide import Death, RestartFacts, first_death, why_no_restart
from relayrun.control.rundir import rounds
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.records import RankFailure
from relayrun.control.rundir.rounds import FailedRestart

START_PHASES = ("process", "initialised", "loaded")
"""What rank 0 says of its start, as in `rundir.records.Started`: its program began, groups and model are made, the
checkpoint is in place."""


@dataclass(kw_only=True)
class CurrentRestart:
    """A round of an attempt; number 0 before the first one. Times are seconds since 1970."""

    base: int
    """The iteration from which it started."""
    number: int = 0
    source: str = "disk"
    """Where its state is from: `disk`, `memory` or `neighbour`."""
    given_out: float = 0.0
    failed_before: float = 0.0
    """When the first failure of the round before was noticed; `over_before`: when none of its ranks was left."""
    over_before: float = 0.0
    started: Message = field(default_factory=dict)
    """Rank 0's times of its start."""
    stepped: bool = False
    """It has done a step, or is the first one, or over."""
    deaths: list[Death] = field(default_factory=list)
    noticed: float = 0.0
    """When its first failure was noticed."""
    told_to_end: float = 0.0
    """When its ranks were to be ended, by `time.monotonic`."""
    ended: set[int] = field(default_factory=set)
    """Nodes on which none of its ranks is left."""
    over: float = 0.0
    """When that was so of all."""
    memory: dict[int, list[NodeMemoryCopy]] = field(default_factory=dict)
    """The copies in the memory of each node."""

    def following(self, *, base: int, source: str, given_out: float) -> CurrentRestart:
        """The next round."""
        return CurrentRestart(
            number=self.number + 1,
            base=base,
            source=source,
            given_out=given_out,
            failed_before=self.noticed,
            over_before=self.over,
            stepped=self.number == 0,
        )

    def died(self, death: Death) -> None:
        """Note the end of a rank, or of what is the end of several, as it is noticed."""
        self.deaths.append(replace(death, noticed=time.monotonic()))

    def lost(self, death: Death, *, last_word: float) -> None:
        """Note the loss of a node of which nothing was heard since `last_word`, by `time.monotonic`.

        It comes before what others died of since then: they may say no more than that a connection is closed. A rank
        that died before, or on that node itself, did so by itself.
        """
        since = last_word - AGENT_BEAT_SECONDS  # words of different agents are heard in any order
        before = [known.node == death.node or known.noticed <= since for known in self.deaths]
        at = len(before) - before[::-1].index(True) if any(before) else 0
        self.deaths.insert(at, replace(death, noticed=since))

    def copies(self, nodes: Collection[int]) -> list[NodeMemoryCopy]:
        """The copies in the memory of these nodes."""
        return [copy for node, copies in self.memory.items() if node in nodes for copy in copies]

    def first_death(self, attempt: Attempt) -> Death:
        """Who failed first, with its own last words."""
        found = [RankFailure.read(path) for path in attempt.failures.glob("rank-*.json")]
        failures = {failure.rank: failure for failure in found if failure is not None}
        first = first_death(self.deaths, {rank: failure.time for rank, failure in failures.items()})
        own = failures.get(first.rank)
        return first if own is None else replace(first, error=" ".join(own.error.split()), repeats=own.repeats)

    def judged(
        self,
        attempt: Attempt,
        death: Death,
        *,
        durable: int,
        start: int,
        source: str,
        lost: Mapping[str, str],
        why_none: str,
        fewer: int,
        asked: str,
        max_failed_rounds: int,
        complete: bool,
    ) -> FailedRestart:
        """The record of this round, which has failed, and whether another one begins.

        Args:
            death: who failed first.
            durable: the newest whole checkpoint's iteration.
            start: the iteration from which another round would start, and `source` where it has that from.
            lost: nodes that were given up, each with the one that takes its place.
            why_none: why there can be no other round, in words; empty where there can be one.
            fewer: how many nodes another round has, where it has fewer; else 0.
            asked: why the ranks were asked to leave.
            complete: nothing is left to train.
        """
        iteration = rounds.newest_recorded_iteration(attempt)
        terminated = "SIGTERM" if death.code == -signal.SIGTERM else ""  # before it could heed it
        facts = RestartFacts(
            death=death,
            iteration=iteration,
            next_iteration=start,
            base_iteration=self.base,
            left=attempt.outcome.exists(),
            asked=asked or ("the stop file" if attempt.stop.exists() else "") or terminated,
            lost=why_none,
            earlier=rounds.read_failed_restarts(attempt),
            max_failed_rounds=max_failed_rounds,
            complete=complete,
        )
        reason = why_no_restart(facts)
        begin = attempt.read_begin()
        return FailedRestart(
            round=self.number,
            time=self.noticed,
            rank=death.rank if death.rank >= 0 else death.late,
            node=death.node,
            words=death.words,
            iteration=iteration,
            base_iteration=self.base,
            durable_iteration=durable,
            next_iteration=start,
            source=source,
            again=reason is None,
            reason=reason or "",
            steps_lost=max(0, iteration - start),
            lost=dict(lost),
            nodes=fewer if reason is None else 0,
            log_size=_log_size(None if begin is None else begin.log),
            seconds={"end": self.over - self.noticed},
        )

    def first_step(self, attempt: Attempt, stepped: float) -> dict[str, Any]:
        """Its first step was done at `stepped`: return what getting back took, for the record of the round before.

        That is `seconds`, and what differs where the round did not start from what it was given.
        """
        self.stepped = True
        parts = (
            [float(self.started[name]) for name in START_PHASES] if self.started else []
        )  # a foreign program says none
        times = [self.given_out, *parts, stepped]
        names = ("fork", "groups", "load", "step") if parts else ("step",)
        seconds = {name: later - earlier for name, earlier, later in zip(names, times, times[1:], strict=False)}
        seconds |= {"records": self.given_out - self.over_before, "all": stepped - self.failed_before}
        source, reached = self.started.get("source", "disk"), int(self.started.get("iteration", self.base))
        if (reached, source) == (self.base, self.source):
            return {"seconds": seconds}
        lost = (
            rounds.read_failed_restarts(attempt)[-1].iteration - reached
        )  # copies that were not whole, or a damaged checkpoint
        self.base, self.source = reached, source
        return {"seconds": seconds, "source": source, "next_iteration": reached, "steps_lost": lost}


def _log_size(log: str | None) -> int:
    try:
        return 0 if log is None else os.path.getsize(log)
    except OSError:
        return 0
