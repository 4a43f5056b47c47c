"""`relayrun checkpoint verify`, and what `relayrun status` says of quarantine."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir.checkpoint_records import (
    Lineage,
    ResumePoint,
    newer_broken_checkpoints,
    newest_commit_at,
    quarantine_checkpoint,
    quarantined_checkpoints,
    resume_point,
)
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.errors import FatalTrainingError
from relayrun.train.checkpoint import checksums
from relayrun.train.checkpoint.save_and_restore import quarantine_and_fall_back
from tests.history import began


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Checkpoints of iterations 10 and 20, without blocks: a hash for each file."""
    run = Run(tmp_path / "run")
    began(run, 1, base=0)
    run.plan.write_text('{"format": 2}')
    for iteration in (10, 20):
        folder = run.checkpoint(iteration)
        folder.mkdir(parents=True)
        (folder / "common.pt").write_bytes(b"common" * iteration)
        root = checksums.write_checksum_index(folder, iteration, {})
        files = {path.name: path.stat().st_size for path in folder.iterdir()}
        commit = CheckpointCommit(
            iteration=iteration, path=str(folder), consumed_samples=0, time=1.0, seconds=1.0, files=files, checksum=root
        )
        run.attempt(1).append_commit(commit)
    return run


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[3] ^= 4
    path.write_bytes(data)


def test_a_clean_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", "verify", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith(f"clean: {run.checkpoint(20)}: 120 bytes in ")
    assert main(["checkpoint", "verify", f"{run.path}:10"]) == 0
    assert capsys.readouterr().out.startswith(f"clean: {run.checkpoint(10)}: 60 bytes in ")


