"""The agent of one node: parent of its ranks, with one connection to the coordinator.

The agent forwards signals that are meant for the ranks (SIGUSR1: Python stacks; SIGUSR2, SIGTERM: save and leave)
and sets each rank's variables under the names of srun and torch. If the agent dies its ranks die with it.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from relayrun.control.agent import hang_detection, requests
from relayrun.control.agent.connections import AgentConnections
from relayrun.control.agent.coordinator import EXIT_FAILED
from relayrun.control.agent.health import BackgroundWork, LocalNodeHealth
from relayrun.control.agent.job_nodes import AGENT_BEAT_SECONDS
from relayrun.control.agent.memory_copies import (
    MEMORY_FOLDER_VARIABLE,
    MEMORY_ITERATION_VARIABLE,
    SHARED_MEMORY,
    make_memory_folder,
    read_copies,
)
from relayrun.control.agent.messages import Message, MessageSocket
from relayrun.control.agent.node_facts import NodeFacts
from relayrun.control.agent.rank_server import RankServerProcess
from relayrun.control.agent.restart import restart_ranks_exited_line
from relayrun.control.rundir import restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import RankFailure
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import local_srun
from relayrun.control.scheduler.local_srun import free_port
from relayrun.control.trainers.base import Trainer
from relayrun.leftovers import remove_leftovers

FORWARDED_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
"""Signals for the ranks of any program; a trainer may add others."""
MARK_VARIABLE = "RELAYRUN_AGENT"
"""Marks all processes of one agent's ranks, so that none of them survives into the next restart."""
FORK_SERVER_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's: the server must have one thread, as a fork has no other
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # libraries that ask for CUDA while they are imported must not start it
    "TORCH_GLOO_LAZY_INIT": "1",  # a group connects only ranks that talk; connecting all is the longest part
}
"""Default variables of a server that forks, and of its ranks."""
ERROR_WRITE_SECONDS = 10.0
"""Seconds to record the error of a server that could not import."""


