from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayrun.control.rundir.checkpoint_records import BEGINNING, Lineage, ResumePoint, resume_point
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import RunDirError
from tests.history import began


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    made.checkpoints.mkdir()
    return made


def begin(run: Run, number: int, base: int = 0) -> None:
    began(run, number, base=base, job_id=str(number), start_time=0.0)


def commit(run: Run, number: int, iteration: int, time: float = 100.0) -> None:
    folder = run.checkpoint(iteration)
    folder.mkdir(exist_ok=True)
    (folder / "data").write_bytes(b"12345")
    run.attempt(number).append_commit(
        CheckpointCommit(
            iteration=iteration, path=str(folder), consumed_samples=iteration, time=time, seconds=1.0, files={"data": 5}
        ),
    )


def at(run: Run, iteration: int) -> ResumePoint:
    return ResumePoint(iteration=iteration, path=str(run.checkpoint(iteration)))


def test_the_newest_commit_of_the_newest_attempt_counts(run: Run) -> None:
    assert resume_point(run) == BEGINNING
    begin(run, 1)
    assert resume_point(run) == BEGINNING
    commit(run, 1, 10)
    commit(run, 1, 20)
    begin(run, 2, base=20)
    assert resume_point(run) == at(run, 20)
    commit(run, 2, 30)
    assert resume_point(run) == at(run, 30)
    assert [entry.iteration for entry in Lineage(run).line()] == [10, 20, 30]


def test_what_an_overtaken_attempt_commits_is_never_seen(run: Run) -> None:
    begin(run, 1)
    commit(run, 1, 10)
    begin(run, 2, base=10)
    commit(run, 1, 40)  # the node of attempt 1 was not dead after all
    assert resume_point(run) == at(run, 10)
    commit(run, 2, 20)
    assert resume_point(run) == at(run, 20)
    begin(run, 3, base=20)
    commit(run, 1, 60)
    assert resume_point(run) == at(run, 20)


def test_an_attempt_that_went_back_behind_a_damaged_checkpoint_has_a_line_that_rises(run: Run) -> None:
    begin(run, 1)
    for iteration in (10, 20):
        commit(run, 1, iteration)
    run.checkpoint(20).rename(run.path / "quarantine")
    assert [entry.iteration for entry in Lineage(run).line()] == [10, 20], "as long as nothing newer is saved"
    commit(run, 1, 15, time=200.0)
    assert [(entry.iteration, entry.time) for entry in Lineage(run).line()] == [(10, 100.0), (15, 200.0)]
    commit(run, 1, 20, time=300.0)
    assert [(entry.iteration, entry.time) for entry in Lineage(run).line()] == [(10, 100.0), (15, 200.0), (20, 300.0)]
    begin(run, 2, base=20)
    assert [entry.iteration for entry in Lineage(run).line()] == [10, 15, 20]


def test_a_torn_checkpoint_is_quarantined_and_the_one_before_counts(run: Run) -> None:
    begin(run, 1)
    commit(run, 1, 10)
    commit(run, 1, 20)
    (run.checkpoint(20) / "data").write_bytes(b"123")
    assert resume_point(run) == at(run, 10)
    (moved,) = Lineage(run).quarantine(resume_point(run), attempt=2)
    assert "data has 3 bytes, not 5" in moved
    assert (run.checkpoints / ".quarantine" / "iter_0000020-0002" / "data").read_bytes() == b"123"
    assert not run.checkpoint(20).exists()
    assert resume_point(run) == at(run, 10)


def test_if_no_checkpoint_is_whole_nothing_starts_from_the_beginning(run: Run) -> None:
    begin(run, 1)
    commit(run, 1, 10)
    (run.checkpoint(10) / "data").unlink()
    with pytest.raises(RunDirError, match=r"iter_0000010: data is missing"):
        resume_point(run)


def test_an_older_iteration_set_by_hand_is_obeyed_and_newer_ones_are_kept_aside(run: Run) -> None:
    begin(run, 1)
    for iteration in (10, 20, 30):
        commit(run, 1, iteration, time=100.0)
    run.tracker.write_text("10\n")
    os.utime(run.tracker, (50.0, 50.0))  # older than the commits: what a kill between commit and tracker left
    assert Lineage(run).chosen_by_hand() is None
    os.utime(run.tracker, (200.0, 200.0))
    assert Lineage(run).chosen_by_hand() == at(run, 10)
    assert len(Lineage(run).quarantine(at(run, 10), attempt=2)) == 2
    assert (run.checkpoints / ".superseded" / "iter_0000030-0002").is_dir()
    begin(run, 2, base=10)
    assert resume_point(run) == at(run, 10)


@pytest.mark.parametrize("text", ["", "release", "15", "30", "99"])
def test_a_tracker_that_names_no_older_checkpoint_means_nothing(run: Run, text: str) -> None:
    begin(run, 1)
    for iteration in (10, 30):
        commit(run, 1, iteration)
    run.tracker.write_text(text)
    assert Lineage(run).chosen_by_hand() is None
    run.tracker.unlink()
    assert Lineage(run).chosen_by_hand() is None
    assert resume_point(run) == at(run, 30)


def test_a_checkpoint_from_elsewhere_as_base_belongs_to_the_line(run: Run) -> None:
    begin(run, 1, base=50)
    with pytest.raises(RunDirError, match="missing"):
        resume_point(run)
    run.checkpoint(50).mkdir()
    assert resume_point(run) == at(run, 50)
