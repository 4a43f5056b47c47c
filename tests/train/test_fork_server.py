"""The server that forks ranks: whose end was its own, and what it has read for all of them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from relayrun.control.agent.messages import Message, MessageSocket
from relayrun.control.agent.rank_server import RankServer, StartedProcess
from relayrun.control.rundir.run import Run
from relayrun.train import __main__ as program
from relayrun.train import fork_server
from tests.history import began

ROOT = Path(__file__).resolve().parents[2]
ALONE = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
"""No GPU of this machine is touched."""


class Forks(RankServer):
    """Starts processes that wait for their end."""

    def start(self, order: Message) -> StartedProcess:
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(1)
        return StartedProcess(pid, partial(fork_server._wait, pid))


class Starts(RankServer):
    """The same, as programs; `subprocess` waits for its own."""

    def start(self, order: Message) -> StartedProcess:
        process = subprocess.Popen(["sleep", "600"])
        return StartedProcess(process.pid, process.wait)


@pytest.mark.parametrize("kind", [Forks, Starts])
def test_a_rank_that_was_killed_before_it_was_to_be_ended_is_told_as_one(kind: type[RankServer]) -> None:
    """The order to end it may come first: its neighbours see its connections close, and their agents are heard."""
    ours, theirs = socket.socketpair()
    server, agent = kind(theirs, Run(Path("nowhere"))), MessageSocket(ours)
    for rank in (0, 1):
        server._obey({"kind": "fork", "restart": 1, "rank": rank})
    children = list(server.descriptors())
    signal.pidfd_send_signal(children[0], signal.SIGKILL)
    select.select([children[0]], [], [], 60)
    server._obey({"kind": "end"})
    for fd in children:
        server._wait_for(fd)
    found = [(message["rank"], message["code"], message["told"]) for message in agent.receive()]
    agent.close()
    theirs.close()
    assert found == [(0, -signal.SIGKILL, False), (1, -signal.SIGKILL, True)]


def test_the_config_is_read_once_for_all_ranks_and_what_is_wrong_with_it_is_left_to_them(tmp_path: Path) -> None:
    run = Run(tmp_path / "run")
    fork_server.read_config(run)  # nothing has begun
    began(run, 1)
    fork_server.read_config(run)  # it has no config
    assert program.read_attempt_config.cache_info().currsize == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "asked", "refused"),
    [
        ("nvml", [], False),
        ("mig", ["_cuda_getDeviceCount"], True),
        ("asks", ["_lazy_init", "_get_device_properties"], True),
        ("none", ["_cuda_getDeviceCount"], False),
    ],
)
def test_its_imports_leave_cuda_alone_or_it_says_that_no_rank_could_use_it(
    kind: str, asked: list[str], refused: bool
) -> None:
    """torch keeps a fork from CUDA whose parent has so much as counted devices, and tells nobody but the fork.

    Where it counted none, no fork needs CUDA: plain pip takes the build for CUDA on a machine without a GPU, too.
    """
    script = Path(__file__).with_name("pretended_gpu.py")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", script, kind],
        cwd=ROOT,
        env=ALONE,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["megatron"] == (kind == "nvml")
    assert sorted(set(found["asked"])) == sorted(asked)
    assert ("CUDA was started, or counted its devices, while" in found["words"]) == refused, found["words"]
