"""The real training program on several nodes, all of them this machine: copies of the state with a neighbour."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from tests.workspace import Workspace, ends

from .test_local_recovery import SETTINGS, assert_same_run, with_kills
from .test_local_training import ROOT, submit

pytestmark = [pytest.mark.slow, pytest.mark.long]


def nodes(count: int, *kills: str, ranks: int = 1, **checkpoint: Any) -> dict[str, Any]:
    """Settings of nodes with so many ranks each, which copy their state after each iteration."""
    return with_kills(*kills) | {
        "job": {"nodes": count, "ntasks_per_node": ranks},
        "checkpoint": SETTINGS["checkpoint"] | {"memory_interval": 1} | checkpoint,
    }


def sources(run: Run) -> list[tuple[str, int, int]]:
    """Return for each failed restart where the next one had its state from, which iteration, steps computed again."""
    return [
        (failed.source, failed.next_iteration, failed.steps_lost)
        for failed in restarts.read_failed_restarts(run.attempt(1))
    ]


def undisturbed(workspace: Workspace, ranks: int) -> Run:
    whole = submit(workspace.config("whole", **SETTINGS, job={"ntasks_per_node": ranks}))
    assert whole.returncode == 0, whole.stderr
    return workspace.run("whole")


def test_ranks_of_a_lost_node_go_on_from_the_neighbours_copies_and_never_from_changed_ones(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    reference = undisturbed(workspace, 2)
    kills = (
        "1:1:lose:4",
        "2:0:lose:7",
        "3:0:spoil:9",
        "4:1:spoil-all:14",
        "5:1:update:17",
        "6:0:send:18",
        "7:0:lose:20",
    )
    done = submit(workspace.config("killed", **nodes(2, *kills)))
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    assert sources(run) == [
        ("neighbour", 3, 0),
        ("neighbour", 6, 0),
        ("neighbour", 8, 0),  # its own was changed
        ("disk", 10, 3),  # both were changed
        ("memory", 16, 0),
        ("memory", 17, 0),  # what was on its way to the neighbour is not kept, and its own is whole
        ("neighbour", 19, 0),
    ]
    assert_same_run(run, reference)
    for rank in (0, 1):
        folder = Path((run.path / f"memory-folder-{rank}").read_text())
        assert folder.parent == Path("/dev/shm")
        assert not folder.exists()


def test_ranks_that_share_a_node_find_their_weights_in_each_others_copies(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    reference = undisturbed(workspace, 4)
    kills = ("1:3:lose:4", "2:0:update:7", "3:1:spoil:9", "4:2:spoil-all:14", "5:0:lose:18")
    done = submit(workspace.config("killed", **nodes(2, *kills, ranks=2)))
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    assert sources(run) == [
        ("neighbour", 3, 0),
        ("memory", 6, 0),
        ("neighbour", 8, 0),
        ("disk", 10, 3),
        ("neighbour", 17, 0),
    ]
    assert_same_run(run, reference)


def test_two_nodes_lost_at_once_go_on_from_their_neighbours_unless_they_are_neighbours(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    reference = undisturbed(workspace, 4)
    kills = ("1:0:lose:4", "1:2:lose:4", "2:1:lose:8", "2:2:lose:8")
    done = submit(workspace.config("killed", **nodes(4, *kills)))
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    assert sources(run)[0] == ("neighbour", 3, 0)
    assert sources(run)[-1][0] in ("disk", "neighbour")  # the second may be ended before it has emptied its folder
    assert_same_run(run, reference)


@pytest.mark.parametrize(("room", "source"), [("8m", "memory"), ("1m", "disk")])
def test_a_node_without_room_is_warned_of_with_figures_and_goes_on(tmp_path: Path, room: str, source: str) -> None:
    """`room`: of all ranks in the whole of /dev/shm, in a file system of the test's own."""
    workspace = Workspace.make(tmp_path)
    reference = undisturbed(workspace, 2)
    config = workspace.config("killed", **nodes(2, "1:1:update:8") | {"cluster": {"python": sys.executable}})
    mount = f'mount -t tmpfs -o size={room} none /dev/shm && exec "$@"'
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", mount, "sh"]
    if subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine lets nobody mount a file system of his own")
    program = [sys.executable, "launchers/submit.py", str(config)]
    done = subprocess.run([*command, *program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=900)
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    begin = run.attempt(1).read_begin()
    assert begin is not None
    assert begin.log is not None
    log = Path(begin.log).read_text()
    assert ("no copies of rank" if source == "memory" else "no copies in memory") in log
    assert re.search(r"takes [\d,]+ bytes, and [\d,]+ are free", log), log
    assert [found[0] for found in sources(run)] == [source]
    assert_same_run(run, reference)


def test_copies_after_every_second_step_change_no_bit(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    reference = undisturbed(workspace, 2)
    done = submit(workspace.config("killed", **nodes(2, "1:1:lose:9", "2:0:update:15", memory_interval=2)))
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    assert_same_run(run, reference)
