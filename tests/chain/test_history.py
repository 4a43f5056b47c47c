"""A chain with a past: its age costs nothing, its views wait for its decisions, and its directory has a format."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun import cli
from relayrun.config.compose import resolve
from relayrun.control.chain import supervisor, watch
from relayrun.control.chain.watch import Watch
from relayrun.control.chain_state import count_failed_attempts
from relayrun.control.rundir import triggers
from relayrun.control.rundir.merged_metrics import MergedViews, valid_lines
from relayrun.control.rundir.plan import PLAN_FORMAT, Plan
from relayrun.control.rundir.records import AttemptOutcome, AttemptStart, ChainEnd, CheckpointCommit
from relayrun.control.rundir.run import Run, stop_reason, write_stop
from relayrun.control.scheduler.local import LocalScheduler
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE, LocalQueue
from relayrun.errors import RunDirError
from relayrun.files import read_json, read_json_lines
from relayrun.submit import submission
from tests.history import ROOT, began, cost, make_history, trained
from tests.workspace import Workspace

HANDFUL = 6
"""Small files that several duties of a job read by themselves, such as the membership in a sweep or in stages."""


def assert_views_hold_what_counts(run: Run) -> None:
    assert list(read_json_lines(run.metrics_view)) == list(valid_lines(run))
    assert [row["attempt"] for row in read_json_lines(run.attempts_view)] == run.attempt_numbers()


def queued(run: Run) -> list[str]:
    return [job.id for job in LocalScheduler(run).jobs(Plan.load(run)) if job.state == "PENDING"]


@pytest.mark.slow
def test_begin_and_end_open_no_record_twice_and_no_more_of_them_with_age(tmp_path: Path) -> None:
    opened = {}
    for attempts in (20, 60):
        run = make_history(tmp_path / str(attempts) / "run", lines=100 * attempts, attempts=attempts)
        MergedViews(Run(run.path)).update()
        begin = cost(run, "begin")
        trained(run, attempts + 1, 100 * attempts, 100 * attempts + 100)
        watch = MergedViews(Run(run.path))
        watch.update(attempt=attempts + 1)
        watch.note()
        end = cost(run, "end", f"--attempt={attempts + 1}", "--exit-code=0")
        for each in (begin, end):
            files = [name for name in each.opened if name != "."]  # the folder is opened to judge whose it is
            assert len(files) <= len(set(files)) + HANDFUL, files
            records = [name for name in each.opened if name.endswith(("begin.json", "commits.jsonl", "metrics.jsonl"))]
            own = [name for name in records if name.startswith("attempts/")]
            assert len(own) == len(set(own)), own
        opened[attempts] = (len(begin.opened), len(end.opened))
        assert_views_hold_what_counts(Run(run.path))
    assert opened[20] == opened[60]


@pytest.mark.parametrize("view", ["metrics_view", "attempts_view", "views"])
def test_a_view_that_cannot_be_written_does_not_keep_the_chain_from_going_on(
    run: Run, view: str, capsys: pytest.CaptureFixture[str]
) -> None:
    MergedViews(run).update()
    assert supervisor.begin_attempt(run) == 0
    for job in queued(run):  # the scheduler lost its queue: `end` must queue one
        LocalQueue(run.path / "local").path(job).unlink()
    trained(run, 4, 300, 400)
    path = getattr(run, view)
    path.unlink()
    path.mkdir()  # whoever writes the view fails, root too
    assert supervisor.end_attempt(run, 4, 0) == 0
    assert len(queued(run)) == 1
    assert run.attempt(4).end.exists()
    assert "the merged views are left for later" in capsys.readouterr().err
    path.rmdir()
    following = Watch(run, 4)  # the next job's
    following._follow()
    following._views.note()
    MergedViews(run).update()
    assert_views_hold_what_counts(run)


@pytest.mark.parametrize("how", ["fatal", "saved", "at begin"])
def test_the_chain_is_seen_to_before_a_view_is_touched(run: Run, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def look(self: MergedViews, **_: object) -> None:
        assert stop_reason(run) is not None if how != "saved" else len(queued(run)) == 1
        seen.append(how)

    monkeypatch.setattr(MergedViews, "update", look)
    if how == "at begin":
        triggers.touch_trigger(run, "exit")
        assert supervisor.begin_attempt(run) == supervisor.EXIT_CHAIN_ENDS
    else:
        assert supervisor.begin_attempt(run) == 0
        assert seen == []
        trained(run, 4, 300, 400)
        if how == "fatal":
            AttemptOutcome(outcome="fatal", reason="nan", iteration=400, time=0.0).write(run.attempt(4).outcome)
        supervisor.end_attempt(run, 4, 0)
    assert seen == [how]


def test_a_program_that_lives_long_sees_what_changes(run: Run) -> None:
    attempt = run.attempt(4)
    assert (attempt.read_begin(), attempt.read_end(), attempt.read_commits()) == (None, None, [])
    began(run, 4, base=300)
    trained(run, 4, 300, 310)
    assert attempt.read_begin() is not None
    assert [commit.iteration for commit in attempt.read_commits()] == [305, 310]
    trained(run, 4, 310, 320)
    assert [commit.iteration for commit in attempt.read_commits()][-1] == 320
    assert run.attempt_numbers() == [1, 2, 3, 4]
    assert stop_reason(run) is None
    write_stop(run, ChainEnd("stopped", "enough"))
    write_stop(run, ChainEnd("stopped", "the first reason stays"))
    assert stop_reason(run) == "enough"
    run.stop.unlink()
    assert stop_reason(run) is None
    Plan.of(read_json(run.plan) | {"total_steps": 7}).write(run.plan)
    assert Plan.load(run).total_steps == 7


def test_the_lead_is_that_of_the_newest_steps_saves_and_evaluations_that_count(run: Run) -> None:
    began(run, 4, base=300)
    with open(run.attempt(4).metrics, "a") as file:
        for iteration, seconds in ((301, 7.0), (302, 90.0)):
            file.write(json.dumps({"iteration": iteration, "step_seconds": 6.0}) + "\n")
            file.write(json.dumps({"iteration": iteration, "evaluation_seconds": seconds}) + "\n")
    folder = run.checkpoint(301)
    folder.mkdir()
    run.attempt(4).append_commit(
        CheckpointCommit(iteration=301, path=str(folder), consumed_samples=301, time=2e9, seconds=14.0, files={})
    )
    MergedViews(run).update()
    began(run, 5, base=301)  # iteration 302 and its evaluation count no more
    MergedViews(run).update()
    assert supervisor.begin_attempt(run) == 0
    begin = run.attempt(6).read_begin()
    assert begin is not None
    assert begin.evaluation_seconds == 7.0
    assert begin.grace_period == pytest.approx(2 * 5.0863418579 + 7.0 + 1.5 * 14.0 + 10)


def test_an_older_format_is_migrated_when_its_chain_goes_on(run: Run) -> None:
    run.plan.write_text(json.dumps(read_json(run.plan) | {"format": PLAN_FORMAT - 1}))
    assert cli.main(["status", str(run.path)]) == 0
    assert read_json(run.plan)["format"] == PLAN_FORMAT - 1
    assert supervisor.begin_attempt(run) == 0
    assert read_json(run.plan)["format"] == PLAN_FORMAT
    trained(run, 4, 300, 400)
    assert supervisor.end_attempt(run, 4, 0) == 0
    assert_views_hold_what_counts(run)


@pytest.mark.slow
def test_a_newer_format_is_refused_by_every_entry(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newer = read_json(run.plan) | {"format": PLAN_FORMAT + 1}
    run.plan.write_text(json.dumps(newer))
    began(run, 4, base=300)
    message = f"this run directory has format {PLAN_FORMAT + 1}"
    for entry in (
        lambda: watch.Watch(run, 4),
        lambda: supervisor.end_attempt(run, 4, 0),
        lambda: watch.run_guard(run, 4, batch_pid=1),
        lambda: Plan.load(run),
    ):
        with pytest.raises(RunDirError, match=message) as caught:
            entry()
        assert "update that relayrun" in str(caught.value)
    said = f"this job could not go on: {message}"
    assert (stop_reason(run) or "").startswith(said)  # of `end`: nobody follows
    run.stop.unlink()
    for verb in ("status", "save", "stop"):
        assert cli.main([verb, str(run.path)]) == 1
        assert message in capsys.readouterr().err
    assert not run.stop.exists()
    with pytest.raises(RunDirError, match=message):
        supervisor.begin_attempt(run)
    assert (stop_reason(run) or "").startswith("this job could not begin: this run directory has format")
    rank = subprocess.run(
        [sys.executable, "-m", "relayrun.train", f"--run-dir={run.path}", "--attempt=4"],
        env=os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert rank.returncode == 1
    assert message in rank.stderr
    workspace = Workspace.make(tmp_path)
    config = resolve.load_run_config(workspace.config("run"), [])
    with pytest.raises(RunDirError, match=message):
        submission.submit_run(config, resume=True)
    assert read_json(run.plan) == newer


def iterations(path: Path) -> list[int]:
    return [line["iteration"] for line in read_json_lines(path)]


@pytest.mark.parametrize("first", [2, 40])
def test_a_torn_line_that_is_completed_meanwhile_is_taken_once(
    run: Run, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    MergedViews(run).update()
    began(run, 4, base=300)
    trained(run, 4, 300, 350)
    text = run.attempt(4).metrics.read_bytes()
    at = text.index(b"\n", len(text) // 3) + first  # inside of a line
    run.attempt(4).metrics.write_bytes(text[:at])
    append = MergedViews._append

    def completed(self: MergedViews, *arguments: Any) -> None:
        append(self, *arguments)
        with open(run.attempt(4).metrics, "ab") as file:
            file.write(text[run.attempt(4).metrics.stat().st_size :])

    monkeypatch.setattr(MergedViews, "_append", completed)
    MergedViews(run).update()
    monkeypatch.undo()
    MergedViews(run).update()
    assert_views_hold_what_counts(run)
    assert iterations(run.metrics_view) == list(range(1, 351))


def test_attempts_that_a_person_removed_leave_the_views(run: Run) -> None:
    began(run, 4, base=300)
    trained(run, 4, 300, 400)
    MergedViews(run).update()
    for number in (3, 4):
        shutil.rmtree(run.attempt(number).path)
    again = Run(run.path)
    base = again.attempt(2).read_commits()[-1].iteration
    began(again, 3, base=base)
    trained(again, 3, base, base + 20)
    MergedViews(again).update()
    assert_views_hold_what_counts(again)
    began(again, 4, base=base + 20)  # numbers come again
    trained(again, 4, base + 20, base + 30)
    MergedViews(Run(run.path)).update()
    assert_views_hold_what_counts(Run(run.path))


def test_a_view_that_cannot_be_read_keeps_nobody_from_beginning_or_watching(run: Run) -> None:
    run.views.unlink(missing_ok=True)
    run.views.mkdir()
    assert supervisor.begin_attempt(run) == 0
    Watch(Run(run.path), 4)._follow()
    assert len(queued(run)) == 1


def test_a_begin_that_meets_a_broken_disk_may_be_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_arguments: object, **_more: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(AttemptStart, "write", broken)
    with pytest.raises(OSError, match="Input/output error"):
        supervisor.begin_attempt(run)
    assert not run.stop.exists()
    monkeypatch.undo()
    monkeypatch.setenv(JOB_ID_VARIABLE, "1")
    assert supervisor.begin_attempt(run) == 0
    assert count_failed_attempts(run, Plan.load(run)) == 1  # the one that has begun now
