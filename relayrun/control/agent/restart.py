"""A restart of the ranks inside a job: its facts, its record, and the preparation of the next restart.

If the ranks belong to a foreign program, which writes no records itself, the coordinator first waits until the log
is complete and the watch has recorded it, and then moves what lies beyond the next start (`ForeignRestart`).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from relayrun.config.sections.chain import ChainSection
from relayrun.control.agent.job_nodes import AGENT_BEAT_SECONDS, NodeRanks
from relayrun.control.agent.memory_copies import NodeMemoryCopy, newest_complete_copy
from relayrun.control.agent.messages import Message
from relayrun.control.decisions import Death, RestartFacts, first_death, why_no_restart
from relayrun.control.job_log import LogFollower, file_size, job_logs
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptStart, RankFailure
from relayrun.control.rundir.restarts import FailedRestart, RestartBase, RestartHandOver
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.base import Trainer
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RunDirError
from relayrun.files import read_lines

RECORD_PAUSE = 0.1
"""Seconds between two looks while the watch is waited for."""
LOG_COMPLETE_SECONDS = 10.0
"""How long the words of the agents may take into the log; a lost node's never come."""
WATCH_RECORD_SECONDS = 60.0
"""How long the watch may take to record what a restart left; it is started again where it is killed."""


def ranks_gone_line(number: int) -> str:
    """What an agent says when no rank of restart `number` is left on its node."""
    return f"restart {number}: no rank is left here"


def foreign_restart_of(
    run: Run, plan: Plan, attempt: Attempt, begin: AttemptStart, *, say: Callable[[str], None]
) -> ForeignRestart | None:
    """Return the work between two restarts of this run; None if its ranks write their records themselves."""
    if plan.trainer == "native":
        return None
    last = min((step for step in (plan.total_steps, plan.stop_after) if step is not None), default=None)
    return ForeignRestart(attempt, begin, trainer_of(plan, run), last=last, say=say)


class ForeignRestart:
    """The records and files of a foreign program, between its restarts.

    Args:
        trainer: makes the program start from the next restart's base.
        last: the last iteration of the run; None: the program knows itself.
        say: writes a line into the job's log.
    """

    def __init__(
        self, attempt: Attempt, begin: AttemptStart, trainer: Trainer, *, last: int | None, say: Callable[[str], None]
    ) -> None:
        self._attempt, self._begin, self._trainer, self._say = attempt, begin, trainer, say
        self._last = last
        self._logs: list[tuple[LogFollower, set[str]]] = []
        """What has been written since the restart was ended, and whose last words were found in it."""
        self._since = 0.0
        self._asked: RestartHandOver | None = None

    def ended(self) -> None:
        """The agents are told to end a restart: from here on their words are looked for."""
        self._logs = [(LogFollower(path, offset=file_size(path)), set()) for path, _ in job_logs(self._begin)]
        self._asked, self._since = None, time.monotonic()

    def recorded(self, number: int, *, exit_code: int, nodes: Collection[str]) -> bool:
        """Return whether all that restart `number` left is on record; ask again soon where not.

        No rank lives. `nodes`: those whose agents have said so. Raises OSError, and RunDirError where nobody records.
        """
        if self._asked is None:
            if not self._log_is_whole(number, nodes):
                return False
            self._asked = RestartHandOver(restart=number, exit_code=exit_code)
            self._asked.write(self._attempt.hand_over)
            self._since = time.monotonic()
        found = restarts.pending_hand_over(self._attempt)
        if found is not None and found.restart == number and found.recorded:
            self._asked = found
            return True
        if time.monotonic() - self._since > WATCH_RECORD_SECONDS:
            raise RunDirError(
                f"the watch has not recorded for {WATCH_RECORD_SECONDS:.0f} s what restart {number} left",
                where=self._attempt.hand_over,
            )
        return False

    def _log_is_whole(self, number: int, nodes: Collection[str]) -> bool:
        wanted = {node: f" {node}] {ranks_gone_line(number)}" for node in nodes}
        for lines, found in self._logs:
            for line in lines.read():
                found |= {node for node, words in wanted.items() if words in line}
        missing = sorted({node for _, found in self._logs for node in wanted.keys() - found})
        if missing and time.monotonic() - self._since > LOG_COMPLETE_SECONDS:
            self._say(
                f"the last words of {', '.join(missing)} are not in the log; what else its ranks said may be lost"
            )
            return True
        return not missing

    def complete(self, base: ResumePoint) -> bool:
        """Whether nothing is left to train behind this checkpoint."""
        return self._last is not None and base.iteration >= self._last

    def prepare(self, base: ResumePoint, *, number: int) -> list[str]:
        """Make the program start from `base` alone in restart `number`; return what was done, in words.

        The restart's start goes on record first: whoever concludes the attempt from here on must not take words of the
        restart before for its own.
        """
        assert self._asked is not None
        RestartBase(
            restart=number,
            base_iteration=base.iteration,
            base_path=base.path,
            log_offset=self._asked.log_offset,
            output_offset=self._asked.output_offset,
            commits=sum(1 for _ in read_lines(self._attempt.commits)),
        ).write(self._attempt.restart_base)
        return self._trainer.prepare(base, attempt=self._attempt.number)

    def go_on(self) -> None:
        """Let the watch follow the next restart."""
        self._attempt.hand_over.unlink(missing_ok=True)

    def first_step(self, *, after: int) -> float | None:
        """When the program was seen to have done an iteration behind `after`, in seconds since 1970; None: not yet."""
        for line in self._attempt.metrics_backwards():
            if "restart" not in line and int(line.get("iteration", 0)) > after:
                return float(line["time"])
            break
        return None


