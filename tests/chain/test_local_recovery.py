"""The real training program, whose ranks are killed and started again inside their job: exact to the last bit."""

from __future__ import annotations

import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.control.rundir import restarts
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.tokens.mixture.audit import audit_run, dataset_ledgers
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND
from tests.checkpoints import assert_same_bytes
from tests.random_kills import signal_random_rank
from tests.workspace import Workspace, ends, steps

from .test_local_training import ROOT, submit

pytestmark = [pytest.mark.slow, pytest.mark.long]

STEPS = 20
SETTINGS: dict[str, Any] = {
    "training": {"steps": STEPS, "eval_interval": 10},
    "checkpoint": {"interval": 5, "async_save": False},
    "data": {"split": 0.1},
    "parallel": {"use_distributed_optimizer": True},
}


def with_kills(*kills: str) -> dict[str, Any]:
    """The same run by agents, of which ranks kill themselves."""
    hook = {"hook": "tests.training.killing:Kills", "options": {"kills": list(kills)}}
    return {
        **SETTINGS,
        "training": SETTINGS["training"] | {"hooks": [hook]},
        "chain": {"recovery": "node"},
        "cluster": {"environment": {"PYTHONPATH": str(ROOT)}},
    }


def first_causes(run: Run) -> list[tuple[int, int | None, str]]:
    found = restarts.read_failed_restarts(run.attempt(1))
    assert all(failed.again for failed in found)
    return [(failed.restart, failed.rank, failed.words) for failed in found]


def evaluations(run: Run) -> list[tuple[int, dict[str, float]]]:
    """Iteration and losses of each evaluation in the merged view."""
    lines = [line for line in read_json_lines(run.metrics_view) if "validation" in line]
    return [(line["iteration"], line["validation"]) for line in lines]


def assert_same_run(run: Run, reference: Run, *, last: int = STEPS) -> None:
    assert steps(run) == steps(reference)
    assert sorted(steps(run)) == list(range(1, last + 1))
    assert evaluations(run) == evaluations(reference)
    assert assert_same_bytes(reference.checkpoint(last), run.checkpoint(last)) > 50
    assert [vars(row) for row in dataset_ledgers(audit_run(run))] == [
        vars(row) for row in dataset_ledgers(audit_run(reference))
    ]


def test_a_run_whose_ranks_are_killed_equals_the_undisturbed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workspace = Workspace.make(tmp_path)
    whole = submit(workspace.config("whole", **SETTINGS))
    assert whole.returncode == 0, whole.stderr
    reference = workspace.run("whole")
    kills = ("1:1:setup", "2:0:forward:3", "3:1:forward:7", "4:0:save:10", "5:0:forward:13")
    done = submit(workspace.config("killed", **with_kills(*kills)))
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    killed = "killed by SIGKILL"
    assert first_causes(run) == [(number, rank, killed) for number, rank in enumerate([1, 0, 1, 0, 0], start=1)]
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [(failed.iteration, failed.durable_iteration) for failed in found][:3] == [(0, 0), (2, 0), (6, 5)]
    assert found[3].durable_iteration == 5  # the save of iteration 10 was killed before it counted
    assert found[4].durable_iteration == 10
    assert all(failed.seconds["all"] > 0 for failed in found[1:])
    assert_same_run(run, reference)
    spent = account_for_run(Run(run.path))
    (stay,) = spent.allocations
    assert sum(spent.parts.values()) == spent.allocated
    assert spent.parts["unknown"] <= 0.01 * spent.allocated
    assert stay.work.redone_iterations == sum(failed.steps_lost for failed in found)
    assert stay.work.iterations == STEPS
    # as the coordinator's clock has it, of one node; the first failure, before any step, has no seconds
    names = ("end", "records", "fork", "groups", "load")
    ways = sum(failed.seconds[name] for failed in found[1:] for name in names)
    assert stay.parts["recovery"] / MICROSECONDS_PER_SECOND > ways - 1.0 * len(found)
    capsys.readouterr()
    assert main(["goodput", str(run.path)]) == 0
    assert "recovery" in capsys.readouterr().out
    assert main(["status", str(run.path)]) == 0
    assert "failed restarts 5; the last: restart 5: rank 0 on " in " ".join(capsys.readouterr().out.split())


