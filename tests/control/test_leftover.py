"""Processes that the ranks of a local job leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.scheduler import local_srun
from tests.waiting import read_line, wait_for

WORKER = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "1000"], start_new_session=True)  # as torchrun starts its workers
with open(sys.argv[1] + ".new", "w") as file:
    file.write(str(child.pid))
os.rename(sys.argv[1] + ".new", sys.argv[1])
os.kill(os.getpid(), signal.SIGKILL)
"""


def gone(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.mark.slow
def test_what_a_killed_rank_had_started_ends_with_the_ranks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    handlers = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    handlers[signal.SIGQUIT] = signal.getsignal(signal.SIGQUIT)
    try:
        code = local_srun.start_tasks(1, [sys.executable, "-c", WORKER, str(tmp_path / "child")])
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code == 128 + signal.SIGKILL
    assert gone(int((tmp_path / "child").read_text()))
    assert "a process that the ranks left behind is ended: sleep 1000" in capfd.readouterr().err


@pytest.mark.slow
def test_others_are_left_alone() -> None:
    environment = os.environ | {"RELAYRUN_TEST": f"{os.getpid()}-a"}
    process = subprocess.Popen(["sleep", "1000"], env=environment)
    try:
        environ = Path(f"/proc/{process.pid}/environ")
        wait_for(lambda: b"RELAYRUN_TEST" in environ.read_bytes(), words="the environment that it has after its exec")
        assert local_srun.kill_leftover_processes({"RELAYRUN_TEST": f"{os.getpid()}-b"}) == []
        assert local_srun.kill_leftover_processes({"RELAYRUN_TEST": f"{os.getpid()}-a", "RELAYRUN_OTHER": None}) == []
        assert process.poll() is None
        assert local_srun.kill_leftover_processes({"RELAYRUN_TEST": None}) == ["sleep 1000"]
        assert process.wait(300) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_process_that_lives_on_keeps_its_children_too() -> None:
    environment = os.environ | {"RELAYRUN_TEST": f"{os.getpid()}-c"}
    forks = "import subprocess, sys, time; print(subprocess.Popen(['sleep', '1000']).pid, flush=True); time.sleep(1000)"
    command = [sys.executable, "-c", forks]
    processes = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    children = [int(read_line(process)) for process in processes]
    try:
        assert (
            len(local_srun.kill_leftover_processes({"RELAYRUN_TEST": f"{os.getpid()}-c"}, but={processes[0].pid})) == 2
        )
        assert [process.poll() is None for process in processes] == [True, False]
        assert [gone(child) for child in children] == [False, True]
        assert len(local_srun.kill_leftover_processes({"RELAYRUN_TEST": f"{os.getpid()}-c"})) == 2
    finally:
        for process in processes:
            process.kill()
            process.communicate(timeout=300)
