"""The agreement of the agents on restarts.

    agent → coordinator    hello {name, port} · dead {restart, rank, code, error, told}
                           · ended {restart, memory, port, facts}
                           · asked {why} · beat {restart, standing} · started, stepped {restart, ...} (from rank 0)
    coordinator → agent    start {restart, place, nodes, base_iteration, base_path, memory, address, port}
                           · end {restart} · stacks: ask the ranks for their Python stacks · leave {code}
                           · requests {asked}, to rank 0's agent, each second; `health` has further messages

The coordinator lives in the agent of the first node or, with spare nodes, beside the batch script
(`agent.step_per_node`). A restart: a rank dies, a node is lost, or the ranks hang → every agent ends its ranks and says
when none is left → `decisions` judges → the records are prepared → every agent starts its ranks again. Messages of an
earlier restart are ignored.

Each agent has a *place*, its node rank; a spare node has none. A silent or sick node is given up for good, and a spare
node takes its place in the next restart.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Sequence
from typing import Literal

from relayrun.control.agent import hang_detection
from relayrun.control.agent.health import JobHealth
from relayrun.control.agent.job_nodes import AGENT_BEAT_SECONDS, SILENT_BEATS, AgentContacts, NodeRanks
from relayrun.control.agent.memory_copies import NodeMemoryCopy
from relayrun.control.agent.messages import Message, MessageSocket
from relayrun.control.agent.requests import Requests
from relayrun.control.agent.restart import (
    RECORD_PAUSE,
    CurrentRestart,
    ForeignRestart,
    conclude_restart,
    record_too_few_nodes,
)
from relayrun.control.decisions import Death
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import ResumePoint
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Hang
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError

EXIT_FAILED = 1
"""Exit code of the agents if no rank's own exit code explains the failure."""
GATHER_SECONDS = 60.0
"""Seconds for which the first start waits for all nodes if enough are there; late nodes become spare nodes."""
LONGEST_GATHER_SECONDS = 300.0
"""Seconds for which it waits if too few are there; then the missing nodes are given up."""
ENDING_SECONDS = 60.0
"""Seconds for the ranks of a node to end; then the node is given up. A rank that waits in the kernel does not end."""