def test_ranks_go_on_from_memory_and_never_from_copies_that_were_changed(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    whole = submit(workspace.config("whole", **SETTINGS))
    assert whole.returncode == 0, whole.stderr
    kills = ("1:0:update:4", "2:1:update:8", "3:1:setup", "4:0:spoil:13", "5:1:update:17")
    kills = (*kills, "6:0:forward:19", "6:1:forward:19")  # two at once
    settings = with_kills(*kills)
    config = workspace.config("killed", **settings | {"checkpoint": SETTINGS["checkpoint"] | {"memory_interval": 1}})
    done = submit(config)
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    found = restarts.read_failed_restarts(run.attempt(1))
    assert [(failed.next_iteration, failed.source, failed.steps_lost) for failed in found[:3]] == [
        (3, "memory", 0),
        (7, "memory", 0),
        (7, "memory", 0),  # killed at set-up: the copies are as good as before
    ]
    assert (found[3].iteration, found[3].source, found[3].next_iteration) == (12, "disk", 10)
    assert (found[4].next_iteration, found[4].source) == (16, "memory")
    assert (found[5].next_iteration, found[5].source, found[5].steps_lost) == (18, "memory", 0)
    assert len(found) == 6
    assert_same_run(run, workspace.run("whole"))
    folder = Path((run.path / "memory-folder-0").read_text())
    assert folder.parent == Path("/dev/shm")
    assert not folder.exists()


@pytest.mark.parametrize("memory", [0, 1])
def test_kills_of_random_ranks_at_random_times_change_no_bit(tmp_path: Path, memory: int) -> None:
    workspace = Workspace.make(tmp_path)
    changes = {"checkpoint": {"interval": 4}, "training": SETTINGS["training"] | {"steps": 60}}
    whole = submit(workspace.config("whole", **SETTINGS | changes))
    assert whole.returncode == 0, whole.stderr
    slow = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "step-delay=0.1"}}
    settings = with_kills() | {
        "checkpoint": {"interval": 4, "memory_interval": memory},
        "training": changes["training"] | {"hooks": [slow]},
        "chain": {"recovery": "node", "max_failed_restarts": 1000},
    }
    config, run = workspace.config("killed", **settings), workspace.run("killed")
    killed: list[int] = []
    over = threading.Event()

    def kill() -> None:
        generator = random.Random(memory)
        while not over.wait(generator.uniform(0.1, 2.5)) and len(killed) < 12:
            if (rank := signal_random_rank(run, generator, signal.SIGKILL)) is not None:
                killed.append(rank.rank)

    killer = threading.Thread(target=kill)
    killer.start()
    done = submit(config)
    over.set()
    killer.join(300)
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    found = restarts.read_failed_restarts(run.attempt(1))
    assert 3 <= len(found) <= len(killed)  # two may die in one restart
    assert all(failed.again for failed in found)
    if memory:  # a rank may be killed while it copies the iteration that all have done
        assert all(failed.steps_lost <= 1 for failed in found)
    assert_same_run(run, workspace.run("whole"), last=60)


def test_the_imports_are_done_once_for_all_rounds(tmp_path: Path) -> None:
    """With the real start: no process of the tests' own has done the imports."""
    workspace = Workspace.make(tmp_path)
    config = workspace.config("killed", **with_kills("1:0:forward:3", "2:1:forward:8"))
    done = submit(config, "--set", f"cluster.python={sys.executable}")
    run = workspace.run("killed")
    assert [end.cause for end in ends(run)] == ["done"], done.stderr
    assert [rank for _, rank, _ in first_causes(run)] == [0, 1]
    assert sorted(steps(run)) == list(range(1, STEPS + 1))
