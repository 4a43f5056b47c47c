"""The agent of one node: parent of its ranks, with one connection to the coordinator.

Signals that ask the ranks for something (SIGUSR1: Python stacks; SIGUSR2, SIGTERM: save and leave) are handed on to
them. An agent that dies takes its ranks with it.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from relayrun.agent.coordinator import FAILED
from relayrun.agent.lines import Lines, Message
from relayrun.agent.memory import FOLDER, ITERATION, PLACE, held, make_folder
from relayrun.agent.reception import Reception
from relayrun.agent.server import ForkServer
from relayrun.files import remove_leftovers
from relayrun.rundir import rounds
from relayrun.rundir.attempt import Attempt
from relayrun.rundir.records import Failure
from relayrun.scheduler import leftover

HANDED_ON = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
MARK = "RELAYRUN_AGENT"
"""Marks what the ranks of one agent start, so that nothing of it lives on beside the next round."""
LOOK_SECONDS = 1.0
"""Between two looks of the coordinator for what nobody sends a message of."""
ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",  # numpy's: the server must have one thread, as a fork has no other
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # libraries that ask for CUDA while they are imported must not start it
}
"""What the server and its ranks have, where nothing else is set."""


class Agent:
    """One node of an attempt.

    Args:
        hello: what the coordinator is told first: the number of this node in the job, from 0 on, its name, the job.
        ranks: numbers of its ranks, rising. world_size: ranks of the whole job.
        server: the command of the server that forks ranks. arguments: of the program that each of them becomes.
        upward: to the coordinator.
        say: writes a line into the job's log.
    """

    def __init__(
        self,
        attempt: Attempt,
        *,
        hello: Message,
        ranks: Sequence[int],
        world_size: int,
        server: Sequence[str],
        arguments: Sequence[str],
        upward: Lines,
        say: Callable[[str], None],
    ) -> None:
        self._attempt, self._hello, self._say = attempt, hello, say
        self._ranks, self._world_size = ranks, world_size
        self._command, self._arguments = server, arguments
        self._upward = upward
        self._mark = f"{os.getpid()}-{time.time_ns()}"
        self._memory: Path | None = None
        """Where the ranks keep copies of their state."""
        self._server: ForkServer | None = None
        self._unable = ""
        """What the server said of imports that failed."""
        self._round = 0
        self._alive: set[int] = set()
        self._told_to_end = False
        self._said_ended = 0
        """The round of which the coordinator knows that none of its ranks lives here."""
        self._watch = selectors.DefaultSelector()
        self._watch.register(upward, selectors.EVENT_READ, self._from_coordinator)
        self._code: int | None = None

    def run(self, reception: Reception | None = None) -> int:
        """Until the coordinator says leave, or is gone; return the exit code of this node.

        `reception`: of the coordinator, where it lives in this process.
        """
        heard, told = os.pipe()
        os.set_blocking(told, False)
        signal.set_wakeup_fd(told)
        for number in HANDED_ON:
            signal.signal(number, lambda _number, _frame: None)
        self._watch.register(heard, selectors.EVENT_READ, lambda: self._signalled(os.read(heard, 64)))
        if reception is not None:
            reception.watch(self._watch)
        remove_leftovers(PLACE, shared=True)  # of an agent that was killed
        try:
            self._memory = make_folder()
        except OSError as error:
            self._say(f"ranks have no room in memory: {error}")
        self._upward.send("hello", **self._hello)
        self._start_server()
        while self._code is None:
            for key, _ in self._watch.select(None if reception is None else LOOK_SECONDS):
                key.data()
            if reception is not None:
                reception.look()
        if self._server is not None:
            self._server.end()
        if self._memory is not None:
            shutil.rmtree(self._memory, ignore_errors=True)
        return self._code

    def _start_server(self) -> None:
        environment = {name: value for name, value in ENVIRONMENT.items() if name not in os.environ}
        self._server = ForkServer(self._command, environment)
        self._watch.register(self._server.lines, selectors.EVENT_READ, self._from_server)

    def _signalled(self, numbers: bytes) -> None:
        for number in numbers:
            if self._server is not None:
                self._server.lines.send("signal", number=number)
            if number != signal.SIGUSR1:
                self._upward.send("asked", why=signal.Signals(number).name)

    def _from_coordinator(self) -> None:
        try:
            messages = self._upward.receive()
        except EOFError:
            self._say("the coordinator is gone; ending the ranks")
            self._code = FAILED
            return
        for message in messages:
            if message["kind"] == "start":
                self._start(message)
            elif message["kind"] == "end":
                self._told_to_end = True
                if self._alive and self._server is not None:
                    self._server.lines.send("end")
                else:
                    self._ended()
            elif message["kind"] == "leave":
                self._code = int(message["code"])

    def _start(self, message: Message) -> None:
        self._round, self._told_to_end, self._alive = message["round"], False, set(self._ranks)
        if self._server is None:
            self._start_server()
        assert self._server is not None
        arguments = [*self._arguments, f"--base-iteration={message['base_iteration']}"]
        arguments += [] if message["base_path"] is None else [f"--base-path={message['base_path']}"]
        for rank in self._ranks:
            self._server.lines.send(
                "fork",
                round=self._round,
                rank=rank,
                arguments=arguments if self._round > 1 else list(self._arguments),
                environment=self._environment(rank, port=message["port"], memory=message["memory"]),
            )

    def _environment(self, rank: int, *, port: int, memory: int | None) -> Mapping[str, str]:
        """What differs between ranks and rounds, under the names that srun and torch give it."""
        local, size = str(rank - self._ranks[0]), str(self._world_size)
        return {
            "RANK": str(rank),
            "LOCAL_RANK": local,
            "WORLD_SIZE": size,
            "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": local,
            "SLURM_NTASKS": size,
            "MASTER_PORT": str(port),
            rounds.VARIABLE: str(self._round),
            MARK: self._mark,
            FOLDER: str(self._memory or ""),
            ITERATION: "" if memory is None else str(memory),
        }

    def _from_server(self) -> None:
        assert self._server is not None
        try:
            messages = self._server.lines.receive()
        except EOFError:
            self._server_gone()
            return
        for message in messages:
            if message["kind"] == "dead":
                self._alive.discard(message["rank"])
                self._say_dead(message["rank"], message["code"])
            elif message["kind"] == "unable":
                self._unable = str(message["error"])
            elif message["kind"] in ("started", "stepped"):
                self._upward.send(**message)
        if not self._alive and self._round:
            self._ended()

    def _server_gone(self) -> None:
        """With it all its ranks; the next round starts another one."""
        assert self._server is not None
        self._watch.unregister(self._server.lines)
        code, self._server = self._server.gone(), None
        error = f"the server that forks ranks ended ({code})"
        if self._unable:
            error = self._unable
            for rank in self._ranks:  # as each of them would have said
                failure = Failure(rank=rank, node=self._hello["name"], error=error, time=time.time())
                with contextlib.suppress(OSError):  # on a full disk the log has the words
                    failure.write(self._attempt.failures / f"rank-{rank:04}.json")
        self._unable = ""
        if self._alive or not self._round:
            self._alive.clear()
            self._say_dead(-1, code or FAILED, error)
        self._ended()

    def _say_dead(self, rank: int, code: int, error: str = "") -> None:
        self._upward.send("dead", round=self._round, rank=rank, code=code, error=error, told=self._told_to_end)

    def _ended(self) -> None:
        if self._said_ended == self._round:
            return
        self._said_ended = self._round
        for command in leftover.end({MARK: self._mark}):
            self._say(f"a process that the ranks left behind is ended: {command}")
        copies = [] if self._memory is None else held(self._memory)
        self._upward.send("ended", round=self._round, memory=copies)
