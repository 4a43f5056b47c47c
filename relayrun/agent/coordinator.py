"""The agreement of the agents on rounds.

It lives in the agent of the job's first node or, where there are spare nodes, beside the batch script (`agent.steps`).

    agent → coordinator    hello {port, probe_port} · dead {round, rank, code, error, told}
                           · ended {round, memory, port, facts}
                           · asked {why} · beat {round, standing} · started, stepped {round, ...} (rank 0's words)
    coordinator → agent    start {round, place, nodes, base_iteration, base_path, memory, address, port}
                           · end {round} · stacks: ask the ranks for their Python stacks · leave {code}

A round: a rank dies, a node is lost, or the supervisor finds that nothing moves → every agent ends its ranks and says
when none is left → `decide` judges → the records are made ready → every agent starts its ranks again. Messages of a
round that is over are not heard.

Where nodes are looked at, `health` has further messages. A sick node is given up before the first round or another.

Each agent has a *place*: the number by which its ranks are counted; a spare one has none. An agent that says nothing
is given up with its node, and not heard again. Its place goes to a spare one in the next round.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from relayrun.agent import hangs
from relayrun.agent.between import PAUSE, Between
from relayrun.agent.decide import Death, RoundFacts, first_death, why_not_again
from relayrun.agent.health import Health
from relayrun.agent.lines import Lines, Message
from relayrun.agent.memory import Held, newest
from relayrun.agent.places import Places
from relayrun.errors import RelayrunError, RunDirError
from relayrun.rundir import rounds
from relayrun.rundir.attempt import Attempt
from relayrun.rundir.lineage import Durable
from relayrun.rundir.records import Failure, Hang
from relayrun.rundir.rounds import FailedRound
from relayrun.rundir.run import Run

FAILED = 1
"""Exit code of the agents where no rank's own says why the attempt failed."""
BEAT_SECONDS = 1.0
"""Between two words of an agent that has nothing to say, and between two looks at who has said none."""
SILENT_BEATS = 20
"""An agent of which so many looks in a row found no word is given up. Looks are counted and no seconds: the coordinator
itself may have waited for a file system."""
GATHER_SECONDS = 60.0
"""How long the first round waits for the rest, when enough nodes are there."""


