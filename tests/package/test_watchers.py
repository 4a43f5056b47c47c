"""A test run that is killed leaves nothing behind."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import wait_for
from tests.watchers import end_watcher, start_watcher

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, time
from tests.watchers import undone_by
with undone_by("touch", sys.argv[1]):
    print("inside", flush=True)
    time.sleep(float(sys.argv[2]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_what_a_killed_process_has_begun_is_undone(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", RUN, str(undone := tmp_path / "undone"), "600"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"inside\n"
        assert not undone.exists()
        process.send_signal(number)
    wait_for(undone.exists, 60)


def test_a_process_that_ends_its_watcher_has_undone_all_itself(tmp_path: Path) -> None:
    undone = tmp_path / "undone"
    subprocess.run([sys.executable, "-c", RUN, str(undone), "0"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    watcher = start_watcher("touch", undone)
    end_watcher(watcher)
    assert watcher.returncode == -signal.SIGKILL
    assert not undone.exists()
