"""What a submit refuses before anything is queued, with one clear error."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from relayrun.config.compose import resolve
from relayrun.errors import RelayrunError
from relayrun.submit import submission
from relayrun.submit.check import storage
from relayrun.tokens.shards.shard import ShardWriter
from tests.workspace import Workspace

NOBODY = 65_534


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Jobs log below `root` here."""
    monkeypatch.setattr(submission, "log_folder", lambda _: tmp_path / "root/logs")
    return Workspace.make(tmp_path)


@contextmanager
def ordinary_user() -> Iterator[None]:
    """File modes hold for this process, too, where it is root's."""
    root = os.geteuid() == 0
    try:
        if root:
            os.seteuid(NOBODY)
        yield
    finally:
        if root:
            os.seteuid(0)


def refused(path: Path, *words: str) -> None:
    with pytest.raises(RelayrunError) as error:
        submission.submit_run(resolve.load_run_config(path))
    assert all(word in str(error.value) for word in words), error.value
    folder = Path(resolve.load_run_config(path).run_dir or "")
    assert not list(folder.glob("local/job-*.json"))
    assert not (folder / "plan.json").exists()


def test_too_few_tokens_for_one_window(workspace: Workspace) -> None:
    folder = workspace.folder / "short"
    writer = ShardWriter(folder / "shard", np.uint16)
    writer.add(np.ones(50, dtype=np.int64), np.array([50]))
    writer.finish()
    refused(workspace.config("run", data={"datasets": [str(folder)]}), "50 tokens", "seq_length 64 needs 65")


def test_too_few_tokens_in_a_validation_set(workspace: Workspace) -> None:
    folder = workspace.folder / "short"
    writer = ShardWriter(folder / "shard", np.uint16)
    writer.add(np.ones(50, dtype=np.int64), np.array([50]))
    writer.finish()
    refused(workspace.config("run", data={"validation": {"held": [str(folder)]}}), "'held'", "50 tokens")


def test_a_log_folder_that_cannot_be_made(workspace: Workspace) -> None:
    (workspace.folder / "root").write_text("a file where the folder should be")
    refused(workspace.config("run"), str(workspace.folder / "root/logs"), "log")


def test_a_log_folder_that_this_user_cannot_write(tmp_path: Path) -> None:
    folder = tmp_path / "logs"
    folder.mkdir(mode=0o755)
    os.chmod(tmp_path, 0o755)
    for parent in tmp_path.parents[:3]:
        if parent.stat().st_uid == os.geteuid():
            os.chmod(parent, parent.stat().st_mode | 0o055)  # one of them may be /tmp
    if os.geteuid():
        folder.chmod(0o555)
    with ordinary_user(), pytest.raises(RelayrunError, match="cannot be written") as error:
        storage.check_log_folder(folder)
    assert str(folder) in str(error.value)
    assert "->" in str(error.value)
    folder.chmod(0o777)
    with ordinary_user():
        storage.check_log_folder(folder)
    assert list(folder.iterdir()) == []