class Coordinator:
    """Gives out rounds to the agents of an attempt.

    Args:
        nodes: how many nodes train. spare_nodes: how many more there are. elastic_nodes: smaller numbers of nodes with
            which training may go on.
        ranks_per_node: of each node that trains.
        names: of the nodes, as far as they are known before their agents say hello.
        links: to the agents, by node number; filled by who accepts their connections, before their `hello`.
        say: writes a line into the job's log.
        max_failed_rounds: after so many in a row without a new durable iteration the attempt ends.
        health: what is known of the nodes; None: nothing is looked for.
        between: the records and files of a foreign program; None: the ranks write them themselves.
    """

    def __init__(
        self,
        run: Run,
        attempt: Attempt,
        *,
        nodes: int,
        spare_nodes: int = 0,
        elastic_nodes: Sequence[int] = (),
        ranks_per_node: int,
        names: Mapping[int, str] | None = None,
        links: dict[int, Lines],
        say: Callable[[str], None],
        max_failed_rounds: int,
        health: Health | None = None,
        between: Between | None = None,
    ) -> None:
        self._between, self._health = between, health
        begin = attempt.read_begin()
        if begin is None:
            raise RunDirError("this attempt has not begun", where=attempt.begin)
        self._run, self._attempt, self._links, self._say = run, attempt, links, say
        self._places = Places(nodes, spare=spare_nodes, elastic=elastic_nodes)
        self._ports: dict[int, int] = {}
        """A port that was free on each node when its agent last said so."""
        self._probe_ports: dict[int, int] = {}
        """Another one."""
        self._silent: dict[int, int] = {}
        """How many looks in a row found no word of each node."""
        self._looked = self._greeted = time.monotonic()
        """When that was last counted; when the last agent said hello."""
        self.code: int | None = None
        """The exit code of the attempt, when all agents have been told to leave."""
        self._ranks_per_node, self._max_failed_rounds = ranks_per_node, max_failed_rounds
        self._log = begin.log
        self._base = Durable(iteration=begin.base_iteration, path=begin.base_path)
        self._phase: Literal["gathering", "measuring", "running", "ending", "recording", "leaving"] = "gathering"
        self._round = 0
        self._names = dict(names or {})
        self._deaths: list[Death] = []
        self._ended: set[int] = set()
        self._memory: list[Held] = []
        """The copies in the memory of all nodes."""
        self._source = "disk"
        """Where this round has its state from: `disk`, `memory` or `neighbour`."""
        self._from = self._base.iteration
        """The iteration from which this round started."""
        self._asked = ""
        self._noticed = 0.0
        """When the first failure of this round was noticed, in seconds since 1970."""
        self._all_ended = 0.0
        self._given_out = 0.0
        self._started: Message = {}
        """Rank 0's times of its start, in this round."""
        self._hangs = hangs.Hangs()
        self._unstepped = False
        """This round is not the first one, and has not done a step."""

    def hear(self, node: int, message: Message) -> None:
        """Take a message of the agent of this node."""
        kind = message["kind"]
        if node in self._places.lost:  # it has been told to leave
            return
        self._silent[node] = 0
        if kind == "hello":
            self._names[node], self._ports[node] = str(message.get("name", node)), int(message["port"])
            self._probe_ports[node] = int(message.get("probe_port", 0))
            self._greeted = time.monotonic()
            if self._health is not None:
                self._health.ask_for_clocks(self._links, [node])
            if self._phase == "leaving":
                self._links[node].send("leave", code=FAILED)
            elif self._phase == "gathering":
                self._gather()
        elif kind == "asked":
            self.ask(str(message.get("why")))
        elif kind in ("health", "clock", "probing", "probed"):
            self._hear_of_health(node, message)
        elif message.get("round") != self._round:
            return
        elif kind == "dead":
            if not (message["told"] and message["code"] == -signal.SIGKILL):  # by its agent, which was told to
                rank, code, error = message["rank"], message["code"], message["error"]
                self._dead(Death(rank=rank, node=self._names[node], code=code, error=error))
        elif kind == "ended":
            self._ended.add(node)
            self._ports[node] = int(message["port"])
            self._memory += [Held(*copy) for copy in message["memory"]]
            if self._health is not None:
                self._health.hear(node, {"kind": "health", "facts": message["facts"]}, name=self._name(node))
            self._look_for_end()
        elif kind == "beat":
            self._hangs.hear(node, message.get("standing"))
        elif kind == "started":
            self._started = message
        elif kind == "stepped":
            self._stepped(float(message["time"]))

    def look(self) -> None:
        """Now and then: see whether nothing moves any more, by where the ranks stand or by the supervisor's word."""
        if self._phase == "running":
            self._look_for_hang()
        with contextlib.suppress(OSError, RunDirError):  # it is looked for again soon
            if self._phase in ("running", "measuring") and (hang := Hang.read(self._attempt.hang)) is not None:
                self._hung(hang)
        if self._phase == "gathering" and time.monotonic() - self._greeted > GATHER_SECONDS:
            self._gather(late=True)
        elif self._phase == "measuring":
            self._look_for_probes()
        elif self._phase == "recording":
            self._look_for_records()
        elif self._unstepped and self._between is not None:
            with contextlib.suppress(OSError):
                if (stepped := self._between.first_step(after=self._from)) is not None:
                    self._stepped(stepped)

    @property
    def pause(self) -> float:
        """Seconds after which `look` is to be called again."""
        return PAUSE if self._phase == "recording" else BEAT_SECONDS

    def _look_for_hang(self) -> None:
        found, ask = self._hangs.look(self._places.nodes, ranks=len(self._places.nodes) * self._ranks_per_node)
        for link in self._links.values() if ask else ():
            link.send("stacks")
        if found is not None:
            hang = hangs.record(found, self._run.stacks(self._attempt.number))
            try:
                hang.write(self._attempt.hang)  # where the attempt ends with it the supervisor says so
            except OSError as error:
                self._say(f"{self._attempt.hang.name} not written: {error}")
            self._hung(hang)

    def _hung(self, hang: Hang) -> None:
        if self._phase == "measuring":  # before any rank
            self._leave(FAILED)
            return
        who = hang.culprit
        node = "" if who is None else self._name(self._places.nodes[who // self._ranks_per_node])
        self._dead(Death(rank=-1, node=node, code=FAILED, error=hang.words, late=who))

    def silent(self) -> list[tuple[int, float]]:
        """Nodes whose agents have said nothing for too long, with the seconds; to be asked for at each beat."""
        if self._phase == "leaving" or time.monotonic() - self._looked < BEAT_SECONDS:
            return []
        self._looked = time.monotonic()
        for node in self._links:
            self._silent[node] = self._silent.get(node, 0) + 1
        return [(node, SILENT_BEATS * BEAT_SECONDS) for node in self._links if self._silent[node] > SILENT_BEATS]

    def expects(self, node: int) -> bool:
        """Whether the agent of this node may say hello; one that was given up is never taken in again."""
        if (lost := self._places.lost.get(node)) is not None:
            self._say(f"{self._name(node)} was given up, and is not taken in again: {lost.words}")
        return node in self._places.missing(self._links)

    def given_up(self) -> set[int]:
        """Nodes that were given up."""
        return set(self._places.lost)

    def ask(self, why: str) -> None:
        """Note that the ranks were asked to leave: they are not started again."""
        self._asked = self._asked or why

    def lose(self, node: int, why: str) -> None:
        """Give this node up: its agent is gone, and its ranks with it."""
        if self._phase == "leaving" or node in self._places.lost:
            return
        self._give_up_node(node, why)
        self._links.pop(node, None)
        if self._phase == "gathering":
            self._say(f"{self._name(node)}: {why}, before the first round")
            self._gather()
            return
        if self._phase == "measuring":
            self._say(f"{self._name(node)}: {why}, before the first round")
            self._look_for_probes()
            return
        if node in self._places.nodes:
            self._deaths.insert(0, self._places.lost[node])  # what others say of closed connections has this cause
            self._end()
        else:
            self._say(f"the spare node {self._name(node)} is gone: {why}")
        self._look_for_end()

    def _give_up_node(self, node: int, why: str, *, sick: bool = False) -> None:
        self._places.lost[node] = Death(rank=-1, node=self._name(node), code=FAILED, error=why, lost=True, sick=sick)

    def _name(self, node: int) -> str:
        return self._names.get(node, f"node {node}")

    def _gather(self, *, late: bool = False) -> None:
        """Begin the first round when all nodes are there that may still come; `late`: those that are there must do."""
        there = [node for node in self._there() if self._health is None or self._health.knows(node)]
        places = self._places
        if places.left < places.wanted:
            self._say(f"{places.wanted} nodes are to train, and {places.left} are left")
        if not places.fitting(places.left):
            self._leave(FAILED)
        elif len(there) == places.left or (late and len(there) >= places.wanted):
            for node in places.missing(there):
                self._give_up_node(node, "it came late")
                self._say(
                    f"{self._name(node)} has not said hello for {GATHER_SECONDS:.0f} s; the others begin without it"
                )
            if self._leave_out_sick() and not self._measure():
                self._first_round()

    def _there(self) -> list[int]:
        """Nodes that have said hello, and are not given up."""
        return sorted(self._ports.keys() & self._links.keys() - self._places.lost.keys())

    def _first_round(self) -> None:
        there = self._there()
        self._places.nodes = there[: self._places.fitting(len(there))]
        if self._places.nodes:
            self._start(self._base, memory=None)
        else:
            self._leave(FAILED)

    def _hear_of_health(self, node: int, message: Message) -> None:
        if self._health is None:
            return
        self._health.hear(node, message, name=self._name(node))
        if message["kind"] == "health" and self._phase == "gathering":
            self._gather()
        elif message["kind"] == "probed" and self._phase == "measuring":
            self._look_for_probes()

    def _measure(self) -> bool:
        """Have the nodes measured before the first round; False where nobody looks."""
        there = self._there()
        if self._health is None:
            return False
        self._phase = "measuring"
        address = self._name(there[0]) if self._places.outlive_nodes else None
        self._health.probe(self._links, there, address=address, port=self._probe_ports[there[0]])
        return True

    def _look_for_probes(self) -> None:
        """Begin the first round when all nodes have been measured; or end, where too few are left."""
        assert self._health is not None
        if self._health.probed(self._there()) and self._leave_out_sick():
            self._first_round()

    def _leave_out_sick(self) -> bool:
        """Give up the nodes that are sick; return False where the attempt ends with that before its first round."""
        if self._health is None:
            return True
        names = {node: self._name(node) for node in self._there()}
        sick, ends = self._health.look(names, self._places, ended_round=self._round)
        if ends and not self._round:
            self._leave(FAILED)
            return False
        for node, why in sick.items():
            self._give_up_node(node, why, sick=True)
            if (link := self._links.pop(node, None)) is not None:
                link.send("leave", code=FAILED)
        return True

    def _look_for_end(self) -> None:
        """See whether none of the round's ranks is left. Every agent is waited for that was told to end."""
        waits = self._places.nodes if self._phase == "running" else self._links
        if self._ended.issuperset(waits):
            self._all_gone()

    def _start(self, base: Durable, *, memory: int | None, source: str = "disk") -> None:
        """Give out the next round: from copies in memory of iteration `memory`, or else from `base`."""
        self._from, self._source = base.iteration if memory is None else memory, source
        self._phase, self._round = "running", self._round + 1
        self._deaths, self._ended, self._memory, self._started = [], set(), [], {}
        self._hangs = hangs.Hangs()
        self._unstepped = self._round > 1
        places = self._places.nodes
        self._given_out = time.time()
        for node, link in self._links.items():
            link.send(
                "start",
                round=self._round,
                place=places.index(node) if node in places else None,
                nodes=len(places),
                base_iteration=base.iteration,
                base_path=base.path,
                memory=memory,
                address=self._names[places[0]] if self._places.outlive_nodes else None,
                port=self._ports[places[0]],
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
        self._phase, self._noticed, self._unstepped = "ending", time.time(), False
        if self._between is not None:
            self._between.ended()
        if self._health is not None:
            self._health.ask_for_clocks(self._links, self._links)
        for link in self._links.values():
            link.send("end", round=self._round)

    def _all_gone(self) -> None:
        if self._phase == "running":  # every rank left by itself, with exit code 0
            self._leave(0)
        elif self._phase == "ending":
            self._all_ended = time.time()
            self._phase = "recording"
            self._look_for_records()

    def _look_for_records(self) -> None:
        """Conclude the round when all that it left is on record; the ranks of a foreign program write none."""
        if self._between is not None:
            nodes = [self._name(node) for node in self._places.nodes if node in self._ended and node in self._links]
            code = self._deaths[0].exit_code or FAILED
            try:
                if not self._between.recorded(self._round, exit_code=code, nodes=nodes):
                    return
            except (OSError, RelayrunError) as error:
                self._give_up(error)
                return
        self._conclude()

    def _give_up(self, error: OSError | RelayrunError) -> None:
        """End the attempt, since its records cannot be made ready for another round."""
        self._say(f"round {self._round} failed, and no other one can begin: {error}")
        with contextlib.suppress(OSError):
            rounds.amend(self._attempt, self._round, again=False, reason=f"no other round can begin: {error}")
        self._leave(self._deaths[0].exit_code if self._deaths else FAILED)

    def _conclude(self) -> None:
        """No rank lives: begin another round, or end the attempt."""
        try:
            failures = {failure.rank: failure for failure in self._failures()}
            death = self._first(failures)
            self._leave_out_sick()
            base = rounds.newest_checkpoint(self._run, self._attempt)
            places = self._places
            ranks = len(places.nodes) * self._ranks_per_node
            memory, source = newest(self._memory, ranks=ranks, after=base.iteration) or (None, "disk")
            taken = places.taken(self._links)
            following = places.following(taken)
            if len(following) != len(places.nodes):
                memory, source = None, "disk"  # copies are of as many ranks as made them
            failed = self._judge(death, base, memory, source, taken, len(following))
            rounds.append(self._attempt, failed)
            if failed.again:
                number = self._round + 1
                moved = [] if self._between is None else self._between.prepare(base, number=number)
                moved += rounds.go_back(self._run, self._attempt, base, next_round=number, next_iteration=memory)
                if self._between is not None:
                    self._between.go_on()
                for text in moved:
                    self._say(text)
        except (OSError, RelayrunError) as error:
            self._give_up(error)
            return
        self._say(failed.told)
        if failed.again:
            places.nodes = following
            self._start(base, memory=memory, source=source)
        else:
            self._leave(death.exit_code or FAILED)

    def _judge(
        self, death: Death, base: Durable, memory: int | None, source: str, taken: dict[int, int], nodes: int
    ) -> FailedRound:
        """`nodes`: how many another round would have."""
        start = base.iteration if memory is None else memory
        earlier = rounds.read(self._attempt)
        iteration = rounds.newest_iteration(self._attempt)
        terminated = "SIGTERM" if death.code == -signal.SIGTERM else ""  # before it could heed it
        gone = self._places.gone()
        left = ", ".join(self._name(node) for node in gone if node not in taken)
        facts = RoundFacts(
            death=death,
            iteration=iteration,
            next_iteration=start,
            base_iteration=self._from,
            left=self._attempt.outcome.exists(),
            asked=self._asked or ("the stop file" if self._attempt.stop.exists() else "") or terminated,
            lost="" if nodes else self._places.why_none(left),
            earlier=earlier,
            max_failed_rounds=self._max_failed_rounds,
            complete=self._between is not None and self._between.complete(base),
        )
        reason = why_not_again(facts)
        return FailedRound(
            round=self._round,
            time=self._noticed,
            rank=death.rank if death.rank >= 0 else death.late,
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
            lost={self._name(node): self._name(taken[node]) if node in taken else "" for node in gone},
            nodes=nodes if reason is None and nodes < len(self._places.nodes) else 0,
            log_size=_size(self._log),
            seconds={"end": self._all_ended - self._noticed},
        )

    def _first(self, failures: dict[int, Failure]) -> Death:
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
        self._unstepped = False
        parts = [float(self._started[name]) for name in PHASES] if self._started else []  # a foreign program says none
        times = [self._given_out, *parts, stepped]
        names = ("fork", "groups", "load", "step") if parts else ("step",)
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
        self._phase, self.code = "leaving", code
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
