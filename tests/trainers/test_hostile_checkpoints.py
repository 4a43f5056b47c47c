"""A folder of checkpoints into which another user, or a crafted copy, has put more than checkpoints."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relayrun.control.rundir.checkpoint_records import checkpoint_fault
from relayrun.control.rundir.records import CheckpointCommit
from relayrun.control.trainers.checkpoint_cleanup import ResumeGuard
from relayrun.control.trainers.checkpoint_hashes import _hash_files
from relayrun.files import writable_by_owner_alone
from relayrun.trust import UntrustedError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints beside a document that is none of theirs."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/words").write_text("mine")
    with writable_by_owner_alone():
        (tmp_path / "run/checkpoints").mkdir(parents=True)
    return tmp_path / "run/checkpoints"


def test_kept_checkpoints_behind_a_link_are_refused(folder: Path, tmp_path: Path) -> None:
    (folder / ".kept").symlink_to(tmp_path / "mine")
    (folder / "iter_1").write_text("weights")
    for act in (lambda: ResumeGuard(folder).keep([folder / "iter_1"]), lambda: release(folder)):
        with pytest.raises(UntrustedError, match="this is a link"):
            act()
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["words"]


def test_kept_checkpoints_in_a_folder_that_others_may_write_are_refused(folder: Path) -> None:
    (folder / ".kept").mkdir()
    (folder / ".kept").chmod(0o775)
    with pytest.raises(UntrustedError, match="its group may write this"):
        release(folder)


@pytest.mark.parametrize("name", ["..%2F..%2Fmine%2Fwords", "iter_1%2F..%2F..%2F..%2Fmine%2Fwords", "absolute"])
def test_the_name_of_a_kept_checkpoint_leads_nowhere_else(folder: Path, tmp_path: Path, name: str) -> None:
    with writable_by_owner_alone():
        (folder / ".kept").mkdir()
    name = name if name != "absolute" else str(tmp_path / "mine/words").replace("/", "%2F")
    (folder / ".kept" / name).write_text("theirs")
    with pytest.raises(UntrustedError, match="this is no kept checkpoint"):
        release(folder)
    assert (tmp_path / "mine/words").read_text() == "mine"


def test_a_link_among_kept_checkpoints_is_left_alone(folder: Path, tmp_path: Path) -> None:
    with writable_by_owner_alone():
        (folder / ".kept").mkdir()
    (tmp_path / "mine/words").chmod(0o400)
    (folder / ".kept/iter_1").symlink_to(tmp_path / "mine/words")
    with pytest.raises(UntrustedError, match="this is no kept checkpoint"):
        release(folder)
    assert (tmp_path / "mine/words").stat().st_mode & 0o777 == 0o400
    assert not os.path.lexists(folder / "iter_1")


def test_a_pipe_and_a_device_in_a_checkpoint_are_no_files_of_it(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        commit = CheckpointCommit(iteration=1, path=str(folder), files={name: 0}, consumed_samples=0, time=1, seconds=1)
        assert checkpoint_fault(commit) == f"{name} is no file"
        with pytest.raises(OSError, match="Invalid argument"):
            _hash_files(str(folder), [name])


def release(folder: Path) -> None:
    ResumeGuard(folder).release(restore=True, attempt=1)
