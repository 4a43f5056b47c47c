"""The real coordinator with 2,048 agents and spare ones: 16,384 ranks, none of which computes.

    python benchmarks/coordinator.py [--nodes 2048] [--spares 16] [--idle 20] [--quick]

The coordinator and its connections run in this process, in the loop of `agent.step_per_node`. Stand-ins of agents, in
at most eight processes, speak the real, authenticated protocol over loopback: hello, facts of the node, answers to
questions for the time, a heartbeat a second, copies in memory of 16 ranks at each end. Judged are CPU seconds, memory
and bytes of the coordinator; seconds by the clock are those of a machine whose processors the stand-ins use, too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import selectors
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # for the tests' made run directories

import _results  # noqa: E402

from relayrun.control.agent.authentication import AttemptKey, listen  # noqa: E402
from relayrun.control.agent.connections import AgentConnections  # noqa: E402
from relayrun.control.agent.coordinator import Coordinator  # noqa: E402
from relayrun.control.agent.hang_detection import RankActivity  # noqa: E402
from relayrun.control.agent.memory_copies import NodeMemoryCopy  # noqa: E402
from relayrun.control.agent.messages import MessageSocket  # noqa: E402
from relayrun.control.rundir import restarts  # noqa: E402
from relayrun.control.rundir.run import Run  # noqa: E402
from relayrun.files import append_line, raise_open_file_limit  # noqa: E402
from tests.history import began, history_plan  # noqa: E402
from tests.plans import plan_with  # noqa: E402

PROCESSES = 8
RANKS = 8
"""Ranks of a node."""
FACTS = {"shm": 1 << 38, "tmp": 1 << 38, "unwritable": {}, "open_files": 1 << 20, "gpus": [], "seconds": 0.1}
TCP_BYTES = struct.Struct("QQ")
"""Bytes sent and received, of Linux' tcp_info, at TCP_BYTES_AT."""
TCP_BYTES_AT = 120
WAIT_SECONDS = 300.0


class StandIns:
    """The agents of some nodes, in a process of their own; `talk`: orders of the benchmark and what was seen."""

    def __init__(self, address: tuple[str, int], key: AttemptKey, nodes: range, all_nodes: int, talk: Connection):
        raise_open_file_limit()
        self.nodes, self.all_nodes, self.talk = nodes, all_nodes, talk
        self.selector = selectors.DefaultSelector()
        self.links: dict[int, MessageSocket] = {}
        self.place: dict[int, int | None] = {}
        self.restart = 0
        self.standing: tuple[float, float] | None = None
        """Seconds without progress that heartbeats report, and the limit; None: ranks progress."""
        self.seen: dict[str, list[float]] = {}
        self.iteration = 0
        for node in nodes:
            while node not in self.links:
                lines = MessageSocket(socket.create_connection(address, timeout=WAIT_SECONDS))
                try:
                    key.join(lines, node)
                except EOFError:  # too many connections without a proof
                    lines.close()
                    time.sleep(0.1)
                    continue
                self.links[node] = lines
                lines.send("hello", name=f"n{node}", port=2000)
                lines.send("health", facts=FACTS)
                self.selector.register(lines, selectors.EVENT_READ, partial(self.read, node))
        self.selector.register(talk, selectors.EVENT_READ, self.ordered)

    def go(self) -> None:
        beat = time.monotonic()
        while self.links:
            for key, _ in self.selector.select(max(0.0, beat + 1 - time.monotonic())):
                key.data()
            if time.monotonic() - beat >= 1:
                beat += 1
                for node, lines in self.links.items():
                    lines.send("beat", restart=self.restart, standing=self.stands(node))
        self.talk.send(self.seen)

    def stands(self, node: int) -> list[RankActivity] | None:
        place = self.place.get(node)
        if self.standing is None or place is None:
            return None
        seconds, limit = self.standing
        return [
            RankActivity(rank, 12345, "forward", self.iteration, seconds, limit, "")
            for rank in range(place * RANKS, (place + 1) * RANKS)
        ]

    def read(self, node: int) -> None:
        lines = self.links[node]
        try:
            messages = lines.receive()
        except EOFError:
            self.leave(node)
            return
        for message in messages:
            kind = message["kind"]
            if kind in ("start", "end", "stacks", "leave"):
                self.seen.setdefault(kind, []).append(time.time())
            if kind == "clock":
                lines.send("clock", sent=message["sent"], here=time.time())
            elif kind == "start":
                self.restart, self.place[node], self.standing = message["restart"], message["place"], None
            elif kind == "end":
                self.ended(node, message["restart"])
            elif kind == "leave":
                self.leave(node)
                return

    def leave(self, node: int) -> None:
        self.selector.unregister(self.links[node])
        self.links.pop(node).close()

    def ended(self, node: int, restart: int) -> None:
        place, memory = self.place.get(node), list[NodeMemoryCopy]()
        if place is not None:
            before = (place - 1) % self.all_nodes
            for at, kept in ((place, False), (before, True)):
                ranks = range(at * RANKS, at * RANKS + RANKS)
                memory += [NodeMemoryCopy(rank, self.iteration, "5d41402abc4b2a76" * 2, kept) for rank in ranks]
        self.links[node].send("ended", restart=restart, memory=memory, port=2001, facts=FACTS)

    def ordered(self) -> None:
        what, value = self.talk.recv()
        if what == "iteration":
            self.iteration = value
        elif what == "standing":
            self.standing = value
        elif what == "seen":
            self.talk.send(self.seen)
            self.seen = {}
        elif what in ("kill", "lose", "ask", "exit"):
            for node in self.nodes if value is None else [value]:
                self.act(what, node)

    def act(self, what: str, node: int) -> None:
        if node not in self.links:
            return
        lines, place = self.links[node], self.place.get(node)
        self.seen.setdefault(what, []).append(time.time())
        if what == "kill":
            rank = (place or 0) * RANKS
            lines.send("dead", restart=self.restart, rank=rank, code=-9, error="", told=False)
        elif what == "lose":
            self.leave(node)
        elif what == "ask":
            lines.send("asked", why="SIGTERM")
        else:
            for rank in range((place or 0) * RANKS, (place or 0) * RANKS + RANKS) if place is not None else ():
                lines.send("dead", restart=self.restart, rank=rank, code=0, error="", told=False)
            self.ended(node, self.restart)


