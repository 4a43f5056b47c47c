"""A staged checkpoint becomes one that counts, or nothing changes."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.rundir import evaluations, restarts
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.restarts import FailedRestart
from relayrun.control.rundir.run import Run
from relayrun.errors import FatalTrainingError
from relayrun.files import append_line
from relayrun.train.checkpoint import publish
from relayrun.train.reporting import liveness
from tests.history import began


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.checkpoints.mkdir()
    return run


def begin(run: Run, attempt: int, base: int = 0) -> None:
    began(run, attempt, base=base)


def save(run: Run, attempt: int, iteration: int, keep_last: int = 100, keep_every: int | None = None) -> None:
    staged = publish.prepare_staging(run, attempt, iteration)
    (staged / "data").write_text(f"{attempt} {iteration}")
    commit = CheckpointCommit(
        iteration=iteration,
        path=str(run.checkpoint(iteration)),
        consumed_samples=iteration * 8,
        time=time.time(),
        seconds=0.0,
    )
    publish.publish_checkpoint(run, attempt, commit, staged)
    publish.prune_checkpoints(run, attempt, keep_last, keep_every)


def names(run: Run) -> list[str]:
    return sorted(path.name for path in run.checkpoints.iterdir() if path.name.startswith("iter_"))


def test_a_published_checkpoint_has_its_name_its_commit_and_the_tracker(run: Run) -> None:
    begin(run, 1)
    save(run, 1, 7)
    assert (run.checkpoint(7) / "data").read_text() == "1 7"
    assert [(commit.iteration, commit.consumed_samples) for commit in run.attempt(1).read_commits()] == [(7, 56)]
    assert run.tracker.read_text() == "7\n"
    assert resume_point(run).path == str(run.checkpoint(7))
    assert list(run.staging(1).iterdir()) == []


def test_a_rank_whose_round_is_over_publishes_nothing_and_ends(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ended(Exception):
        pass

    def ended(code: int) -> None:
        raise Ended(code)

    begin(run, 1)
    monkeypatch.setenv(liveness.AGENT_SOCKET_VARIABLE, "0")
    monkeypatch.setenv(restarts.RESTART_VARIABLE, "2")
    monkeypatch.setattr(os, "_exit", ended)
    over = FailedRestart(
        restart=1,
        time=1e9,
        rank=None,
        node="n1",
        words="its agent is gone",
        iteration=7,
        base_iteration=0,
        durable_iteration=0,
        next_iteration=0,
        again=True,
    )
    over.append(run.attempt(1).failed_restarts)
    save(run, 1, 7)
    replace(over, restart=2).append(run.attempt(1).failed_restarts)
    with pytest.raises(Ended):
        save(run, 1, 8)
    assert resume_point(run).iteration == 7
    assert names(run) == ["iter_0000007"]


def test_an_attempt_that_is_no_longer_the_newest_publishes_nothing(run: Run) -> None:
    begin(run, 1)
    save(run, 1, 5)
    begin(run, 2, base=5)
    with pytest.raises(FatalTrainingError, match="superseded: attempt 2 has begun"):
        save(run, 1, 9)
    assert names(run) == ["iter_0000005"]
    assert run.tracker.read_text() == "5\n"
    assert resume_point(run).iteration == 5


def test_what_nobody_vouches_for_is_moved_aside(run: Run) -> None:
    begin(run, 1)
    run.checkpoint(6).mkdir()
    (run.checkpoint(6) / "data").write_text("leftover")
    save(run, 1, 6)
    assert (run.checkpoint(6) / "data").read_text() == "1 6"
    assert (run.checkpoints / ".superseded" / "iter_0000006-0001" / "data").read_text() == "leftover"


def test_a_failed_save_leaves_nothing_in_the_way_of_the_next(run: Run) -> None:
    begin(run, 1)
    (publish.prepare_staging(run, 1, 4) / "half").write_text("torn")
    save(run, 1, 4)
    assert [path.name for path in run.checkpoint(4).iterdir()] == ["data"]


def test_the_metrics_are_on_disk_before_a_checkpoint_counts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(run, 1)
    append_line(run.attempt(1).metrics, {"iteration": 4}, durable=False)
    synced: list[tuple[str, int]] = []

    def sync(fd: int) -> None:
        synced.append((os.readlink(f"/proc/self/fd/{fd}"), resume_point(run).iteration))
        raise OSError("the disk is full")  # which is no reason not to save

    monkeypatch.setattr(os, "fdatasync", sync)
    save(run, 1, 4)
    assert synced == [(str(run.attempt(1).metrics), 0)]
    assert resume_point(run).iteration == 4


def test_only_the_newest_are_kept(run: Run) -> None:
    begin(run, 1)
    for iteration in (2, 4, 6, 8):
        save(run, 1, iteration, keep_last=3)
    assert names(run) == ["iter_0000004", "iter_0000006", "iter_0000008"]
    begin(run, 2, base=8)
    save(run, 2, 10, keep_last=2)
    assert names(run) == ["iter_0000008", "iter_0000010"]


def test_multiples_of_keep_every_and_the_newest_stay_for_good(run: Run) -> None:
    begin(run, 1)
    for iteration in (2, 4, 5, 6, 8, 10, 11):
        save(run, 1, iteration, keep_last=1, keep_every=5)
    assert names(run) == ["iter_0000005", "iter_0000010", "iter_0000011"]


def test_what_waits_for_its_evaluation_stays_until_it_is_exported(run: Run) -> None:
    run.evaluations.mkdir()
    EvaluationPolicy(interval=4, total_steps=20, hold=2, time_limit=60).write(run.evaluation_policy)
    begin(run, 1)
    for iteration in (2, 4, 6, 8, 10):
        save(run, 1, iteration, keep_last=1)
    assert names(run) == ["iter_0000004", "iter_0000008", "iter_0000010"]
    exported = evaluations.evaluation_dir(run, 4, 1)
    exported.path.mkdir()
    exported.exported.touch()
    save(run, 1, 11, keep_last=1)
    assert names(run) == ["iter_0000008", "iter_0000011"]
    begin(run, 2, base=11)
    for iteration in (12, 16, 17):  # two are held, and no more
        save(run, 2, iteration, keep_last=1)
    assert names(run) == ["iter_0000012", "iter_0000016", "iter_0000017"]
    run.evaluation_policy.unlink()
    save(run, 2, 18, keep_last=1)
    assert names(run) == ["iter_0000018"]


def test_removal_touches_neither_other_folders_nor_checkpoints_outside_of_the_line(run: Run) -> None:
    begin(run, 1)
    save(run, 1, 4)
    begin(run, 2, base=4)
    (run.checkpoints / "mine").mkdir()
    run.checkpoint(20).mkdir()  # what an attempt that lost its right had published further on
    save(run, 2, 6, keep_last=2)
    assert names(run) == ["iter_0000004", "iter_0000006", "iter_0000020"]
    assert (run.checkpoints / "mine").is_dir()


def test_what_dead_attempts_staged_is_removed(run: Run) -> None:
    begin(run, 1)
    (publish.prepare_staging(run, 1, 4) / "half").write_text("torn")
    begin(run, 2)
    save(run, 2, 6)
    assert not run.staging(1).exists()


def test_a_commit_stands_although_the_tracker_cannot_be_written(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    begin(run, 1)
    run.tracker.mkdir()
    save(run, 1, 7)
    assert resume_point(run).iteration == 7
    assert "warning: latest_checkpointed_iteration.txt not written" in capsys.readouterr().err


def test_a_save_whose_commit_line_failed_twice_is_tried_again(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No room for the line, twice: its folder is put aside under a free name each time."""
    begin(run, 1)
    for failing in (True, True, False):
        with monkeypatch.context() as patched:
            if failing:
                patched.setattr(Attempt, "append_commit", no_space)
            try:
                save(run, 1, 10)
            except OSError:
                assert failing
    assert resume_point(run).iteration == 10
    aside = sorted(path.name for path in (run.checkpoints / ".superseded").iterdir())
    assert aside == ["iter_0000010-0001", "iter_0000010-0001-2"]


def no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")
