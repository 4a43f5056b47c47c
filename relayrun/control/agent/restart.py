"""A restart of the ranks inside a job: its facts, its record, and the preparation of the next restart.

For a foreign program, which writes no records itself, the coordinator first waits until the log is complete and the
watch has recorded it, and then moves everything beyond the next start (`ForeignRestart`).
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from relayrun.control.agent.job_nodes import AGENT_BEAT_SECONDS, NodeRanks
from relayrun.control.agent.memory_copies import NodeMemoryCopy, newest_complete_copy
from relayrun.control.agent.messages import Message
from relayrun.control.decisions import Death, RestartFacts, first_death, why_no_restart
from relayrun.control.job_log import LogFollower, job_output_files, log_size
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import Lineage, ResumePoint
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import RankFailure
from relayrun.control.rundir.restarts import FailedRestart, RestartBase, RestartHandOver
from relayrun.control.rundir.run import Run
from relayrun.control.trainers.checkpoint_hashes import intact_base
from relayrun.control.trainers.registry import trainer_of
from relayrun.errors import RunDirError
from relayrun.files import file_size, read_json_lines

RECORD_PAUSE = 0.1
"""Seconds between two looks during the wait for the watch."""
LOG_COMPLETE_SECONDS = 10.0
"""Seconds for the agents' last lines to reach the log; a lost node's never do."""
WATCH_RECORD_SECONDS = 60.0
"""Seconds for the watch to record a restart; a killed watch is started again."""


def restart_ranks_exited_line(number: int) -> str:
    """Return the line of an agent when no rank of restart `number` is left on its node."""
    return f"restart {number}: no rank is left here"


class ForeignRestart:
    """The records and files of a foreign program, between its restarts. `say`: writes a line into the job's log."""

    def __init__(self, run: Run, plan: Plan, attempt: Attempt, *, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._begin, self._say = run, attempt, attempt.started_record(), say
        self._trainer = trainer_of(plan, run)
        self._last = min((step for step in (plan.total_steps, plan.stop_after) if step is not None), default=None)
        """The last iteration of the run; None: the program knows itself."""
        self._logs: list[tuple[LogFollower, set[str]]] = []
        """Log lines since the end of the restart, and the nodes whose last line was found."""
        self._since = 0.0
        self._asked: RestartHandOver | None = None
        self._comparison: Future[ResumePoint] | None = None
        """The comparison of the next base with its hashes, in a thread: agents count on this one's words."""

    def ended(self) -> None:
        """Look for the agents' last lines from here on: they are told to end a restart."""
        self._logs = [(LogFollower(path, offset=file_size(path)), set()) for path, _ in job_output_files(self._begin)]
        self._asked, self._comparison, self._since = None, None, time.monotonic()

    def recorded(self, number: int, *, exit_code: int, nodes: Collection[str]) -> bool:
        """Return whether restart `number` is completely on record; ask again soon if not. No rank lives. `nodes`: nodes
        whose agents have said so. Raises OSError, and RunDirError if the watch does not record."""
        if self._asked is None:
            if not self._log_is_whole(number, nodes):
                return False
            self._asked = RestartHandOver(restart=number, exit_code=exit_code)
            self._asked.write(self._attempt.hand_over)
            self._since = time.monotonic()
        found = RestartHandOver.read(self._attempt.hand_over)
        if found is not None and found.restart == number and found.recorded:
            self._asked = found
            return True
        if time.monotonic() - self._since > WATCH_RECORD_SECONDS:
            raise RunDirError(
                f"the watch has not recorded for {WATCH_RECORD_SECONDS:.0f} s what restart {number} left",
                where=self._attempt.hand_over,
            )
        return False

    def compared(self) -> bool:
        """Return whether the base of the next restart was compared with its hashes, and a damaged one is out of the
        way; ask again soon if not. Raises OSError, and RunDirError if no intact one is found."""
        if not self._trainer.lacks_hashes or self._attempt.outcome.exists() or self._attempt.stop.exists():
            return True
        if self._comparison is None:
            self._comparison = Future()
            threading.Thread(target=self._compare, args=[self._comparison], name="compare", daemon=True).start()
        return self._comparison.done() and bool(self._comparison.result())

    def _compare(self, result: Future[ResumePoint]) -> None:
        try:
            base, line = restarts.restart_checkpoint(self._run, self._attempt), Lineage(self._run)
            result.set_result(intact_base(self._run, line, base, attempt=self._attempt.number, restart=True))
        except Exception as error:
            result.set_exception(error)

    def _log_is_whole(self, number: int, nodes: Collection[str]) -> bool:
        said = re.compile(rf" (\S+)\] {re.escape(restart_ranks_exited_line(number))}")
        for lines, found in self._logs:
            found |= {node for line in lines.read() for node in said.findall(line)}
        missing = sorted({node for _, found in self._logs for node in set(nodes) - found})
        if missing and time.monotonic() - self._since > LOG_COMPLETE_SECONDS:
            self._say(
                f"the last words of {', '.join(missing)} are not in the log; what else its ranks said may be lost"
            )
            return True
        return not missing

    def complete(self, base: ResumePoint) -> bool:
        """Return whether the run ends at this checkpoint."""
        return self._last is not None and base.iteration >= self._last

    def prepare(self, base: ResumePoint, *, number: int) -> list[str]:
        """Make the program start from `base` alone in restart `number`; return one line per action.

        The restart's start is recorded first: whoever concludes the attempt from here on must not take log lines of the
        restart before for its own.
        """
        assert self._asked is not None
        RestartBase(
            restart=number,
            base_iteration=base.iteration,
            base_path=base.path,
            log_offset=self._asked.log_offset,
            output_offset=self._asked.output_offset,
            commits=sum(1 for _ in read_json_lines(self._attempt.commits)),
        ).write(self._attempt.restart_base)
        return self._trainer.prepare(base, attempt=self._attempt.number)

    def go_on(self) -> None:
        """Let the watch follow the next restart."""
        self._attempt.hand_over.unlink(missing_ok=True)

    def first_step(self, *, after: int) -> float | None:
        """Return the time, in seconds since 1970, of the first observed iteration after `after`; None before it."""
        for line in self._attempt.metrics_backwards():
            if "restart" not in line and int(line.get("iteration", 0)) > after:
                return float(line["time"])
            break
        return None


START_PHASES = ("process", "initialised", "loaded")
"""Phases of rank 0's start, as in `rundir.records.StartTimes`."""


@dataclass(kw_only=True)
class CurrentRestart:
    """A restart of an attempt; number 0 before the first one. Times are seconds since 1970."""

    base: int
    """Iteration from which it started."""
    number: int = 0
    source: str = "disk"
    """Source of its state: `disk`, `memory` or `neighbour`."""
    given_out: float = 0.0
    failed_before: float = 0.0
    """Time of the previous restart's first failure (`over_before`: time at which none of its ranks was left)."""
    over_before: float = 0.0
    started: Message = field(default_factory=dict)
    """Rank 0's times of its start."""
    stepped: bool = False
    """It has done a step, or is the first one, or over."""
    deaths: list[Death] = field(default_factory=list)
    noticed: float = 0.0
    """Time of its first failure."""
    told_to_end: float = 0.0
    """Time at which its ranks were told to end, by `time.monotonic`."""
    ended: set[int] = field(default_factory=set)
    """Nodes on which none of its ranks is left."""
    over: float = 0.0
    """Time at which no rank was left on any node."""
    memory: dict[int, list[NodeMemoryCopy]] = field(default_factory=dict)
    """Copies in the memory of each node."""

    def following(self, *, base: int, source: str, given_out: float) -> CurrentRestart:
        """Return the next restart."""
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
        """Note the end of a rank, or of something that ends several ranks."""
        self.deaths.append(replace(death, noticed=time.monotonic()))

    def lost(self, death: Death, *, last_word: float) -> None:
        """Note the loss of a node without a message since `last_word`, by `time.monotonic`.

        It comes before deaths noticed since then, which may only report a closed connection. A rank that died earlier,
        or on that node, died by itself.
        """
        since = last_word - AGENT_BEAT_SECONDS  # words of different agents are heard in any order
        before = [known.node == death.node or known.noticed <= since for known in self.deaths]
        at = len(before) - before[::-1].index(True) if any(before) else 0
        self.deaths.insert(at, replace(death, noticed=since))

    def copies(self, nodes: Collection[int]) -> list[NodeMemoryCopy]:
        """Return the copies in the memory of these nodes."""
        return [copy for node, copies in self.memory.items() if node in nodes for copy in copies]

    def first_death(self, attempt: Attempt) -> Death:
        """Return the first failure, with the rank's own last words."""
        found = [RankFailure.read(path) for path in attempt.failures.glob("rank-*.json")]
        failures = {failure.rank: failure for failure in found if failure is not None}
        first = first_death(self.deaths, {rank: failure.time for rank, failure in failures.items()})
        own = failures.get(first.rank)
        return first if own is None else replace(first, error=" ".join(own.error.split()), repeats=own.repeats)

    def first_step(self, attempt: Attempt, stepped: float) -> dict[str, Any]:
        """Return what getting back took, for the record of the restart before: the first step was done at `stepped`.
        Besides `seconds` it holds the fields that differ if the restart did not start as planned."""
        self.stepped = True
        # a foreign program reports none
        parts = [float(self.started[name]) for name in START_PHASES] if self.started else []
        times = [self.given_out, *parts, stepped]
        names = ("fork", "groups", "load", "step") if parts else ("step",)
        seconds = {name: later - earlier for name, earlier, later in zip(names, times, times[1:], strict=False)}
        seconds |= {"records": self.given_out - self.over_before, "all": stepped - self.failed_before}
        source, reached = self.started.get("source", "disk"), int(self.started.get("iteration", self.base))
        if (reached, source) == (self.base, self.source):
            return {"seconds": seconds}
        # copies were not whole, or a checkpoint was damaged
        lost = restarts.read_failed_restarts(attempt)[-1].iteration - reached
        self.base, self.source = reached, source
        return {"seconds": seconds, "source": source, "next_iteration": reached, "steps_lost": lost}


class NextStart(NamedTuple):
    """The state and the nodes with which another restart would start."""

    base: ResumePoint
    """The newest whole checkpoint."""
    memory: int | None
    """A later iteration of which all ranks have a copy in memory; None without one."""
    source: str
    """Source of the state: `disk`, `memory` or `neighbour`."""
    nodes: list[int]
    """The nodes by node rank; empty if too few are left."""
    taken: dict[int, int]
    """The spare node that replaces each lost node."""

    @property
    def iteration(self) -> int:
        """The iteration of the state."""
        return self.base.iteration if self.memory is None else self.memory


class RestartOutcome(NamedTuple):
    """The record of a failed restart, and the start of the next one if `failed.again`."""

    failed: FailedRestart
    exit_code: int
    """Exit code of the rank that failed first."""
    start: NextStart
    moved: list[str]
    """One line per checkpoint that was moved away for it."""


def conclude_restart(
    run: Run,
    plan: Plan,
    attempt: Attempt,
    current: CurrentRestart,
    places: NodeRanks,
    *,
    there: Collection[int],
    name: Callable[[int], str],
    asked: str,
    between: ForeignRestart | None,
) -> RestartOutcome:
    """Judge and record the failed restart and prepare the records for the next one. Raises OSError and RelayrunError.

    Args:
        there: nodes with a connected agent; name: returns the name of a node.
        asked: reason for which the ranks were asked to leave; empty if they were not.
        between: records of a foreign program; None: ranks write them themselves.
    """
    base, taken = restarts.restart_checkpoint(run, attempt), places.taken(there)
    nodes, ranks = places.following(taken), len(places.nodes) * plan.ntasks_per_node
    memory, source = newest_complete_copy(current.copies(there), ranks=ranks, after=base.iteration) or (None, "disk")
    death, start = current.first_death(attempt), NextStart(base, memory, source, nodes, taken)
    iteration, gone = restarts.newest_recorded_iteration(attempt), places.gone()
    terminated = "SIGTERM" if death.code == -signal.SIGTERM else ""  # before it could heed it
    facts = RestartFacts(
        death=death,
        iteration=iteration,
        next_iteration=start.iteration,
        base_iteration=current.base,
        left=attempt.outcome.exists(),
        asked=asked or ("the stop file" if attempt.stop.exists() else "") or terminated,
        lost="" if start.nodes else places.why_none(", ".join(name(node) for node in gone if node not in start.taken)),
        earlier=restarts.read_failed_restarts(attempt),
        chain=plan.chain,
        complete=between is not None and between.complete(start.base),
    )
    reason = why_no_restart(facts)
    failed = FailedRestart(
        restart=current.number,
        time=current.noticed,
        rank=death.rank if death.rank >= 0 else death.late,
        node=death.node,
        words=death.words,
        iteration=iteration,
        base_iteration=current.base,
        durable_iteration=start.base.iteration,
        next_iteration=start.iteration,
        source=start.source,
        again=reason is None,
        reason=reason or "",
        steps_lost=max(0, iteration - start.iteration),
        lost={name(node): name(start.taken[node]) if node in start.taken else "" for node in gone},
        log_size=log_size(attempt.started_record().log),
        seconds={"end": current.over - current.noticed},
    )
    failed.append(attempt.failed_restarts)
    moved: list[str] = []
    if failed.again:
        number = current.number + 1
        moved += [] if between is None else between.prepare(start.base, number=number)
        moved += restarts.prepare_restart(run, attempt, start.base, next_restart=number, next_iteration=start.memory)
        if between is not None:
            between.go_on()
    return RestartOutcome(failed, death.exit_code, start, moved)


def record_too_few_nodes(
    attempt: Attempt, places: NodeRanks, *, there: Collection[int], name: Callable[[int], str], base: ResumePoint
) -> FailedRestart:
    """Record as restart 0 that too few nodes are left to begin. Raises OSError. Nodes that never came count as lost,
    unless none came at all: then none of them is to blame."""
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
    failed.append(attempt.failed_restarts)
    return failed
