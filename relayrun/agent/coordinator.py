"""The agreement of the agents on rounds; it lives in the agent of the job's first node.

    agent → coordinator    hello · dead {round, rank, code, error, told} · ended {round, memory} · asked {why}
                           · started, stepped {round, ...} (rank 0's own words)
    coordinator → agent    start {round, base_iteration, base_path, memory, port} · end {round} · leave {code}

A round: a rank dies, or the supervisor finds that nothing moves → every agent ends its ranks and says when none is
left → `decide` judges → the records are made ready → every agent starts its ranks again. Messages of a round that is
over are not heard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from relayrun.agent.decide import Death, RoundFacts, first_death, why_not_again
from relayrun.agent.lines import Lines, Message
from relayrun.agent.memory import Held, newest
from relayrun.errors import RelayrunError, RunDirError
from relayrun.rundir import rounds
from relayrun.rundir.attempt import Attempt
from relayrun.rundir.lineage import Durable
from relayrun.rundir.records import Failure, Hang
from relayrun.rundir.rounds import FailedRound
from relayrun.rundir.run import Run
from relayrun.scheduler.tasks import free_port

FAILED = 1
"""Exit code of the agents where no rank's own says why the attempt failed."""


class Coordinator:
    """Gives out rounds to the agents of an attempt.

    Args:
        links: to the agents, by node number; filled by who accepts their connections, before their `hello`.
        say: writes a line into the job's log.
        max_failed_rounds: after so many in a row without a new durable iteration the attempt ends.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        *,
        nodes: int,
        ranks: int,
        links: dict[int, Lines],
        say: Callable[[str], None],
        max_failed_rounds: int,
    ) -> None:
        begin = attempt.read_begin()
        if begin is None:
            raise RunDirError("this attempt has not begun", where=attempt.begin)
        self._run, self._attempt, self._nodes, self._links, self._say = run, attempt, nodes, links, say
        self._ranks, self._max_failed_rounds = ranks, max_failed_rounds
        self._log = begin.log
        self._base = Durable(iteration=begin.base_iteration, path=begin.base_path)
        self._phase: Literal["gathering", "running", "ending", "leaving"] = "gathering"
        self._round = 0
        self._names: dict[int, str] = {}
        self._deaths: list[Death] = []
        self._ended: set[int] = set()
        self._memory: list[Held] = []
        """The copies in the memory of all nodes."""
        self._source = "disk"
        """Where this round has its state from: `disk`, `memory` or `neighbour`."""
        self._from = self._base.iteration
        """The iteration from which this round started."""
        self._asked = ""
        self._lost = ""
        self._noticed = 0.0
        """When the first failure of this round was noticed, in seconds since 1970."""
        self._all_ended = 0.0
        self._given_out = 0.0
        self._started: Message = {}
        """Rank 0's times of its start, in this round."""

    def hear(self, node: int, message: Message) -> None:
        """Take a message of the agent of this node."""
        kind = message["kind"]
        if kind == "hello":
            self._names[node] = str(message.get("name", node))
            if self._phase == "leaving":
                self._links[node].send("leave", code=FAILED)
            elif len(self._names) == self._nodes:
                self._start(self._base, memory=None)
        elif kind == "asked":
            self._asked = self._asked or str(message.get("why"))
        elif message.get("round") != self._round:
            return
        elif kind == "dead":
            if not (message["told"] and message["code"] == -signal.SIGKILL):  # by its agent, which was told to
                rank, code, error = message["rank"], message["code"], message["error"]
                self._dead(Death(rank=rank, node=self._names[node], code=code, error=error))
        elif kind == "ended":
            self._ended.add(node)
            self._memory += [Held(*copy) for copy in message["memory"]]
            if len(self._ended) == self._nodes:
                self._all_gone()
        elif kind == "started":
            self._started = message
        elif kind == "stepped":
            self._stepped(float(message["time"]))

    def look(self) -> None:
        """Now and then: see whether the supervisor has found that nothing moves any more."""
        with contextlib.suppress(OSError, RunDirError):  # it is looked for again soon
            if self._phase == "running" and (hang := Hang.read(self._attempt.hang)) is not None:
                self._dead(Death(rank=-1, node="", code=FAILED, error=hang.words))

    def lose(self, node: int) -> None:
        """The agent of this node is gone: its node, or somebody killed it. Its ranks die with it."""
        if self._phase == "leaving":
            return
        self._lost = self._lost or f"the agent of {self._names.get(node, f'node {node}')} is gone"
        self._links.pop(node, None)
        if self._phase == "gathering":
            self._say(f"{self._lost} before the first round")
            self._leave(FAILED)
            return
        self._ended.add(node)
        self._end()
        if len(self._ended) == self._nodes:
            self._all_gone()

    def _start(self, base: Durable, *, memory: int | None, source: str = "disk") -> None:
        """Give out the next round: from copies in memory of iteration `memory`, or else from `base`."""
        self._from, self._source = base.iteration if memory is None else memory, source
        self._phase, self._round = "running", self._round + 1
        self._deaths, self._ended, self._memory, self._started = [], set(), [], {}
        port = free_port("")
        self._given_out = time.time()
        for link in self._links.values():
            link.send(
                "start",
                round=self._round,
                base_iteration=base.iteration,
                base_path=base.path,
                memory=memory,
                port=port,
            )

    def _dead(self, death: Death) -> None:
        if not death.code:
            return
        self._deaths.append(death)
        self._end()

    def _end(self) -> None:
        """Have all ranks of this round ended, once."""
        if self._phase != "running":
            return
        self._phase, self._noticed = "ending", time.time()
        for link in self._links.values():
            link.send("end", round=self._round)

    def _all_gone(self) -> None:
        if self._phase == "running":  # every rank left by itself, with exit code 0
            self._leave(0)
        elif self._phase == "ending":
            self._all_ended = time.time()
            self._conclude()

    def _conclude(self) -> None:
        """No rank lives: begin another round, or end the attempt."""
        try:
            failures = {failure.rank: failure for failure in self._failures()}
            death = self._first(failures)
            base = rounds.newest_checkpoint(self._run, self._attempt)
            memory, source = newest(self._memory, ranks=self._ranks, after=base.iteration) or (None, "disk")
            failed = self._judge(death, base, memory, source)
            rounds.append(self._attempt, failed)
            if failed.again:
                number = self._round + 1
                moved = rounds.go_back(self._run, self._attempt, base, next_round=number, next_iteration=memory)
                for text in moved:
                    self._say(text)
        except (OSError, RelayrunError) as error:
            self._say(f"round {self._round} failed, and no other one can begin: {error}")
            with contextlib.suppress(OSError):
                rounds.amend(self._attempt, self._round, again=False, reason=f"no other round can begin: {error}")
            self._leave(self._deaths[0].exit_code if self._deaths else FAILED)
            return
        self._say(failed.told)
        if failed.again:
            self._start(base, memory=memory, source=source)
        else:
            self._leave(death.exit_code or FAILED)

    def _judge(self, death: Death, base: Durable, memory: int | None, source: str) -> FailedRound:
        start = base.iteration if memory is None else memory
        earlier = rounds.read(self._attempt)
        iteration = rounds.newest_iteration(self._attempt)
        terminated = "SIGTERM" if death.code == -signal.SIGTERM else ""  # before it could heed it
        facts = RoundFacts(
            death=death,
            iteration=iteration,
            next_iteration=start,
            base_iteration=self._from,
            left=self._attempt.outcome.exists(),
            asked=self._asked or ("the stop file" if self._attempt.stop.exists() else "") or terminated,
            lost=self._lost,
            earlier=earlier,
            max_failed_rounds=self._max_failed_rounds,
        )
        reason = why_not_again(facts)
        return FailedRound(
            round=self._round,
            time=self._noticed,
            rank=death.rank if death.rank >= 0 else None,
            node=death.node,
            words=death.words,
            iteration=iteration,
            base_iteration=self._from,
            durable_iteration=base.iteration,
            next_iteration=start,
            source=source,
            again=reason is None,
            reason=reason or "",
            steps_lost=max(0, iteration - start),
            log_size=_size(self._log),
            seconds={"end": self._all_ended - self._noticed},
        )

    def _first(self, failures: dict[int, Failure]) -> Death:
        if not self._deaths:
            return Death(rank=-1, node="", code=FAILED, error=self._lost)
        first = first_death(self._deaths, {rank: failure.time for rank, failure in failures.items()})
        own = failures.get(first.rank)
        return first if own is None else replace(first, error=" ".join(own.error.split()), repeats=own.repeats)

    def _failures(self) -> list[Failure]:
        found = [Failure.read(path) for path in self._attempt.failures.glob("rank-*.json")]
        return [failure for failure in found if failure is not None]

    def _stepped(self, stepped: float) -> None:
        """The first step of a round is done: add to the record of the one before what getting back took."""
        if self._round == 1:
            return
        times = [self._given_out, *(float(self._started.get(name, 0.0)) for name in PHASES), stepped]
        names = ("fork", "groups", "load", "step")
        seconds = {name: later - earlier for name, earlier, later in zip(names, times, times[1:], strict=False)}
        seconds |= {"records": self._given_out - self._all_ended, "all": stepped - self._noticed}
        source, reached = self._started.get("source", "disk"), int(self._started.get("iteration", self._from))
        other = {}
        if (reached, source) != (self._from, self._source):  # copies that were not whole, or a damaged checkpoint
            lost = rounds.read(self._attempt)[-1].iteration - reached
            other = {"source": source, "next_iteration": reached, "steps_lost": lost}
            self._from, self._source = reached, source
        try:
            rounds.amend(self._attempt, self._round - 1, seconds=seconds, **other)
        except OSError as error:
            self._say(f"what round {self._round} took is not on record: {error}")
        self._say(f"round {self._round}: the first step {seconds['all']:.1f} s after the failure")

    def _leave(self, code: int) -> None:
        self._phase = "leaving"
        for link in self._links.values():
            link.send("leave", code=code)


PHASES = ("process", "initialised", "loaded")
"""What rank 0 says of its start, as in `rundir.records.Started`: its program began, groups and model are made, the
checkpoint is in place."""


def _size(log: str | None) -> int:
    try:
        return 0 if log is None else os.path.getsize(log)
    except OSError:
        return 0
