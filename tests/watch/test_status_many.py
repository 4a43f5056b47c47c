"""A table of many runs of every kind says of each what a look at that one alone says."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun import cli, places
from relayrun.control.rundir.campaign import CampaignMembership, membership_path
from relayrun.control.rundir.find_runs import all_run_folders
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Hang, Heartbeat
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import slurm
from relayrun.control.scheduler.local_queue import LocalQueue
from relayrun.errors import RunDirError
from relayrun.files import append_line
from relayrun.watch.status import queue, run_status, tables
from relayrun.watch.status.cron_check_record import CronCheckRecord, cron_check_path
from relayrun.watch.status.runs import RunsWatcher
from relayrun.watch.status.summary import DamagedRun, RunSummary
from tests.history import STEP, began, make_history


def _ended(run: Run) -> None:
    run.stop.write_text("done: iteration 60\n\nThe chain has ended.\n")


def _stopped_by_hand_elsewhere(run: Run) -> None:
    run.stop.write_bytes(b"by ann, with another editor\r\n\r\nmore\r\n")


def _no_attempts(run: Run) -> None:
    shutil.rmtree(run.attempts)


def _killed_before_it_began(run: Run) -> None:
    run.attempt(4).path.mkdir()


def _crashed(run: Run) -> None:
    run.attempt(3).end.unlink()


def _hung(run: Run) -> None:
    _crashed(run)
    run.attempt(3).heartbeats.mkdir()
    beat = Heartbeat(node="n0", iteration=50, phase="step", time=1e9, step_p95=1.0, save_p95=None)
    beat.write(run.attempt(3).heartbeats / "n0.json")
    Hang(iteration=50, phase="step", seconds=600.0, silent=[1], time=1e9).write(run.attempt(3).hang)


def _queued(run: Run) -> None:
    local = LocalQueue(run.path / "local")
    local.write_job(replace(local.read_job("1"), state="PENDING", pid=None, start_time=None, end_time=None))


def _failed_job(run: Run) -> None:
    local = LocalQueue(run.path / "local")
    local.write_job(replace(local.read_job("1"), state="FAILED", exit_code=9, end_time=1e9 + 5))


def _no_queue(run: Run) -> None:
    shutil.rmtree(run.path / "local")


def _torn_checkpoint(run: Run) -> None:
    (run.checkpoint(60) / "data").write_bytes(b"1")


def _no_whole_checkpoint(run: Run) -> None:
    shutil.rmtree(run.checkpoints)


def _torn_line(run: Run) -> None:
    with open(run.attempt(3).metrics, "a") as file:
        file.write('{"iteration": 61, "lo')


def _went_back(run: Run) -> None:
    append_line(run.attempt(3).metrics, {"iteration": 50, "rollback": {"why": "loss"}})
    with open(run.attempt(3).metrics, "a") as file:
        file.write(STEP.format(51))


def _began_with_another_runs_checkpoint(run: Run) -> None:
    _no_attempts(run)
    began(run, 1, base=7, base_path=str(run.path / "elsewhere"))


def _waits_for_its_campaign(run: Run) -> None:
    _no_attempts(run)
    _no_queue(run)
    CampaignMembership(folder=str(run.path.parent / "sweep"), member="01").write(membership_path(run))


def _with_other_fields(run: Run) -> None:
    value = json.loads(run.plan.read_text())
    for name in ("stop_after", "spare_nodes", "quota_command"):
        value.pop(name)
    run.plan.write_text(json.dumps(value | {"unknown": 1}))


def _slow(run: Run) -> None:
    for number in (1, 2, 3):
        end = run.attempt(number).read_end()
        assert end is not None
        replace(end, end_time=end.end_time + 100 * number).write(run.attempt(number).end)


def _torn_plan(run: Run) -> None:
    run.plan.write_text("{")


def _half_a_plan(run: Run) -> None:
    run.plan.write_text('{"run": 1, "nodes": 2}')


def _plan_of_the_future(run: Run) -> None:
    replace(Plan.load(run), format=99).write(run.plan)


def _no_plan(run: Run) -> None:
    run.plan.unlink()


def _torn_begin(run: Run) -> None:
    run.attempt(3).begin.write_text("")


def _end_of_another_kind(run: Run) -> None:
    run.attempt(3).end.write_text("[]")


def _commit_without_fields(run: Run) -> None:
    run.attempt(3).commits.write_text("{}\n")


def _a_folder_for_a_file(run: Run) -> None:
    run.attempt(3).commits.unlink()
    run.attempt(3).commits.mkdir()


def _stop_is_a_folder(run: Run) -> None:
    run.stop.mkdir()


KINDS: tuple[Callable[[Run], None], ...] = (
    _ended,
    _stopped_by_hand_elsewhere,
    _no_attempts,
    _killed_before_it_began,
    _crashed,
    _hung,
    _queued,
    _failed_job,
    _no_queue,
    _torn_checkpoint,
    _no_whole_checkpoint,
    _torn_line,
    _went_back,
    _began_with_another_runs_checkpoint,
    _waits_for_its_campaign,
    _with_other_fields,
    _slow,
    _stop_is_a_folder,
)
DAMAGE: tuple[Callable[[Run], None], ...] = (
    _torn_plan,
    _half_a_plan,
    _plan_of_the_future,
    _no_plan,
    _torn_begin,
    _end_of_another_kind,
    _commit_without_fields,
    _a_folder_for_a_file,
)


def make_many(runs: Path) -> None:
    """A run of each kind in a folder, and what else lies there."""
    for number, kind in enumerate((*KINDS, *DAMAGE)):
        run = make_history(runs / f"{number:02}{kind.__name__}", lines=60, attempts=3)
        replace(Plan.load(run), run=f"many/{kind.__name__}").write(run.plan)
        kind(run)
    os.utime(runs / f"{KINDS.index(_queued):02}_queued/local/job-0001.json", (1e9, 1e9))
    (runs / "sweep").mkdir()
    (runs / "sweep/campaign.json").write_text("{}")
    (runs / "notes.txt").write_text("no run")
    (runs / "link").symlink_to(runs / "00_ended")
    (runs / "circle").symlink_to(runs / "circle")
    user = os.environ.get("USER", "root")
    CronCheckRecord(time=1e9, host="login1", user=user).write(cron_check_path(runs, user))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / places.PROJECT_MARKER).touch()
    make_many(tmp_path / "logs/runs/many")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "logs/runs/many"


def _alone(path: str, now: float) -> RunSummary | DamagedRun:
    """One run, read by nobody before."""
    run = Run(Path(path))
    try:
        return run_status.read_run_status(run, queue.query_queue(run), now=now)
    except (RunDirError, OSError) as error:
        return DamagedRun(path=path, error=getattr(error, "message", None) or str(error))


def test_a_row_is_what_a_look_at_the_run_alone_says(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    now = time.time()
    found = RunsWatcher().summaries(all_run_folders(), now=now)
    assert len(found) == len(KINDS) + len(DAMAGE) + 1  # the link
    for entry in found:
        alone = _alone(entry.path, now)
        if isinstance(entry, DamagedRun):
            assert alone == entry
        else:
            assert {name: getattr(alone, name) for name in vars(entry)} == vars(entry), entry.path
        assert tables.run_log_line(alone) == tables.run_log_line(entry)
    damaged = {Path(entry.path).name[2:] for entry in found if isinstance(entry, DamagedRun)}
    assert damaged == {kind.__name__ for kind in DAMAGE}
    states = {Path(entry.path).name[2:]: entry.state for entry in found if isinstance(entry, RunSummary)}
    assert states["_ended"] == states["_stopped_by_hand_elsewhere"] == states["_stop_is_a_folder"] == "stopped"
    assert states["_crashed"] == states["_hung"] == states["_queued"] == "failed"
    assert states["_waits_for_its_campaign"] == "queued"
    assert cli.main(["status"]) == 0
    *lines, stuck = capsys.readouterr().out.splitlines()
    assert stuck.startswith("stuck: ")  # the campaign of the one that waits is not there
    assert len(lines) == 1 + len(found) + any(isinstance(each, RunSummary) and each.sentinel for each in found)
    for kind in (*KINDS, *DAMAGE):
        assert any(kind.__name__ in line for line in lines), kind.__name__
    assert cli.main(["status", "--json"]) == 0
    printed = capsys.readouterr()
    assert len(json.loads(printed.out)) == len(found)
    assert printed.err.splitlines()[-1] == stuck


def test_a_watcher_sees_what_changes_between_two_looks(folder: Path) -> None:
    runs, watcher = all_run_folders(), RunsWatcher()
    before = {entry.path: entry for entry in watcher.summaries(runs, now=2e9)}
    run = next(run for run in runs if run.path.name.endswith("_slow"))
    with open(run.attempt(3).metrics, "a") as file:
        file.write(STEP.format(61))
    end = run.attempt(3).read_end()
    assert end is not None
    replace(end, reason="seen again").write(run.attempt(3).end)
    run.stop.write_text("by ann\n")
    after = {entry.path: entry for entry in watcher.summaries(runs, now=2e9)}
    changed = [path for path, entry in after.items() if before[path] != entry]
    assert changed == [str(run.path)]
    entry = after[str(run.path)]
    assert isinstance(entry, RunSummary)
    assert (entry.state, entry.iteration, entry.stop, entry.last_end) == ("stopped", 61, "by ann", "saved: seen again")


def test_a_local_queue_that_cannot_be_read_says_nothing_of_slurm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_history(tmp_path / name, lines=10, attempts=1) for name in ("local", "slurm")]
    replace(Plan.load(runs[1]), scheduler="slurm").write(runs[1].plan)
    answers = {"local": queue.QueueStatus(error="the queue is not read"), "slurm": queue.QueueStatus()}
    monkeypatch.setattr(queue, "query_queue", lambda run, plan, brief: answers[run.path.name])
    monkeypatch.setattr(slurm, "jobs_by_name", lambda names, patience: {name: [] for name in names})
    found = {Path(entry.path).name: entry for entry in RunsWatcher().statuses(runs, now=time.time())}
    assert {name: getattr(entry, "scheduler_error", None) for name, entry in found.items()} == {
        "local": "the scheduler did not answer: the queue is not read",
        "slurm": None,
    }
