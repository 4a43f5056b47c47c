"""Workers are forks of a process with one thread, and share what it has loaded; otherwise they are spawned."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for

PROGRAM = """
import sys, threading, time
from relayrun.tokens.tokenize.processes import file_lock, use_one_thread, run_tasks

LOADED = []

def task(number):
    return number, len(LOADED)

if __name__ == "__main__":
    if sys.argv[1] == "job":
        import relayrun.tokens.tokenize.dump_jobs
    if sys.argv[1] == "stage":
        import relayrun.cli.data.dumps, relayrun.tokens.curate.dedup_jobs
    use_one_thread()
    if sys.argv[1] == "libraries":
        import numpy, pyarrow.parquet, relayrun.tokens.tokenize.pipeline
    if sys.argv[1] == "thread":
        threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
    LOADED.append("a tokenizer")
    print("once")
    with file_lock(sys.argv[2]):
        run_tasks(task, [1, 2, 3], 2, lambda item, result: print(*result), where="here")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "seen"), [("nothing", 1), ("libraries", 1), ("job", 1), ("stage", 1), ("thread", 0)])
def test_workers_share_what_is_loaded_where_there_is_one_thread(tmp_path: Path, what: str, seen: int) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, str(tmp_path / "program.py"), what, str(tmp_path / "lock")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert sorted(done.stdout.splitlines()) == [f"{number} {seen}" for number in (1, 2, 3)] + ["once"]


FORK = """
import os, sys
from relayrun.tokens.tokenize.processes import file_lock
with file_lock(sys.argv[1]):
    child = os.fork()
    if child == 0:
        sys.stdin.read()
    os._exit(0)
"""


def test_a_fork_that_outlives_its_parent_does_not_keep_the_lock(tmp_path: Path) -> None:
    from relayrun.tokens.tokenize.processes import file_lock

    command = [sys.executable, "-c", FORK, str(tmp_path / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as parent:
        assert parent.stdin is not None
        parent.wait(timeout=300)

        def free() -> bool:
            with file_lock(tmp_path / "lock", wait=False) as held:
                return held

        wait_for(free, words="the lock is free")  # the child may not have run at all yet
        parent.stdin.close()  # the child leaves