class NodeAgent:
    """One node of an attempt.

    Args:
        node: number of this node in the job, from 0 on; name: its name.
        upward: connection to the coordinator.
        say: writes a line into the job's log.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        attempt: Attempt,
        trainer: Trainer,
        *,
        node: int,
        name: str,
        upward: MessageSocket,
        say: Callable[[str], None],
    ) -> None:
        self._plan, self._attempt, self._say = plan, attempt, say
        self._name = name
        self._handed_on = {*FORWARDED_SIGNALS, *trainer.asked_by}
        self._leave_signals = {signal.SIGTERM, trainer.leave_signal}
        self._forks = plan.trainer == "native"
        spare = plan.spare_nodes > 0 and node >= plan.nodes
        self._ranks = ranks_of_node(None if spare else node, plan.ntasks_per_node)
        self._world_size = 0
        self._keep_address = "MASTER_ADDR" in plan.environment
        """The site sets MASTER_ADDR, on whatever node rank 0 is."""
        self.orphaned = False
        """It left because the coordinator was gone."""
        self._beat = 0.0
        """Time of the last beat to the coordinator."""
        self._arguments = [f"--run-dir={run.path}", f"--attempt={attempt.number}"]
        self._upward = upward
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self._memory: Path | None = None
        """Folder for copies of the ranks' states."""
        self._server: RankServerProcess | None = None
        self._unable = ""
        """Error of the server's failed imports."""
        self._hung = ""
        """Reason for which the server is being killed."""
        self.restart = 0
        """The newest known restart, counted from 1."""
        self._alive: set[int] = set()
        self._told_to_end = False
        self._said_ended = 0
        """The restart whose end on this node the coordinator knows."""
        self._watch = selectors.DefaultSelector()
        self._watch.register(upward, selectors.EVENT_READ, self._from_coordinator)
        self._code: int | None = None
        self._aside = BackgroundWork(self._watch)
        self._health: LocalNodeHealth | None = None
        if plan.chain.node_health != "off":
            self._health = LocalNodeHealth(plan, self._arguments, attempt.path, aside=self._aside)
        self._stopped = hang_detection.StoppedProcesses()

    def run(self, reception: AgentConnections | None = None) -> int:
        """Run until the coordinator says leave, or is gone; return the exit code of this node. `reception`: connections
        of a coordinator in this process."""
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)
        for number in self._handed_on:
            signal.signal(number, lambda _number, _frame: None)
        self._watch.register(heard, selectors.EVENT_READ, lambda: self._signalled(os.read(heard, 64)))
        if reception is not None:
            reception.watch(self._watch)
        remove_leftovers(SHARED_MEMORY, shared=True)  # of an agent that was killed
        try:
            self._memory = make_memory_folder()
        except OSError as error:
            self._say(f"ranks have no room in memory: {error}")
        self._upward.send("hello", name=self._name, port=free_port(""))
        self._start_server()
        if self._health is not None:
            self._health.look(lambda facts: self._upward.send("health", facts=facts))
        while self._code is None:
            for key, _ in self._watch.select(AGENT_BEAT_SECONDS if reception is None else reception.coordinator.pause):
                key.data()
            if time.monotonic() - self._beat >= AGENT_BEAT_SECONDS:
                self._beat = time.monotonic()
                self._aside.attend()
                self._look_at_server()
                self._upward.send("beat", restart=self.restart, standing=self._standing())
            if reception is not None:
                reception.look()
        if reception is not None:
            reception.close()
        if self._health is not None:
            self._health.end()
        if self._server is not None:
            self._server.end()
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
        return self._code

    def _start_server(self) -> None:
        defaults = FORK_SERVER_ENVIRONMENT if self._forks else {}
        environment = {name: value for name, value in defaults.items() if name not in os.environ}
        environment[MARK_VARIABLE] = self._mark  # also of processes that ranks fork, which keep this environment
        self._server = server = RankServerProcess(self._plan.fork_server, environment, ignored=self._handed_on)
        self._watch.register(server.lines, selectors.EVENT_READ, partial(self._from_server, server))
        self._watch.register(server.ends, selectors.EVENT_READ, partial(self._server_ended, server))

    def _look_at_server(self) -> None:
        """Kill a server that hangs; the rest happens as after any death of it."""
        if self._server is None or self._hung:
            return
        # before the supervisor takes it for a hang of no known rank
        self._hung = self._server.hangs(import_seconds=self._plan.chain.start_timeout / 2)
        if self._hung:
            self._say(f"{self._hung}; it is killed")
            self._server.kill()

    def _server_ended(self, server: RankServerProcess) -> None:
        """Read the last messages of the server: processes of its ranks may hold its socket open."""
        more = select.poll()
        more.register(server.lines, select.POLLIN)
        while self._server is server and more.poll(0):
            self._from_server(server)
        if self._server is server:
            self._server_gone()

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if self._server is not None:
                self._server.lines.send("signal", number=number)
            if number in self._leave_signals:
                self._upward.send("asked", why=signal.Signals(number).name)

    def _from_coordinator(self) -> None:
        try:
            messages = self._upward.receive()
        except EOFError:
            self._say("the coordinator is gone; ending the ranks")
            self._code, self.orphaned = EXIT_FAILED, True
            return
        for message in messages:
            if message["kind"] == "start":
                self._start(message)
            elif message["kind"] == "end":
                self._told_to_end, self.restart = True, message["restart"]
                if self._health is not None:
                    self._health.ranks_end()
                if self._alive and self._server is not None:
                    self._server.end_ranks()
                else:
                    self._ended()
            elif message["kind"] == "requests":
                if self._memory is not None:
                    requests.tell_ranks(self._memory, asked=message["asked"])
            elif message["kind"] == "stacks":
                if self._server is not None:
                    self._server.lines.send("signal", number=int(signal.SIGUSR1))
            elif message["kind"] == "clock":
                self._upward.send("clock", sent=message["sent"], here=time.time())
            elif message["kind"] == "leave":
                self._code = int(message["code"])

    def _standing(self) -> list[hang_detection.RankActivity] | None:
        """Return the activity of the ranks if none has progressed for a while; None if one has, or not all began."""
        if self._memory is None or len(self._alive) < len(self._ranks):
            return None
        found = hang_detection.read_activity(self._memory, self._ranks, self._stopped)
        quiet = all(one.seconds > min(one.limit, hang_detection.QUIET_SECONDS) for one in found)
        return found if found and len(found) == len(self._ranks) and quiet else None

    def _start(self, message: Message) -> None:
        self._ranks = ranks_of_node(message["place"], self._plan.ntasks_per_node)
        self._world_size = message["nodes"] * self._plan.ntasks_per_node
        self.restart, self._told_to_end, self._alive = message["restart"], False, set(self._ranks)
        if self._server is None:
            self._start_server()
        assert self._server is not None
        self._stopped = hang_detection.StoppedProcesses()
        if self._memory is not None:
            hang_detection.remove_pages(self._memory)
        arguments = [*self._arguments, f"--base-iteration={message['base_iteration']}"]
        arguments += [] if message["base_path"] is None else [f"--base-path={message['base_path']}"]
        if self.restart == 1:
            arguments = list(self._arguments)
        for rank in self._ranks:
            environment = self._rank_environment(rank, message)
            self._server.lines.send(
                "fork", restart=self.restart, rank=rank, arguments=arguments, environment=environment
            )

    def _rank_environment(self, rank: int, start: Message) -> dict[str, str]:
        """Return the variables of this rank. `start`: the coordinator's order."""
        size, local = str(self._world_size), str(rank - self._ranks[0])
        found = {
            "RANK": str(rank),
            "LOCAL_RANK": local,
            "WORLD_SIZE": size,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": local,
            "SLURM_NTASKS": size,
            "MASTER_PORT": str(start["port"]),
            restarts.RESTART_VARIABLE: str(start["restart"]),
            MEMORY_FOLDER_VARIABLE: str(self._memory or ""),
            MEMORY_ITERATION_VARIABLE: "" if start["memory"] is None else str(start["memory"]),
            MARK_VARIABLE: self._mark,
        }
        if "SLURM_NODEID" in os.environ:
            found["SLURM_NODEID"] = str(rank // self._plan.ntasks_per_node)
        if start["address"] is not None and not self._keep_address:
            found["MASTER_ADDR"] = start["address"]
        return found

    def _from_server(self, server: RankServerProcess) -> None:
        if self._server is not server:  # it has gone in this turn
            return
        try:
            messages = server.lines.receive()
        except EOFError:
            self._server_gone()
            return
        for message in messages:
            if message["kind"] == "dead":
                self._alive.discard(message["rank"])
                self._say_dead(message["rank"], message["code"], told=message["told"])
            elif message["kind"] == "serving":
                server.serves(int(message["pid"]))
            elif message["kind"] == "unable":
                self._unable = str(message["error"])
            elif message["kind"] in ("started", "stepped"):
                self._upward.send(**message)
        if not self._alive and self.restart and any(message["kind"] == "dead" for message in messages):
            server.ranks_ended()
            self._ended()

    def _server_gone(self) -> None:
        """Handle the death of the server, with which all its ranks die; the next restart starts another server."""
        assert self._server is not None
        self._watch.unregister(self._server.lines)
        self._watch.unregister(self._server.ends)
        code, self._server = self._server.gone(), None
        error, self._unable, hung, self._hung = self._unable, "", self._hung, ""
        number = self.restart
        if not error:
            self._say_server_gone(number, code, hung or f"the server that forks ranks ended ({code})")
            return
        failures = [RankFailure(rank=rank, node=self._name, error=error, time=time.time()) for rank in self._ranks]

        def write() -> None:
            for failure in failures:  # as each of them would have said
                with contextlib.suppress(OSError):  # on a full disk the log has the words
                    failure.write(self._attempt.failures / f"rank-{failure.rank:04}.json")

        self._aside.start(
            write,
            lambda _: self._say_server_gone(number, code, error),
            seconds=ERROR_WRITE_SECONDS,
            otherwise=lambda _: None,
        )

    def _say_server_gone(self, number: int, code: int, error: str) -> None:
        if number != self.restart:  # another one was given out before the words were written down
            return
        if self._alive or not number:
            self._alive.clear()
            self._say_dead(-1, code or EXIT_FAILED, error=error, told=self._told_to_end)
        self._ended()

    def _say_dead(self, rank: int, code: int, *, told: bool, error: str = "") -> None:
        self._upward.send("dead", restart=self.restart, rank=rank, code=code, error=error, told=told)

    def _ended(self) -> None:
        if self._said_ended == self.restart:
            return
        self._said_ended = self.restart
        number, server = self.restart, set[int]() if self._server is None else set(self._server.pids)
        again = self._told_to_end or self._server is None  # and no other restart must begin beside them
        patience = math.inf if again else local_srun.LEFTOVER_PATIENCE_SECONDS
        self._aside.start(
            lambda: local_srun.kill_leftover_processes({MARK_VARIABLE: self._mark}, but=server, patience=patience),
            lambda commands: self._none_left(number, commands),
            seconds=math.inf,  # the coordinator knows when it has waited long enough
            otherwise=lambda _: [],
        )

    def _none_left(self, number: int, commands: Sequence[str]) -> None:
        """Report that no process of this restart's ranks lives here."""
        if number != self.restart:
            return
        for command in commands:
            self._say(f"a process that the ranks left behind is ended: {command}")
        if not self._forks:  # after all output of the ranks, which uses the same streams
            words = restart_ranks_exited_line(self.restart)
            self._say(words)
            with contextlib.suppress(OSError):
                print(f"\n[relayrun {self._name}] {words}", flush=True)
        if self._health is not None:
            self._health.look_between(self._say_ended)
        else:
            self._say_ended({})

    def _say_ended(self, facts: NodeFacts) -> None:
        copies = [] if self._memory is None else read_copies(self._memory)
        self._upward.send("ended", restart=self.restart, memory=copies, port=free_port(""), facts=facts)


def ranks_of_node(place: int | None, ranks_per_node: int) -> range:
    """Return the ranks of the agent with this node rank; none for a spare node."""
    return range(0) if place is None else range(place * ranks_per_node, (place + 1) * ranks_per_node)
