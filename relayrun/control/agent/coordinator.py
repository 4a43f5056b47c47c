"""The agreement of the agents on restarts.

It lives in the agent of the job's first node or, where there are spare nodes, beside the batch script
(`agent.step_per_node`).

    agent → coordinator    hello {port, probe_port} · dead {restart, rank, code, error, told}
                           · ended {restart, memory, port, facts}
                           · asked {why} · beat {restart, standing} · started, stepped {restart, ...} (rank 0's words)
    coordinator → agent    start {restart, place, nodes, base_iteration, base_path, memory, address, port}
                           · end {restart} · stacks: ask the ranks for their Python stacks · leave {code}
                           · requests {asked}, to rank 0's, each second

A restart: a rank dies, a node is lost, or the supervisor finds that nothing moves → every agent ends its ranks and says
when none is left → `decisions` judges → the records are made ready → every agent starts its ranks again. Messages of a
restart that is over are not heard.

Where nodes are looked at, `health` has further messages. A sick node is given up before the first start or another.

Each agent has a *place*: the number by which its ranks are counted; a spare one has none. An agent that says nothing
is given up with its node, and not heard again. Its place goes to a spare one in the next restart.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from relayrun.config.sections.chain import ChainSection
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
from relayrun.control.rundir.records import Hang
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError, RunDirError

EXIT_FAILED = 1
"""Exit code of the agents where no rank's own says why the attempt failed."""
GATHER_SECONDS = 60.0
"""How long the first start waits for the rest, when enough nodes are there. The rest are spare ones when they come."""
LONGEST_GATHER_SECONDS = 300.0
"""How long it waits where they are not enough; then those that have not come are given up."""
ENDING_SECONDS = 60.0
"""How long the ranks of a node may take to end; then it is given up. One that waits in the kernel does not end."""