START_PHASES = ("process", "initialised", "loaded")
"""What rank 0 says of its start, as in `rundir.records.StartTimes`: its program began, groups and model are made, the
checkpoint is in place."""


@dataclass(kw_only=True)
class CurrentRestart:
    """A restart of an attempt; number 0 before the first one. Times are seconds since 1970."""

    base: int
    """The iteration from which it started."""
    number: int = 0
    source: str = "disk"
    """Where its state is from: `disk`, `memory` or `neighbour`."""
    given_out: float = 0.0
    failed_before: float = 0.0
    """When the first failure of the restart before was noticed; `over_before`: when none of its ranks was left."""
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
        """The next restart."""
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
        chain: ChainSection,
        complete: bool,
    ) -> FailedRestart:
        """The record of this restart, which has failed, and whether another one begins.

        Args:
            death: who failed first.
            durable: the newest whole checkpoint's iteration.
            start: the iteration from which another restart would start, and `source` where it has that from.
            lost: nodes that were given up, each with the one that takes its place.
            why_none: why there can be no other restart, in words; empty where there can be one.
            fewer: how many nodes another restart has, where it has fewer; else 0.
            asked: why the ranks were asked to leave.
            complete: nothing is left to train.
        """
        iteration = restarts.newest_recorded_iteration(attempt)
        terminated = "SIGTERM" if death.code == -signal.SIGTERM else ""  # before it could heed it
        facts = RestartFacts(
            death=death,
            iteration=iteration,
            next_iteration=start,
            base_iteration=self.base,
            left=attempt.outcome.exists(),
            asked=asked or ("the stop file" if attempt.stop.exists() else "") or terminated,
            lost=why_none,
            earlier=restarts.read_failed_restarts(attempt),
            chain=chain,
            complete=complete,
        )
        reason = why_no_restart(facts)
        begin = attempt.read_begin()
        return FailedRestart(
            restart=self.number,
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
        """Its first step was done at `stepped`: return what getting back took, for the record of the restart before.

        That is `seconds`, and what differs where the restart did not start from what it was given.
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
            restarts.read_failed_restarts(attempt)[-1].iteration - reached
        )  # copies that were not whole, or a damaged checkpoint
        self.base, self.source = reached, source
        return {"seconds": seconds, "source": source, "next_iteration": reached, "steps_lost": lost}


def _log_size(log: str | None) -> int:
    try:
        return 0 if log is None else os.path.getsize(log)
    except OSError:
        return 0


@dataclass(frozen=True, kw_only=True)
class RestartConclusion:
    """What is on record of a failed restart, and what another one is given; whether there is one says the record."""

    failed: FailedRestart
    exit_code: int
    """That of the rank that failed first."""
    base: ResumePoint
    """The newest whole checkpoint."""
    memory: int | None
    """The iteration whose copies in memory are newer than that; None: there are none."""
    source: str
    """Where the state comes from: `disk`, `memory` or `neighbour`."""
    nodes: Sequence[int]
    """Those of another restart, by place."""
    moved: Sequence[str]
    """What was moved away for it, in words."""


def conclude_restart(
    run: Run,
    attempt: Attempt,
    current: CurrentRestart,
    places: NodeRanks,
    *,
    there: Collection[int],
    name: Callable[[int], str],
    ranks_per_node: int,
    asked: str,
    chain: ChainSection,
    between: ForeignRestart | None,
) -> RestartConclusion:
    """Judge and record the failed restart and prepare the records for the next one. Raises OSError and RelayrunError.

    Args:
        there: nodes with an agent that is heard. name: of a node.
        asked: why the ranks were asked to leave; empty where they were not.
        between: the records of a foreign program; None: ranks write them themselves.
    """
    death = current.first_death(attempt)
    base = restarts.restart_checkpoint(run, attempt)
    ranks = len(places.nodes) * ranks_per_node
    memory, source = newest_complete_copy(current.copies(there), ranks=ranks, after=base.iteration) or (None, "disk")
    taken = places.taken(there)
    following = places.following(taken)
    if len(following) != len(places.nodes):
        memory, source = None, "disk"  # copies are of as many ranks as made them
    gone = places.gone()
    failed = current.judged(
        attempt,
        death,
        durable=base.iteration,
        start=base.iteration if memory is None else memory,
        source=source,
        lost={name(node): name(taken[node]) if node in taken else "" for node in gone},
        why_none="" if following else places.why_none(", ".join(name(node) for node in gone if node not in taken)),
        fewer=len(following) if len(following) < len(places.nodes) else 0,
        asked=asked,
        chain=chain,
        complete=between is not None and between.complete(base),
    )
    restarts.record_failed_restart(attempt, failed)
    moved: list[str] = []
    if failed.again:
        number = current.number + 1
        moved += [] if between is None else between.prepare(base, number=number)
        moved += restarts.prepare_restart(run, attempt, base, next_restart=number, next_iteration=memory)
        if between is not None:
            between.go_on()
    return RestartConclusion(
        failed=failed,
        exit_code=death.exit_code,
        base=base,
        memory=memory,
        source=source,
        nodes=following,
        moved=moved,
    )


def record_too_few_nodes(
    attempt: Attempt, places: NodeRanks, *, there: Collection[int], name: Callable[[int], str], base: ResumePoint
) -> FailedRestart:
    """Put on record that no restart can begin, since too few nodes are left, as restart 0. Raises OSError.

    Nodes that never came count as lost, unless none came at all: then none of them is to blame.
    """
    gone = sorted(places.lost)
    words = {places.lost[node].error for node in gone}
    failed = FailedRestart(
        restart=0,
        time=time.time(),
        rank=None,
        node=", ".join(name(node) for node in gone),
        words="; ".join(sorted(words)),
        iteration=base.iteration,
        base_iteration=base.iteration,
        durable_iteration=base.iteration,
        next_iteration=base.iteration,
        again=False,
        reason=f"{places.wanted} nodes are to train, and {len(there)} are left",
        lost={name(node): "" for node in gone if there and not places.lost[node].sick},
    )
    restarts.record_failed_restart(attempt, failed)
    return failed