class Coordinator:
    """Gives out restarts to the agents of an attempt.

    Args:
        nodes: number of the job's nodes; names: their names, if they are known before the agents say hello.
        links: connections to the agents by node number, filled before their `hello`.
        say: writes a line into the job's log.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        attempt: Attempt,
        *,
        nodes: int,
        names: Sequence[str] = (),
        links: dict[int, MessageSocket],
        say: Callable[[str], None],
    ) -> None:
        begin = attempt.started_record()
        self._health = None if plan.chain.node_health == "off" else JobHealth(attempt, plan, say=say)
        self._between = None if plan.trainer == "native" else ForeignRestart(run, plan, attempt, say=say)
        self._run, self._plan, self._attempt, self._links, self._say = run, plan, attempt, links, say
        wanted = plan.nodes if plan.outlives_nodes else nodes
        self._places = NodeRanks(wanted, spare=nodes - wanted)
        self._heard = AgentContacts(dict(enumerate(names)))
        self.code: int | None = None
        """Exit code of the attempt, once all agents were told to leave."""
        self._base = ResumePoint(iteration=begin.base_iteration, path=begin.base_path)
        self._phase: Literal["gathering", "running", "ending", "recording", "leaving"] = "gathering"
        self._current = CurrentRestart(base=self._base.iteration)
        self._asked = ""
        self._hangs = hang_detection.HangDetector()
        self._requests = Requests(run, attempt, of_ranks=self._between is None, say=say)

    def hear(self, node: int, message: Message) -> None:
        """Handle a message of the agent of this node."""
        kind = message["kind"]
        if node in self._places.lost:  # it has been told to leave
            return
        self._heard.word(node)
        if kind == "hello":
            self._hello(node, message)
        elif kind == "asked":
            self.ask(str(message.get("why")))
        elif kind in ("health", "clock"):
            self._hear_of_health(node, message)
        elif message.get("restart") != self._current.number:
            return
        elif kind == "dead":
            if not (message["told"] and message["code"] == -signal.SIGKILL):  # by its agent, which was told to
                rank, code, error = message["rank"], message["code"], message["error"]
                self._dead(Death(rank=rank, node=self._name(node), code=code, error=error))
        elif kind == "ended":
            self._current.ended.add(node)
            self._heard.ports[node] = int(message["port"])
            self._current.memory[node] = [NodeMemoryCopy(*copy) for copy in message["memory"]]
            if self._health is not None:
                self._health.hear(node, {"kind": "health", "facts": message["facts"]})
            self._look_for_end()
        elif kind == "beat":
            self._hangs.hear(node, message.get("standing"))
        elif kind == "started":
            self._current.started = message
        elif kind == "stepped":
            self._stepped(float(message["time"]))

    def _hello(self, node: int, message: Message) -> None:
        self._heard.hello(node, message)
        if self._health is not None:
            self._health.ask_for_clocks(self._links, [node])
        if self._places.came(node):
            self._say(f"{self._name(node)} came late, and is a spare node")
        if self._phase == "leaving":
            self._links[node].send("leave", code=EXIT_FAILED)
        elif self._phase == "gathering":
            self._gather()
        elif self._phase == "ending":  # it has no ranks of this restart, and was not told to end any
            self._current.ended.add(node)

    def look(self) -> None:
        """Handle everything that time brings: hangs, requests, late nodes, late records; called now and then."""
        if self._requests.look():  # once a second: messages of thousands of agents come in between
            if self._phase == "running":
                self._look_for_hang()
            if self._places.nodes and (link := self._links.get(self._places.nodes[0])) is not None:
                link.send("requests", asked=self._requests.asked)
            if self._requests.hang is not None and self._phase == "running":
                self._hung(self._requests.hang)
        if self._phase == "gathering":
            self._gather()
        elif self._phase == "ending":
            self._look_for_unended()
        elif self._phase == "recording":
            self._look_for_records()
        elif self._phase == "running" and not self._current.stepped and self._between is not None:
            with contextlib.suppress(OSError):
                if (stepped := self._between.first_step(after=self._current.base)) is not None:
                    self._stepped(stepped)

    @property
    def pause(self) -> float:
        """Seconds after which `look` must be called again."""
        return RECORD_PAUSE if self._phase == "recording" else AGENT_BEAT_SECONDS

    def _look_for_hang(self) -> None:
        found, ask = self._hangs.look(self._places.nodes, ranks=len(self._places.nodes) * self._plan.ntasks_per_node)
        for link in self._links.values() if ask else ():
            link.send("stacks")
        if found is not None:
            hang = hang_detection.hang_record(found, self._run.stacks(self._attempt.number))
            try:
                hang.write(self._attempt.hang)  # where the attempt ends with it the supervisor says so
            except OSError as error:
                self._say(f"{self._attempt.hang.name} not written: {error}")
            self._hung(hang)

    def _hung(self, hang: Hang) -> None:
        who = hang.culprit
        node = None if who is None else self._places.at(who // self._plan.ntasks_per_node)
        name = "" if node is None else self._name(node)
        self._dead(Death(rank=-1, node=name, code=EXIT_FAILED, error=hang.words, late=who))

    def silent(self) -> list[tuple[int, float]]:
        """Return the nodes with silent agents and the seconds of silence; called at each beat."""
        silent = [] if self._phase == "leaving" else self._heard.silent(self._links)
        return [(node, SILENT_BEATS * AGENT_BEAT_SECONDS) for node in silent]

    def expects(self, node: int) -> bool:
        """Return whether the agent of this node may say hello: never after its node was given up."""
        if (lost := self._places.lost.get(node)) is not None:
            self._say(f"{self._name(node)} was given up, and is not taken in again: {lost.words}")
        return lost is None and node not in self._links and node < self._places.wanted + self._places.spare

    def given_up(self) -> set[int]:
        """Return the nodes that were given up."""
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
            self._say(f"{self._name(node)}: {why}, before the first start")
            if self._places.left < self._places.wanted:
                self._say(f"{self._places.wanted} nodes are to train, and {self._places.left} are left")
            self._gather()
            return
        if node in self._places.nodes:
            self._current.lost(self._places.lost[node], last_word=self._heard.last_word(node))
            self._end()
        else:
            self._say(f"the spare node {self._name(node)} is gone: {why}")
        self._look_for_end()

    def _give_up_node(self, node: int, why: str, **kind: bool) -> None:
        self._places.lost[node] = Death(rank=-1, node=self._name(node), code=EXIT_FAILED, error=why, lost=True, **kind)

    def _dismiss(self, node: int, why: str, **kind: bool) -> None:
        """Give up a node whose agent may still be there. `kind`: `sick` or `unended`."""
        self._give_up_node(node, why, **kind)
        if (link := self._links.pop(node, None)) is not None:
            link.send("leave", code=EXIT_FAILED)

    def _name(self, node: int) -> str:
        return self._heard.name(node)

    def _gather(self) -> None:
        """Begin the first start when every expected node is there, or when the wait for the others is over."""
        places, waited = self._places, time.monotonic() - self._heard.greeted
        said = (
            len(self._heard.ports) if self._health is None else min(len(self._heard.ports), len(self._health.reported))
        )
        if said < places.left and waited <= GATHER_SECONDS and places.fitting(places.left):
            return  # each message of each node comes here
        there = [node for node in self._there() if self._health is None or node in self._health.reported]
        enough = waited > GATHER_SECONDS and len(there) >= places.wanted
        if not places.fitting(places.left):
            self._too_few()
        elif len(there) == places.left or enough or waited > LONGEST_GATHER_SECONDS:
            for node in sorted(places.missing(there)):
                words = f"has not said {'how it is' if node in self._links else 'hello'} for {waited:.0f} s"
                what = "the others begin without it" if enough else "it is given up"
                self._say(f"{self._name(node)} {words}; {what}")
                if enough and node not in self._links:
                    places.absent.add(node)
                else:
                    self._dismiss(node, words)
            if not places.fitting(len(self._there())):
                self._too_few()
            elif self._leave_out_sick():
                self._first_start()

    def _there(self) -> list[int]:
        """Return the nodes that said hello and are not given up; late ones last."""
        there = self._heard.ports.keys() & self._links.keys() - self._places.lost.keys()
        return sorted(there, key=lambda node: (node in self._places.late, node))

    def _first_start(self) -> None:
        there = self._there()
        self._places.nodes = there[: self._places.fitting(len(there))]
        if self._places.nodes:
            self._start(self._base, memory=None)
        else:
            self._too_few()

    def _too_few(self) -> None:
        """End the attempt: too few nodes are left for a restart."""
        with contextlib.suppress(OSError):
            record_too_few_nodes(self._attempt, self._places, there=self._there(), name=self._name, base=self._base)
        self._leave(EXIT_FAILED)

    def _hear_of_health(self, node: int, message: Message) -> None:
        if self._health is None:
            return
        self._health.hear(node, message)
        if message["kind"] == "health" and self._phase == "gathering":
            self._gather()

    def _leave_out_sick(self) -> bool:
        """Give up sick nodes; return False if the attempt ends for that reason before its first start."""
        if self._health is None:
            return True
        names = {node: self._name(node) for node in self._there()}
        sick, ends = self._health.look(names, self._places, ended_restart=self._current.number)
        if ends and not self._current.number:
            self._leave(EXIT_FAILED)
            return False
        for node, why in sick.items():
            self._dismiss(node, why, sick=True)
        return True

    def _look_for_end(self) -> None:
        """Check whether no rank of the restart is left; every agent that was told to end must say so."""
        waits, ended = self._places.nodes if self._phase == "running" else self._links, self._current.ended
        if len(ended) >= len(waits) and ended.issuperset(waits):  # compared with all nodes at the end alone
            self._all_gone()

    def _look_for_unended(self) -> None:
        """Give up nodes whose ranks do not end: others must not wait for them without end."""
        if time.monotonic() - self._current.told_to_end <= ENDING_SECONDS:
            return
        for node in sorted(self._links.keys() - self._current.ended):
            self._dismiss(node, f"its ranks have not ended within {ENDING_SECONDS:.0f} s", unended=True)
            self._say(f"{self._name(node)}: {self._places.lost[node].error}; it is given up")
        self._look_for_end()

    def _start(self, base: ResumePoint, *, memory: int | None, source: str = "disk") -> None:
        """Give out the next restart: from the copies in memory of iteration `memory`, or else from `base`."""
        start = base.iteration if memory is None else memory
        self._current = self._current.following(base=start, source=source, given_out=time.time())
        self._phase, self._hangs = "running", hang_detection.HangDetector()
        places = self._places.nodes
        place_of = {node: place for place, node in enumerate(places)}
        for node, link in self._links.items():
            link.send(
                "start",
                restart=self._current.number,
                place=place_of.get(node),
                nodes=len(places),
                base_iteration=base.iteration,
                base_path=base.path,
                memory=memory,
                address=self._name(places[0]) if self._places.spare else None,  # the first node rank may have moved
                port=self._heard.ports[places[0]],
            )

    def _dead(self, death: Death) -> None:
        if not death.code:
            return
        self._current.died(death)
        self._end()

    def _end(self) -> None:
        """Have all ranks of this restart ended, once."""
        if self._phase != "running":
            return
        self._phase, self._current.noticed, self._current.told_to_end = "ending", time.time(), time.monotonic()
        if self._between is not None:
            self._between.ended()
        for link in self._links.values():
            link.send("end", restart=self._current.number)
        if self._health is not None:  # behind the orders: five questions to each of thousands of nodes take a while
            self._health.ask_for_clocks(self._links, self._links)

    def _all_gone(self) -> None:
        if self._phase == "running":  # every rank left by itself, with exit code 0
            self._leave(0)
        elif self._phase == "ending":
            self._current.over = time.time()
            self._phase = "recording"
            self._look_for_records()

    def _look_for_records(self) -> None:
        """Conclude the restart when its records are complete; the ranks of a foreign program write none."""
        if self._between is not None:
            ended = self._current.ended
            nodes = [self._name(node) for node in self._places.nodes if node in ended and node in self._links]
            code = self._current.deaths[0].exit_code or EXIT_FAILED
            try:
                recorded = self._between.recorded(self._current.number, exit_code=code, nodes=nodes)
                if not (recorded and (self._asked or self._between.compared())):
                    return
            except (OSError, RelayrunError) as error:
                self._give_up(error)
                return
        self._conclude()

    def _give_up(self, error: OSError | RelayrunError) -> None:
        """End the attempt, because its records cannot be prepared for another restart."""
        number, deaths = self._current.number, self._current.deaths
        self._say(f"restart {number} failed, and no other one can begin: {error}")
        with contextlib.suppress(OSError):
            why = f"no other restart can begin: {error}"
            restarts.amend_failed_restart(self._attempt, number, again=False, reason=why)
        self._leave(deaths[0].exit_code if deaths else EXIT_FAILED)

    def _conclude(self) -> None:
        """Begin another restart or end the attempt; no rank lives."""
        try:
            self._leave_out_sick()
            found = conclude_restart(
                self._run,
                self._plan,
                self._attempt,
                self._current,
                self._places,
                there=self._links,
                name=self._name,
                asked=self._asked,
                between=self._between,
            )
        except (OSError, RelayrunError) as error:
            self._give_up(error)
            return
        for text in (*found.moved, found.failed.told):
            self._say(text)
        if found.failed.again:
            self._places.nodes = found.start.nodes
            self._start(found.start.base, memory=found.start.memory, source=found.start.source)
        else:
            self._leave(found.exit_code or EXIT_FAILED)

    def _stepped(self, stepped: float) -> None:
        """Add the measured times to the record of the restart before: the first step of this one is done."""
        number = self._current.number
        if number == 1:
            return
        changes = self._current.first_step(self._attempt, stepped)
        try:
            restarts.amend_failed_restart(self._attempt, number - 1, **changes)
        except OSError as error:
            self._say(f"what restart {number} took is not on record: {error}")
        self._say(f"restart {number}: the first step {changes['seconds']['all']:.1f} s after the failure")

    def _leave(self, code: int) -> None:
        self._phase, self.code = "leaving", code
        for link in self._links.values():
            link.send("leave", code=code)