def test_a_damaged_checkpoint(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    flip(run.checkpoint(20) / "common.pt")
    assert main(["checkpoint", "verify", f"{run.path}:20"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        f"damaged: {run.checkpoint(20)}",
        "  common.pt is not the one that was saved",
    ]


def test_hashes_that_fit_a_changed_file_do_not_fit_the_commit(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.checkpoint(20)
    flip(folder / "common.pt")
    (folder / checksums.CHECKSUM_INDEX).unlink()
    checksums.write_checksum_index(folder, 20, {})
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert "checksums.json is not the one that was saved" in capsys.readouterr().out


def test_a_copy_that_no_run_vouches_for_is_compared_with_its_own_hashes(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = run.checkpoint(20).rename(tmp_path / "copy")
    assert main(["checkpoint", "verify", str(copy)]) == 0
    assert "; no run vouches for its checksums.json" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (":15", "no checkpoint of iteration 15"),
        (":10", "was saved without checksums"),
    ],
)
def test_what_cannot_be_verified_is_one_error(
    run: Run, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    (run.checkpoint(10) / checksums.CHECKSUM_INDEX).unlink()
    run.attempt(1).commits.write_text(run.attempt(1).commits.read_text().replace('"checksum"', '"earlier"'))
    assert main(["checkpoint", "verify", f"{run.path}{name}"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said


def test_a_checkpoint_that_was_removed_to_make_room_is_not_called_damaged(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(run.checkpoint(10))
    assert main(["checkpoint", "verify", f"{run.path}:10"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert "the checkpoint of iteration 10 is not there any more" in said.err
    assert "it has: 20" in said.err


def test_a_checkpoint_that_goes_away_while_it_is_read_is_not_called_damaged(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run trains on, and removes its oldest ones."""
    read = checksums.hash_checkpoint_file

    def removed(path: Path) -> checksums.FileChecksum:
        path.parent.rename(run.path / "removing")
        return read(path)

    monkeypatch.setattr(checksums, "hash_checkpoint_file", removed)
    assert main(["checkpoint", "verify", f"{run.path}:10"]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "was removed or moved while it was read" in said.err


def test_a_newer_one_that_is_torn_is_said(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoint(20) / "common.pt").write_bytes(b"short")
    assert main(["checkpoint", "verify", str(run.path)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == (f"damaged: {run.checkpoint(20)}: common.pt has 5 bytes, not 120")
    quarantine_checkpoint(
        run.checkpoints, ResumePoint(iteration=20, path=str(run.checkpoint(20))), attempt=2, why="torn"
    )
    assert main(["checkpoint", "verify", str(run.path)]) == 0, "`relayrun status` tells of it"


def test_a_file_that_the_disk_does_not_give_is_a_fault(
    run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(_path: Path) -> checksums.FileChecksum:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(checksums, "hash_checkpoint_file", unreadable)
    assert main(["checkpoint", "verify", str(run.path)]) == 1
    assert "  common.pt cannot be read: Input/output error" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["common.pt", "checksums.json"])
def test_what_lies_in_the_place_of_a_file(run: Run, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """A link to the same bytes is as good; one into nowhere, in a circle or to a folder is no file."""
    path = run.checkpoint(20) / name
    elsewhere = path.rename(run.path / "elsewhere")
    path.symlink_to(elsewhere)
    assert main(["checkpoint", "verify", f"{run.path}:20"]) == 0
    for target in ("nowhere", name, "."):
        path.unlink()
        path.symlink_to(target)
        assert main(["checkpoint", "verify", f"{run.path}:20"]) == 1, target
        said = capsys.readouterr()
        assert name in said.out, target
        assert said.err == "", target


def test_two_checkpoints_of_a_run_that_changed_places(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    run.checkpoint(10).rename(run.path / "aside")
    run.checkpoint(20).rename(run.checkpoint(10))
    (run.path / "aside").rename(run.checkpoint(20))
    for iteration in (10, 20):
        assert main(["checkpoint", "verify", f"{run.path}:{iteration}"]) == 1
        assert "checksums.json is not the one that was saved" in capsys.readouterr().out


def test_the_commit_of_a_folder(run: Run, tmp_path: Path) -> None:
    found = newest_commit_at(run.checkpoint(10))
    assert found is not None
    assert (found.iteration, found.checksum is None) == (10, False)
    assert newest_commit_at(run.checkpoint(15)) is None
    assert newest_commit_at(tmp_path / "anywhere") is None


def test_what_was_put_into_quarantine_says_why_as_long_as_it_lies_there(run: Run) -> None:
    base = ResumePoint(iteration=20, path=str(run.checkpoint(20)))
    target = quarantine_checkpoint(
        run.checkpoints, base, attempt=2, why="the values of w are not those that were saved"
    )
    assert (target / "common.pt").exists()
    assert resume_point(run).iteration == 10
    for found in (quarantined_checkpoints(run), newer_broken_checkpoints(run, Lineage(run), resume_point(run))):
        assert [(entry.iteration, entry.path) for entry in found] == [(20, str(target))]
        assert found[0].why == "the values of w are not those that were saved"
    run.checkpoint(20).mkdir()
    second = quarantine_checkpoint(run.checkpoints, base, attempt=2, why="again")
    assert second.name == "iter_0000020-0002-2"
    assert {entry.why for entry in quarantined_checkpoints(run)} == {
        "the values of w are not those that were saved",
        "again",
    }


@pytest.mark.parametrize(("begins_with", "then"), [(20, 10), (0, 0)])
def test_begin_follows_where_its_own_base_is_damaged_and_stays_where_a_later_one_is(
    run: Run, begins_with: int, then: int
) -> None:
    """At a resume, also from an iteration that a person chose, and at a rollback."""
    if begins_with:
        began(run, 2, base=begins_with)
    attempt = run.attempt(run.attempt_numbers()[-1])
    base = ResumePoint(iteration=20, path=str(run.checkpoint(20)))
    assert (
        quarantine_and_fall_back(run, attempt, base, checksums.DamagedCheckpoint("it holds something else")).iteration
        == 10
    )
    begin = attempt.read_begin()
    assert begin is not None
    assert begin.base_iteration == then
    assert [left.why for left in quarantined_checkpoints(run)] == ["it holds something else"]
    with pytest.raises(FatalTrainingError, match="no checkpoint of this run is whole"):
        quarantine_and_fall_back(run, attempt, resume_point(run), checksums.DamagedCheckpoint("and so does this one"))
    assert [left.iteration for left in quarantined_checkpoints(run)] == [20, 10]


def test_an_attempt_that_fell_back_begins_where_it_says_now(run: Run) -> None:
    """Whoever holds the record since before reads it anew: the supervisor beside the ranks."""
    attempt = run.attempt(1)
    before = attempt.read_begin()
    other = Run(run.path).attempt(1)
    assert other.fall_back(10, str(run.checkpoint(10))).base_iteration == 10
    after = attempt.read_begin()
    assert before is not None
    assert after is not None
    assert (before.base_iteration, after.base_iteration) == (0, 10)
    assert attempt.read_begin() is after


def test_nothing_is_written_through_a_link_of_a_run_that_others_can_write(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("words of this user\n")
    (run.path / "mirror").mkdir(exist_ok=True)
    (run.path / "mirror/verified.jsonl").unlink(missing_ok=True)
    (run.path / "mirror/verified.jsonl").symlink_to(mine)
    run.path.chmod(0o777)
    assert main(["checkpoint", "verify", str(run.path)]) == 0
    assert capsys.readouterr().out.startswith("clean: ")
    assert mine.read_text() == "words of this user\n"
