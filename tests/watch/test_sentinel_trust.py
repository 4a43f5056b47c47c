"""What `relayrun sentinel` leaves alone: runs and copies of others, ended runs, a submit that is under way."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.rundir import find_runs
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd
from relayrun.control.rundir.run import Run, write_stop
from relayrun.trust import UntrustedError
from relayrun.watch import unsent_notices
from relayrun.watch.status import cron_check_record as records
from tests.chain.conftest import MakeRun
from tests.owners import give_away
from tests.watch.sentinel_world import ME, MakeWorld, World, train


def test_a_submit_that_is_under_way_is_no_death(world: World) -> None:
    with open(world.run.path / ".submit.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert [world.look() for _ in range(3)] == [[], [], []]
    assert world.notices() == []


def test_a_run_that_has_ended_or_is_anothers_is_left_alone(make_world: MakeWorld) -> None:
    world = make_world(told=False)
    write_stop(world.run, ChainEnd("stopped", "stopped by ada"))
    assert [world.look() for _ in range(3)] == [[], [], []]
    world.run.stop.unlink()
    plan = json.loads(world.run.plan.read_text())
    world.run.plan.write_text(json.dumps(plan | {"owner": os.geteuid() + 1}))
    assert [world.look() for _ in range(3)] == [[], [], []]
    world.run.plan.write_text(json.dumps(plan))
    assert len([world.look() for _ in range(3)][-2]) == 1  # as it is without either


@pytest.mark.parametrize("whose", ["", "plan.json", "notices/policy.json"])
def test_nothing_of_another_users_run_starts_whatever_its_plan_says(
    make_world: MakeWorld, whose: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world()
    ran = world.run.path / "ran"
    command = ["/bin/sh", "-c", f"touch {ran}"]
    replace(world.plan, owner=None, quota_command=command).write(world.run.plan)
    started: list[object] = []
    monkeypatch.setattr(unsent_notices, "_start", lambda *given: started.append(given))
    world.queue(("7", "PENDING", "Priority"))
    with monkeypatch.context() as patch:
        give_away(patch, world.run.path / whose)
        world.look()
        assert not ran.exists()
        world.queue()
        lines = [line for _ in range(3) for line in world.look()]
        assert started == []
        assert bool(lines) == (whose == "notices/policy.json")  # cron tells of a run of this user's own
    world.queue(("7", "PENDING", "Priority"))
    world.look()
    assert ran.exists()
    write_stop(world.run, ChainEnd("failed", "fatal: it broke"))
    world.look()
    assert started


@pytest.mark.parametrize("owner", [os.geteuid(), os.geteuid() + 1, None, 0])
def test_a_copy_of_a_run_starts_nothing_whomever_its_plan_names(make_world: MakeWorld, owner: int | None) -> None:
    """`cp -r` gives its files to who copies it: another user may have written them for that."""
    world = make_world()
    command = ["/bin/sh", "-c", f"touch {world.folder}/ran"]
    replace(world.plan, owner=owner, quota_command=command, setup=command).write(world.run.plan)
    copy = world.run.path.with_name("copy")
    shutil.copytree(world.run.path, copy)
    shutil.rmtree(world.run.path)
    world.queue(("7", "PENDING", "Priority"))
    assert [world.look() for _ in range(3)] == [[], [], []]
    assert not (world.folder / "ran").exists()
    with pytest.raises(UntrustedError, match="this is a copy of a run directory"):
        Plan.load_trusted(Run(copy))


def test_what_another_user_left_in_the_folder_is_not_touched(world: World) -> None:
    others = records.cron_check_path(world.folder, "grace")
    others.write_text("{")
    records.cron_check_lock_path(world.folder, "grace").touch()
    train(world)
    assert others.read_text() == "{"
    found = records.last_cron_check(world.run, None, now=world.now)
    assert found is not None
    assert (found.user, found.late) == (ME, False)


def test_which_runs_a_folder_has(make_run: MakeRun, tmp_path: Path) -> None:
    for name in ("runs/a/one", "runs/a/one/checkpoints/inner", "runs/.hidden/x", "runs/1/2/3/4", "runs/1/2/3/4b/5"):
        make_run(folder=name)
    make_run(folder="scratch/two")
    (tmp_path / "runs/a/two").symlink_to(tmp_path / "scratch/two")
    (tmp_path / "runs/a/again").symlink_to(tmp_path / "scratch/two")
    (tmp_path / "runs/a/circle").symlink_to(tmp_path / "runs")
    found = [
        str(run.path.relative_to(tmp_path / "runs")) for run in find_runs.find_runs_below(tmp_path / "runs", depth=4)
    ]
    assert found == ["a/again", "a/one", "1/2/3/4"]