class Coordinator:
    """Gives out rounds to the agents of an attempt.

    Args:
        nodes: how many nodes train. spare_nodes: how many more there are. elastic_nodes: smaller numbers of nodes with
            which training may go on.
        ranks_per_node: of each node that trains.
        names: of the nodes, as far as they are known before their agents say hello.
        links: to the agents, by node number; filled by who accepts their connections, before their `hello`.
        say: writes a line into the job's log.
        chain: the settings of the run's jobs.
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
        links: dict[int, MessageSocket],
        say: Callable[[str], None],
        chain: ChainSection,
        health: JobHealth | None = None,
        between: ForeignRestart | None = None,
    ) -> None:
        self._between, self._health = between, health
        begin = attempt.read_begin()
        if begin is None:
            raise RunDirError("this attempt has not begun", where=attempt.begin)
        self._run, self._attempt, self._links, self._say = run, attempt, links, say
        self._places = NodeRanks(nodes, spare=spare_nodes, elastic=elastic_nodes)
        self._heard = AgentContacts(names or {})
        self.code: int | None = None
        """The exit code of the attempt, when all agents have been told to leave."""
        self._ranks_per_node, self._chain = ranks_per_node, chain
        self._base = ResumePoint(iteration=begin.base_iteration, path=begin.base_path)
        self._phase: Literal["gathering", "measuring", "running", "ending", "recording", "leaving"] = "gathering"
        self._current = CurrentRestart(base=self._base.iteration)
        self._asked = ""
        self._hangs = hang_detection.HangDetector()
        self._requests = Requests(run, attempt, of_ranks=between is None, say=say)

    def hear(self, node: int, message: Message) -> None:
        """Take a message of the agent of this node."""
        kind = message["kind"]
        if node in self._places.lost:  # it has been told to leave
            return
        self._heard.word(node)
        if kind == "hello":
            self._hello(node, message)
        elif kind == "asked":
            self.ask(str(message.get("why")))
        elif kind in ("health", "clock", "probing", "probed"):
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
                self._health.hear(node, {"kind": "health", "facts": message["facts"]}, name=self._name(node))
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
        """Now and then: see whether nothing moves any more, by where the ranks stand or by the supervisor's word."""
        if self._phase == "running":
            self._look_for_hang()
        if self._requests.look():
            if self._places.nodes and (link := self._links.get(self._places.nodes[0])) is not None:
                link.send("requests", asked=self._requests.asked)
            if self._requests.hang is not None and self._phase in ("running", "measuring"):
                self._hung(self._requests.hang)
        if self._phase == "gathering":
            self._gather()
        elif self._phase == "ending":
            self._look_for_unended()
        elif self._phase == "measuring":
            self._look_for_probes()
        elif self._phase == "recording":
            self._look_for_records()
        elif self._phase == "running" and not self._current.stepped and self._between is not None:
            with contextlib.suppress(OSError):
                if (stepped := self._between.first_step(after=self._current.base)) is not None:
                    self._stepped(stepped)

    @property
    def pause(self) -> float:
        """Seconds after which `look` is to be called again."""
        return RECORD_PAUSE if self._phase == "recording" else AGENT_BEAT_SECONDS

    def _look_for_hang(self) -> None:
        found, ask = self._hangs.look(self._places.nodes, ranks=len(self._places.nodes) * self._ranks_per_node)
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
        if self._phase == "measuring":  # before any rank
            self._leave(EXIT_FAILED)
            return
        who = hang.culprit
        node = None if who is None else self._places.at(who // self._ranks_per_node)
        name = "" if node is None else self._name(node)
        self._dead(Death(rank=-1, node=name, code=EXIT_FAILED, error=hang.words, late=who))

    def silent(self) -> list[tuple[int, float]]:
        """Nodes whose agents have said nothing for too long, with the seconds; to be asked for at each beat."""
        silent = [] if self._phase == "leaving" else self._heard.silent(self._links)
        return [(node, SILENT_BEATS * AGENT_BEAT_SECONDS) for node in silent]

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
        if self._phase in ("gathering", "measuring"):
            self._say(f"{self._name(node)}: {why}, before the first start")
            if self._places.left < self._places.wanted:
                self._say(f"{self._places.wanted} nodes are to train, and {self._places.left} are left")
            if self._phase == "gathering":
                self._gather()
            else:
                self._look_for_probes()
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
        """Give up a node whose agent may be there; `kind`: `sick` or `unended`."""
        self._give_up_node(node, why, **kind)
        if (link := self._links.pop(node, None)) is not None:
            link.send("leave", code=EXIT_FAILED)

    def _name(self, node: int) -> str:
        return self._heard.name(node)

    def _gather(self) -> None:
        """Begin the first start when all nodes are there that may still come, or those that are there must do."""
        there = [node for node in self._there() if self._health is None or self._health.knows(node)]
        places, waited = self._places, time.monotonic() - self._heard.greeted
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
            elif self._leave_out_sick() and not self._measure():
                self._first_start()

    def _there(self) -> list[int]:
        """Nodes that have said hello, and are not given up; those last that came late."""
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
        """End the attempt, in which no restart can begin."""
        with contextlib.suppress(OSError):
            record_too_few_nodes(self._attempt, self._places, there=self._there(), name=self._name, base=self._base)
        self._leave(EXIT_FAILED)

    def _hear_of_health(self, node: int, message: Message) -> None:
        if self._health is None:
            return
        self._health.hear(node, message, name=self._name(node))
        if message["kind"] == "health" and self._phase == "gathering":
            self._gather()
        elif message["kind"] == "probed" and self._phase == "measuring":
            self._look_for_probes()

    def _measure(self) -> bool:
        """Have the nodes measured before the first start; False where nobody looks."""
        there = self._there()
        if self._health is None:
            return False
        self._phase = "measuring"
        address = self._name(there[0]) if self._places.outlive_nodes else None
        self._health.probe(self._links, there, address=address, port=self._heard.probe_ports[there[0]])
        return True

    def _look_for_probes(self) -> None:
        """Begin the first start when all nodes have been measured; or end, where too few are left."""
        assert self._health is not None
        if self._health.probed(self._there()) and self._leave_out_sick():
            self._first_start()

    def _leave_out_sick(self) -> bool:
        """Give up the nodes that are sick; return False where the attempt ends with that before its first start."""
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
        """See whether none of the restart's ranks is left. Every agent is waited for that was told to end."""
        waits = self._places.nodes if self._phase == "running" else self._links
        if self._current.ended.issuperset(waits):
            self._all_gone()

    def _look_for_unended(self) -> None:
        """Give up the nodes whose ranks do not end: others must not wait for them for ever."""
        if time.monotonic() - self._current.told_to_end <= ENDING_SECONDS:
            return
        for node in sorted(self._links.keys() - self._current.ended):
            self._dismiss(node, f"its ranks have not ended within {ENDING_SECONDS:.0f} s", unended=True)
            self._say(f"{self._name(node)}: {self._places.lost[node].error}; it is given up")
        self._look_for_end()

    def _start(self, base: ResumePoint, *, memory: int | None, source: str = "disk") -> None:
        """Give out the next restart: from copies in memory of iteration `memory`, or else from `base`."""
        start = base.iteration if memory is None else memory
        self._current = self._current.following(base=start, source=source, given_out=time.time())
        self._phase, self._hangs = "running", hang_detection.HangDetector()
        places = self._places.nodes
        for node, link in self._links.items():
            link.send(
                "start",
                restart=self._current.number,
                place=places.index(node) if node in places else None,
                nodes=len(places),
                base_iteration=base.iteration,
                base_path=base.path,
                memory=memory,
                address=self._name(places[0]) if self._places.outlive_nodes else None,
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
        if self._health is not None:
            self._health.ask_for_clocks(self._links, self._links)
        for link in self._links.values():
            link.send("end", restart=self._current.number)

    def _all_gone(self) -> None:
        if self._phase == "running":  # every rank left by itself, with exit code 0
            self._leave(0)
        elif self._phase == "ending":
            self._current.over = time.time()
            self._phase = "recording"
            self._look_for_records()

    def _look_for_records(self) -> None:
        """Conclude the restart when all that it left is on record; the ranks of a foreign program write none."""
        if self._between is not None:
            ended = self._current.ended
            nodes = [self._name(node) for node in self._places.nodes if node in ended and node in self._links]
            code = self._current.deaths[0].exit_code or EXIT_FAILED
            try:
                if not self._between.recorded(self._current.number, exit_code=code, nodes=nodes):
                    return
            except (OSError, RelayrunError) as error:
                self._give_up(error)
                return
        self._conclude()

    def _give_up(self, error: OSError | RelayrunError) -> None:
        """End the attempt, since its records cannot be made ready for another restart."""
        number, deaths = self._current.number, self._current.deaths
        self._say(f"restart {number} failed, and no other one can begin: {error}")
        with contextlib.suppress(OSError):
            restarts.amend_failed_restart(
                self._attempt, number, again=False, reason=f"no other restart can begin: {error}"
            )
        self._leave(deaths[0].exit_code if deaths else EXIT_FAILED)

    def _conclude(self) -> None:
        """No rank lives: begin another restart, or end the attempt."""
        try:
            self._leave_out_sick()
            found = conclude_restart(
                self._run,
                self._attempt,
                self._current,
                self._places,
                there=self._links,
                name=self._name,
                ranks_per_node=self._ranks_per_node,
                asked=self._asked,
                chain=self._chain,
                between=self._between,
            )
        except (OSError, RelayrunError) as error:
            self._give_up(error)
            return
        for text in (*found.moved, found.failed.told):
            self._say(text)
        if found.failed.again:
            self._places.nodes = list(found.nodes)
            self._start(found.base, memory=found.memory, source=found.source)
        else:
            self._leave(found.exit_code or EXIT_FAILED)

    def _stepped(self, stepped: float) -> None:
        """The first step of a restart is done: add to the record of the one before what getting back took."""
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
