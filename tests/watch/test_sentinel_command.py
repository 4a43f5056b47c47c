"""`relayrun sentinel` itself: its life in the status, looks that hang or fail, damaged memory, folders gone."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir import find_runs
from relayrun.control.scheduler import slurm
from relayrun.errors import InputError, SchedulerError
from relayrun.watch import cron_check
from relayrun.watch.status import cron_check_record as records
from relayrun.watch.status import tables
from tests.watch.sentinel_world import EVERY, HOUR, ME, MakeWorld, World, no_job, state, train


def test_slurm_that_does_not_answer_is_said_after_an_hour(
    make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(told=False)
    train(world)
    no_job(world)
    assert world.look() == []
    world.error = SchedulerError("squeue: Unable to contact slurm controller")
    monkeypatch.setattr(cron_check.shutil, "which", lambda _: "/usr/bin/squeue")
    said = [world.look(after=600) for _ in range(8)]
    assert [len(lines) for lines in said] == [0, 0, 0, 0, 0, 0, 1, 0]
    assert "nothing is known of the jobs: the scheduler did not answer: squeue: Unable to contact" in said[6][0]
    world.error = None
    assert "is gone without an end" in world.look()[0]  # what was seen before is not forgotten


def test_without_squeue_it_is_said_at_once(make_world: MakeWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    world = make_world(told=False)
    world.error = SchedulerError("squeue is not installed here")
    monkeypatch.setattr(cron_check.shutil, "which", lambda _: None)
    (line,) = world.look()
    assert "squeue is not installed here" in line


def test_status_shows_when_it_last_looked_and_that_it_is_dead(world: World) -> None:
    assert state(world).sentinel is None
    train(world)
    look = state(world).sentinel
    assert look is not None
    assert (look.folder, look.time, look.period, look.late) == (str(world.folder), world.now, EVERY, False)
    world.now += 40
    (line,) = tables.cron_check_lines([state(world)], now=world.now)
    assert line.startswith(f"sentinel: looked 40 s ago ({world.folder}, by ")
    world.now += 5 * HOUR
    (line,) = tables.cron_check_lines([state(world)], now=world.now)
    assert line.startswith("sentinel: dead or late: looked 5.0 h ago")
    assert "every 120 s before" in line or "every 2 min before" in line
    records.cron_check_path(world.folder, ME).write_text("{")
    (line,) = tables.cron_check_lines([state(world)], now=world.now)
    assert "nobody knows when it last looked" in line


def test_a_run_is_looked_after_through_links_too(world: World, tmp_path: Path) -> None:
    train(world)
    (tmp_path / "elsewhere").symlink_to(world.run.path)
    found = records.last_cron_check(find_runs.find_run(str(tmp_path / "elsewhere")), None, now=world.now)
    assert found is not None
    assert found.folder == os.path.realpath(world.folder)


def test_two_do_not_look_at_once_and_one_that_hangs_is_said(world: World) -> None:
    train(world)
    no_job(world)
    before = records.read_cron_check(world.folder, ME)
    with open(records.cron_check_lock_path(world.folder, ME), "r+") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert world.look() == []
        assert records.read_cron_check(world.folder, ME) == before
        (line,) = world.look(after=HOUR)
        assert "a look that began long ago has not ended" in line
        assert world.look() == []
    assert world.look() == []  # it sees the death for the first time
    world.look()
    assert len(world.notices()) == 1


def test_a_damaged_memory_is_said_and_the_look_goes_on(world: World) -> None:
    train(world)
    records.cron_check_path(world.folder, ME).write_text('{"time": ')
    (line,) = world.look()
    assert "what the last look saw is lost" in line
    no_job(world)
    assert [world.look(), world.look()] == [[], []]
    assert len(world.notices()) == 1


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ("plan.json", "unreadable record"),
        ("attempts/0001/begin.json", "Is a directory"),
        ("notices/policy.json", "unreadable record"),
    ],
)
def test_a_run_that_cannot_be_read_does_not_hide_the_others(world: World, damage: str, words: str) -> None:
    train(world)
    no_job(world)
    other = world.folder / "mine/a torn one"
    shutil.copytree(world.run.path, other)
    world.plan.write(other / "plan.json")
    (other / damage).unlink()
    if "begin" in damage:
        (other / damage).mkdir()
    else:
        (other / damage).write_text('{"format": ')
    assert world.look() == []
    said = world.look()
    assert "mine/a torn one: " in said[0]
    assert words in said[-1]
    assert len(world.notices()) == 1


# the command


def test_the_command_needs_the_standard_library_alone(make_world: MakeWorld) -> None:
    """A login node may have no more than a Python: -S leaves site-packages out."""
    world = make_world(told=False)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "relayrun.cli", "sentinel", world.folder],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(Path(cron_check.__file__).parents[2]), "PATH": "/nowhere"},
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "squeue is not installed here" in done.stdout
    memory = records.read_cron_check(world.folder, ME)
    assert memory is not None
    assert memory.period is None


def test_a_folder_that_is_not_there_keeps_no_other_from_being_looked_at(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    world.queue(("7", "PENDING", "Priority"))
    assert main(["sentinel", str(tmp_path / "nowhere"), str(world.folder)]) == 1
    said = capsys.readouterr()
    assert f"error: {tmp_path}/nowhere: there is no such folder" in said.err
    assert said.out == ""
    assert records.read_cron_check(world.folder, ME) is not None


def test_a_look_that_hangs_ends(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from relayrun.cli.watch import cron_check as command

    monkeypatch.setattr(command, "TIME_LIMIT_SECONDS", 1)
    monkeypatch.setattr(world, "jobs_of", lambda *_, **__: time.sleep(100))
    monkeypatch.setattr(slurm, "jobs_by_name", world.jobs_of)
    assert main(["sentinel", str(world.folder)]) == 1
    assert "no end of this look in 1 s" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["hangs", "a defect", "refused"])
def test_a_look_that_fails_says_so_once_an_hour(
    world: World, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Cron would mail it every two minutes; another folder is looked at all the same, and the exit code says it."""
    from relayrun.cli.watch import cron_check as command

    other = world.folder.parent / "others"
    other.mkdir()

    def fail(folder: Path, **_: object) -> list[str]:
        if folder == other:
            return ["the other one"]
        if kind == "a defect":
            raise KeyError("a defect")
        raise command._CheckTimeoutError if kind == "hangs" else InputError("refused", where=folder)

    monkeypatch.setattr(cron_check, "check_folder", fail)
    said = []
    for number in range(12):
        monkeypatch.setattr(command.time, "time", lambda number=number: world.start + number * HOUR / 6)
        assert main(["sentinel", str(world.folder), str(other)]) == 1
        found = capsys.readouterr()
        assert found.out == "the other one\n"
        said.append(found.err)
    words = {"hangs": "no end of this look in 240 s", "a defect": "KeyError: 'a defect'", "refused": "refused"}[kind]
    assert [words in text for text in said] == [number % 6 == 0 for number in range(12)]
    assert [bool(text) for text in said] == [number % 6 == 0 for number in range(12)]
