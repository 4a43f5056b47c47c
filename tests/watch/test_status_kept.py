"""Summaries of stopped runs that are kept: when one is used again, and what is never believed."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun import cli, places
from relayrun.control.rundir.find_runs import all_run_folders
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import ChainEnd, CheckpointCommit
from relayrun.control.rundir.run import Run, write_stop
from relayrun.files import append_line
from relayrun.watch.status import runs as status_runs
from relayrun.watch.status.cron_check_record import CronCheckRecord, cron_check_path
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import RunSummary
from tests.history import STEP, began, ended, make_history, trained
from tests.plans import plan_with
from tests.watch.test_status_many import KINDS, make_many

NOW = time.time() + 3600
"""An hour after the last change of the runs that a test makes."""
opened: list[str] = []
sys.addaudithook(lambda event, details: opened.extend([str(details[0])] if event == "open" else []))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / places.PROJECT_MARKER).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RELAYRUN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path: Path, cache: Path) -> Run:
    """A stopped run of seven attempts, beside another one that has not stopped."""
    made, living = (make_history(tmp_path / "logs/runs/p" / name, lines=140, attempts=7) for name in ("one", "living"))
    for each in (made, living):
        for number in range(1, 8):
            end = each.attempt(number).read_end()
            assert end is not None
            replace(end, end_time=end.end_time + 10 * number).write(each.attempt(number).end)
    write_stop(made, ChainEnd("stopped", "by ann, who looks"))
    return made


def looked(now: float = NOW) -> list[object]:
    """The table's rows, as a process of its own would read them."""
    return [*RunsWatcher().all_summaries(all_run_folders(), now=now)]


def anew(now: float = NOW) -> list[object]:
    """The same with nothing kept."""
    return [*RunsWatcher().summaries(all_run_folders(), now=now)]


def read_runs(now: float = NOW) -> set[str]:
    """Names of the runs of which a look opens files."""
    opened.clear()
    looked(now)
    folder = f"{Path.cwd()}/logs/runs/p/"
    return {
        path.removeprefix(folder).split("/")[0] for path in opened if path.startswith(folder) and path[-5:] == ".json"
    }


def test_a_stopped_run_is_read_once(run: Run) -> None:
    assert read_runs() == {"one", "living"}
    assert read_runs() == {"living"}
    assert looked() == anew()
    assert looked(NOW + 1000.5) == anew(NOW + 1000.5)


def test_every_kind_of_run_has_the_same_row(cache: Path, tmp_path: Path) -> None:
    """Also where all of them have stopped, newest first, and under the eyes of cron."""
    make_many(tmp_path / "logs/runs/many")
    for stopped in (False, True):
        for each in all_run_folders() if stopped else ():
            if not os.path.lexists(each.stop):
                write_stop(each, ChainEnd("failed", f"three failed attempts of {each.path.name}"))
        for now in (NOW, NOW + 5, NOW + 7200.25):
            assert looked(now) == anew(now)
    kept = [json.loads(line) for line in files(cache)[0].read_text().splitlines()[1:]]
    assert len(kept) == len(KINDS) - 5, "all but those without an attempt or a whole newest checkpoint"
    assert cli.main(["status", "--all"]) == 0


def same_length(path: Path, old: str, new: str) -> None:
    assert len(old) == len(new)
    assert old in path.read_text()
    with open(path, "r+") as file:  # in place
        text = file.read().replace(old, new)
        file.seek(0)
        file.write(text)


def stop_edited(run: Run) -> None:
    same_length(run.stop, "by ann", "by bob")


def resumed(run: Run) -> None:
    run.stop.unlink()


def plan_edited(run: Run) -> None:
    same_length(run.plan, '"total_steps": 1400', '"total_steps": 1500')


def plan_written(run: Run) -> None:
    plan_with(Plan.load(run), total_steps=3000).write(run.plan)


def goes_on(run: Run) -> None:
    began(run, 8, base=140)
    trained(run, 8, 140, 150)
    ended(run, 8, base=140, durable=150)


def late_step(run: Run) -> None:
    with open(run.attempt(7).metrics, "a") as file:
        file.write(STEP.format(141))


def late_save(run: Run) -> None:
    run.checkpoint(141).mkdir()
    commit = CheckpointCommit(iteration=141, path=str(run.checkpoint(141)), consumed_samples=1, time=1e9, seconds=1.0)
    append_line(run.attempt(7).commits, vars(commit))