def stand_in(*arguments: Any) -> None:
    StandIns(*arguments).go()


class Bench:
    """The coordinator in this process, and the phases that are measured."""

    def __init__(self, folder: Path, nodes: int, spares: int) -> None:
        self.nodes, self.all_nodes = nodes, nodes + spares
        self.run = Run(folder / "run")
        self.run.path.mkdir()
        plan = plan_with(
            history_plan(self.run, total_steps=1000),
            nodes=nodes,
            spare_nodes=spares,
            ntasks_per_node=RANKS,
            recovery="node",
            node_health="warn",
        )
        began(self.run, 1)
        self.attempt = self.run.attempt(1)
        self.attempt.failures.mkdir()
        self.said: list[str] = []
        self.links: dict[int, MessageSocket] = {}
        names = [f"n{node}" for node in range(self.all_nodes)]
        self.coordinator = Coordinator(
            self.run, plan, self.attempt, nodes=len(names), names=names, links=self.links, say=self.said.append
        )
        key, listener = AttemptKey.of(self.attempt), listen("127.0.0.1", 0)
        self.reception = AgentConnections(
            self.coordinator, self.links, listener, key, self.attempt.refused_connections, self.said.append
        )
        self.selector = selectors.DefaultSelector()
        self.reception.watch(self.selector)
        self.talks: list[Connection] = []
        self.owner: dict[int, Connection] = {}
        self.processes = []
        each = -(-self.all_nodes // PROCESSES)
        context = multiprocessing.get_context("fork")
        for first in range(0, self.all_nodes, each):
            own, theirs = context.Pipe()
            some = range(first, min(first + each, self.all_nodes))
            arguments = (listener.getsockname()[:2], key, some, self.nodes, theirs)
            process = context.Process(target=stand_in, args=arguments, daemon=True)
            process.start()
            self.processes.append(process)
            self.talks.append(own)
            self.owner |= dict.fromkeys(some, own)

    def loop(self, done: Callable[[], bool], seconds: float = WAIT_SECONDS) -> bool:
        """Let the coordinator work until then; return whether it came to that."""
        until = time.monotonic() + seconds
        while not done():
            if (left := until - time.monotonic()) <= 0:
                return False
            for key, _ in self.selector.select(min(self.coordinator.pause, left)):
                key.data()
            self.reception.look()
        return True

    def tell(self, what: str, value: Any) -> None:
        for talk in self.talks:
            talk.send((what, value))

    def seen(self) -> dict[str, list[float]]:
        """Times at which agents heard and said things since the last look."""
        self.tell("seen", None)
        found: dict[str, list[float]] = {}
        for talk in self.talks:
            self.loop(talk.poll)
            for kind, times in talk.recv().items():
                found.setdefault(kind, []).extend(times)
        return found

    def bytes(self) -> int:
        """Bytes of all connections, both directions."""
        found = 0
        for lines in self.links.values():
            info = lines.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
            found += sum(TCP_BYTES.unpack_from(info, TCP_BYTES_AT))
        return found

    def started(self, number: int) -> bool:
        return self.coordinator._current.number == number and self.coordinator._phase == "running"

    def disturbed(self, what: str, act: Callable[[], None], number: int) -> dict[str, float]:
        """What a failure costs until every agent has the order to start again."""
        append_line(self.attempt.metrics, {"iteration": 10 * number})
        self.tell("iteration", 10 * number)
        self.seen()
        before, sent = time.process_time(), self.bytes()
        act()
        if not self.loop(lambda: self.started(number)):
            raise SystemExit(f"{what}: no other restart; {self.said[-5:]}")
        used, sent = time.process_time() - before, self.bytes() - sent
        self.loop(lambda: False, 2.0)
        times = self.seen()
        begin = min(min(times[key]) for key in ("kill", "lose", "stacks") if key in times)
        return {
            "cpu_seconds": used,
            "megabytes": sent / 1e6,
            "seconds_to_the_first_order_to_end": min(times["end"]) - begin,
            "seconds_to_the_last_order_to_end": max(times["end"]) - begin,
            "seconds_to_the_last_order_to_start": max(times["start"]) - begin,
        }

    def idle(self, seconds: float) -> dict[str, float]:
        """What heartbeats cost in a second."""
        before, sent, began_at = time.process_time(), self.bytes(), time.monotonic()
        self.loop(lambda: False, seconds)
        lasted = time.monotonic() - began_at
        return {
            "cpu_seconds_per_second": (time.process_time() - before) / lasted,
            "bytes_per_second": (self.bytes() - sent) / lasted,
        }

    def measure(self, idle: float) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        before, began_at = time.process_time(), time.monotonic()
        if not self.loop(lambda: self.started(1)):
            raise SystemExit(f"it has not started; {len(self.links)} agents, {self.said[-5:]}")
        figures["start"] = {"cpu_seconds": time.process_time() - before, "seconds": time.monotonic() - began_at}
        self.loop(lambda: False, 3.0)
        figures["idle"] = self.idle(idle)
        figures["death_of_a_rank"] = self.disturbed("death", lambda: self.owner[5].send(("kill", 5)), 2)
        lost = self.nodes // 2
        figures["loss_of_a_node"] = self.disturbed("loss", lambda: self.owner[lost].send(("lose", lost)), 3)
        assert self.nodes in self.coordinator._places.nodes, "the spare node trains"
        figures["hang"] = self.disturbed("hang", lambda: self.tell("standing", (301.0, 300.0)), 4)
        (words,) = {failed.words.partition(":")[0] for failed in restarts.read_failed_restarts(self.attempt)[-1:]}
        assert words == "hang", words
        self.tell("standing", (31.0, 300.0))  # steps of more than half a minute
        self.loop(lambda: False, 2.0)
        figures["long_steps"] = self.idle(idle / 2)
        self.tell("standing", None)
        self.loop(lambda: False, 2.0)
        before = time.process_time()
        self.tell("ask", None)
        self.tell("exit", None)
        self.loop(lambda: self.coordinator.code is not None)
        self.loop(lambda: not any(process.is_alive() for process in self.processes), 20.0)
        figures["stop"] = {"cpu_seconds": time.process_time() - before, "code": self.coordinator.code}
        status = Path("/proc/self/status").read_text()
        figures["memory_mb"] = int(status.partition("VmHWM:")[2].split()[0]) / 1024
        refused = self.reception._refused
        figures["refused_connections"] = 0 if refused is None else refused.count
        return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2048)
    parser.add_argument("--spares", type=int, default=16)
    parser.add_argument("--idle", type=float, default=20, help="seconds of heartbeats; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="32 nodes, once; writes no result")
    options = parser.parse_args()
    if options.quick:
        options.nodes, options.spares, options.idle, options.rounds = 32, 2, 2.0, 1
    turns = []
    for _ in range(options.rounds):
        with tempfile.TemporaryDirectory(prefix="coordinator-") as folder:
            bench = Bench(Path(folder), options.nodes, options.spares)
            try:
                turns.append(bench.measure(options.idle))
            finally:
                for process in bench.processes:
                    process.kill()
        print(turns[-1], flush=True)
    figures = _results.spreads(turns) | {
        "nodes": options.nodes,
        "spare_nodes": options.spares,
        "ranks": options.nodes * RANKS,
        "load_average": statistics.mean(os.getloadavg()),
    }
    print(figures if options.quick else _results.write("coordinator", figures))


if __name__ == "__main__":
    main()