def end_lost(run: Run) -> None:
    run.attempt(7).end.unlink()


def older_end_changed(run: Run) -> None:
    end = run.attempt(4).read_end()
    assert end is not None
    replace(end, end_time=end.end_time + 1).write(run.attempt(4).end)


def checkpoint_lost(run: Run) -> None:
    shutil.rmtree(run.checkpoint(140))


def part_lost(run: Run) -> None:
    (run.checkpoint(140) / "data").unlink()


def checkpoints_lost(run: Run) -> None:
    shutil.rmtree(run.checkpoints)


def removed(run: Run) -> None:
    shutil.rmtree(run.path)


def replaced(run: Run) -> None:
    """Another run has the place, with the same names and times."""
    other = run.path.parent.parent / "other"
    shutil.copytree(run.path, other)
    plan_with(Plan.load(Run(other)), total_steps=3000).write(other / "plan.json")
    same_length(other / "STOP", "by ann", "by bob")
    shutil.rmtree(run.path)
    other.rename(run.path)
    os.utime(run.stop, (1e9, 1e9))


def looked_at_by_cron(run: Run) -> None:
    user = os.environ.get("USER", "root")
    CronCheckRecord(time=1e9, host="login1", user=user).write(cron_check_path(run.path, user))


CHANGES: tuple[Callable[[Run], None], ...] = (
    *(stop_edited, resumed, plan_edited, plan_written, goes_on, late_step, late_save, end_lost, older_end_changed),
    *(checkpoint_lost, part_lost, checkpoints_lost, removed, replaced, looked_at_by_cron),
)


@pytest.mark.parametrize("change", CHANGES)
def test_a_run_that_changed_is_read_again(run: Run, change: Callable[[Run], None]) -> None:
    before = looked()
    assert read_runs() == {"living"}
    change(run)
    assert looked() == anew() != before
    assert looked() == anew()


def test_a_damaged_checkpoint_that_is_mended_counts(run: Run) -> None:
    part = run.checkpoint(140) / "data"
    part.write_bytes(b"1")
    before = looked()
    part.write_bytes(b"12345")
    assert looked() == anew() != before


def test_a_run_that_has_just_changed_is_not_kept(run: Run) -> None:
    now = time.time()
    assert looked(now) == anew(now)
    assert "one" in read_runs(now)
    assert looked(now + 120) == anew(now + 120)
    assert read_runs() == {"living"}


def files(cache: Path) -> list[Path]:
    return [path for path in cache.rglob("*") if path.is_file()]


def test_summaries_that_are_torn_forged_or_of_other_code_are_not_believed(
    run: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = looked()
    (kept,) = files(cache)
    text = kept.read_bytes()
    for other in (b"", text[: len(text) // 2], text.replace(b"ann", b"bob"), os.urandom(999)):
        kept.write_bytes(other)
        assert looked() == right
    kept.write_bytes(text)
    kept.chmod(0o622)
    assert "one" in read_runs(), "anybody can have written it"
    monkeypatch.setattr(status_runs, "_CODE", "another")
    assert "one" in read_runs()
    monkeypatch.setenv("RELAYRUN_CACHE", "")
    assert looked() == right


def test_the_cache_is_private_bounded_and_beside_the_runs(run: Run, cache: Path) -> None:
    before = {path: path.stat().st_ctime_ns for path in (Path.cwd() / "logs").rglob("*")}
    looked()
    assert {path: path.stat().st_ctime_ns for path in (Path.cwd() / "logs").rglob("*")} == before
    (kept,) = files(cache)
    assert kept.stat().st_mode & 0o777 == 0o600
    small = kept.stat().st_size
    for name in ("two", "three"):
        write_stop(make_history(run.path.parent / name, lines=10, attempts=1), ChainEnd("failed", name))
    looked()
    assert kept.stat().st_size > 2 * small
    shutil.rmtree(run.path.parent / "two")
    run.stop.write_text("a" * 10_000)
    (run.path.parent / "three/STOP").write_text("again")
    assert looked() == anew()
    assert kept.stat().st_size < 2 * small, "neither of the run that is gone nor of the long reason"
    assert any(isinstance(row, RunSummary) and row.stop == "a" * 10_000 for row in looked())
