"""Copies that come back from a second place: cut anywhere, torn on their way, newer than the run, or of a lost run."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.control.rundir import mirror as records
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.errors import InputError, RelayrunError, RunDirError
from relayrun.train.mirror import restore
from relayrun.train.mirror.destination import CopyFailed
from tests.mirrored import SIZE, Mirrored, digest, flip
from tests.train.test_mirror import Cut, cut_at, make_run, mirrored  # noqa: F401 - the last two are fixtures


def test_a_restore_that_is_cut_anywhere_names_nothing_that_is_not_whole(
    mirrored: Mirrored,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mirrored.sync()
    final = mirrored.run.checkpoint(30)

    def tear() -> None:
        shutil.rmtree(mirrored.run.checkpoints / ".staging", ignore_errors=True)
        shutil.rmtree(mirrored.run.checkpoints / ".superseded", ignore_errors=True)
        (final / "common.pt").write_bytes(b"torn")

    tear()
    with cut_at(0, monkeypatch) as calls:
        restore.restore_copy(mirrored.run, None)
    assert {"rename", "fsync", "append_line", "count"} <= set(calls)
    for number in range(1, len(calls) + 1):
        tear()
        with cut_at(number, monkeypatch), pytest.raises(Cut):
            restore.restore_copy(mirrored.run, None)
        assert not final.exists() or digest(final) == mirrored.known[30] or _is_torn(final)
        if not final.exists() or _is_torn(final):
            assert restore.restore_copy(mirrored.run, None)[0].startswith("restored iteration 30: ")
        assert digest(final) == mirrored.known[30]
        assert not list((mirrored.run.checkpoints / ".staging/restore").glob("iter_0000030"))


def _is_torn(folder: Path) -> bool:
    return (folder / "common.pt").read_bytes() == b"torn"


def test_what_a_cut_restore_left_torn_is_no_fault_of_the_copy(mirrored: Mirrored, tmp_path: Path) -> None:  # noqa: F811
    """A node that loses its power leaves a file of the right length without its bytes."""
    mirrored.sync()
    mirrored.lose()
    where = str(mirrored.place)
    for staged, bring in (
        (mirrored.run.checkpoints / ".staging/restore", lambda: restore.restore_copy(mirrored.run, None)),
        (tmp_path / "back/.staging", lambda: restore.fetch_copy(where, None, tmp_path / "back")),
    ):
        begin = _Begin(staged / "iter_0000030/common.pt")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(restore, "copy_faults", begin.cut)
            with pytest.raises(Cut):
                bring()
        assert begin.file.stat().st_size == SIZE
    assert restore.restore_copy(mirrored.run, None)[0].startswith("restored iteration 30: ")
    assert restore.fetch_copy(where, None, tmp_path / "back")[0].startswith("restored iteration 30: ")
    assert digest(mirrored.run.checkpoint(30)) == digest(tmp_path / "back/iter_0000030") == mirrored.known[30]


class _Begin:
    """Cuts a restore before it reads back, and tears a file of it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def cut(self, *_: object, **__: object) -> None:
        flip(self.file)
        raise Cut


def test_a_copy_that_is_newer_than_the_records_of_the_run_is_told(
    mirrored: Mirrored,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The run directory came from an older backup."""
    commits = mirrored.run.attempt(1).commits
    old = commits.read_bytes()
    mirrored.save(40)
    mirrored.sync()
    commits.write_bytes(old)
    shutil.rmtree(mirrored.run.checkpoint(40))
    words = "a copy of iteration 40 is there, too"
    with pytest.raises(InputError, match="there is nothing to restore") as error:
        restore.restore_copy(mirrored.run, None)
    assert words in (error.value.hint or "")
    with pytest.raises(InputError, match="no copy of iteration 40 that counts") as error:
        restore.restore_copy(mirrored.run, 40)
    assert f"relayrun checkpoint restore {mirrored.place}:40 --to FOLDER" in (error.value.hint or "")
    mirrored.lose()
    assert main(["checkpoint", "restore", str(mirrored.run.path)]) == 0
    said = capsys.readouterr().out
    assert "restored iteration 30: " in said
    assert words in said
    assert f"relayrun checkpoint restore {mirrored.place}:40 --to FOLDER" in said
    assert resume_point(mirrored.run).iteration == 30


def test_a_run_that_is_lost_wholly_is_told_how_it_comes_back(
    mirrored: Mirrored,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    mirrored.sync()
    shutil.rmtree(mirrored.run.path)
    assert main(["checkpoint", "restore", str(mirrored.run.path)]) == 1
    said = capsys.readouterr().err
    assert "relayrun checkpoint restore PLACE/PROJECT/NAME --to FOLDER" in said


def test_a_damaged_copy_names_the_one_before_it(mirrored: Mirrored, tmp_path: Path) -> None:  # noqa: F811
    mirrored.sync()
    mirrored.lose()
    flip(mirrored.place / "iter_0000030/common.pt")
    words = "the copy of iteration 30 is damaged: common.pt is not the one"
    with pytest.raises(CopyFailed, match=words) as error:
        restore.restore_copy(mirrored.run, 30)
    assert "iteration 20" in (error.value.hint or "")
    with pytest.raises(CopyFailed, match=words) as error:
        restore.fetch_copy(str(mirrored.place), 30, tmp_path / "named")
    assert "iteration 20" in (error.value.hint or "")
    damaged, restored = restore.fetch_copy(str(mirrored.place), None, tmp_path / "back")
    assert words in damaged
    assert restored.startswith("restored iteration 20: ")
    assert os.listdir(tmp_path / "back") == ["iter_0000020"]
    os.truncate(mirrored.place / "iter_0000020/part/data", SIZE - 1)
    with pytest.raises(CopyFailed, match="it has 2999 bytes, not 3000"):
        restore.restore_copy(mirrored.run, None)
    assert not list(mirrored.run.checkpoints.glob("iter_*"))


def test_a_place_that_cannot_be_written_costs_no_newer_copy(
    mirrored: Mirrored,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is not the copy's fault: an older one is not taken for it."""
    mirrored.sync()
    mirrored.lose()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "the file")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fadvise", full)
        for bring in (
            lambda: restore.restore_copy(mirrored.run, None),
            lambda: restore.fetch_copy(str(mirrored.place), None, tmp_path / "back"),
        ):
            with pytest.raises(RunDirError, match="iteration 30 cannot be put there: the file: No space left") as error:
                bring()
            assert "the same command goes on" in (error.value.hint or "")
    assert restore.restore_copy(mirrored.run, None)[0].startswith("restored iteration 30: ")


def test_checkpoints_behind_a_link_that_leads_nowhere_are_told(mirrored: Mirrored, tmp_path: Path) -> None:  # noqa: F811
    """Scratch was purged, or is not mounted."""
    mirrored.sync()
    shutil.rmtree(mirrored.run.checkpoints)
    mirrored.run.checkpoints.symlink_to(tmp_path / "scratch/of/run")
    with pytest.raises(RunDirError, match="this is a link to a folder that is not there") as error:
        restore.restore_copy(mirrored.run, None)
    assert f"mkdir -p {tmp_path}/scratch/of/run" in (error.value.hint or "")
    (tmp_path / "scratch/of/run").mkdir(parents=True)
    assert restore.restore_copy(mirrored.run, None)[0].startswith("restored iteration 30: ")
    assert digest(tmp_path / "scratch/of/run/iter_0000030") == mirrored.known[30]


def test_two_do_not_restore_at_once(mirrored: Mirrored, tmp_path: Path) -> None:  # noqa: F811
    mirrored.sync()
    mirrored.lose()
    with open(mirrored.run.mirror / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RunDirError, match="another process copies"):
            restore.restore_copy(mirrored.run, None)
    (tmp_path / "back").mkdir()
    held = os.open(tmp_path / "back", os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process restores into this folder"):
            restore.fetch_copy(str(mirrored.place), None, tmp_path / "back")
    finally:
        os.close(held)


@pytest.mark.parametrize("where", ["name", "files", "stray", "pipe"])
def test_the_records_of_a_strangers_place_lead_nowhere(
    mirrored: Mirrored,  # noqa: F811
    tmp_path: Path,
    where: str,
) -> None:
    """Somebody else may have written the place of copies that a person names with --to."""
    mirrored.sync()
    mine, target = tmp_path / "mine", tmp_path / "back"
    mine.mkdir()
    (mine / "precious").write_text("words of this user")
    copy = records.copies_newest_first(records.read_copies(mirrored.place))[0]
    (mirrored.place / copy.name / "more").write_text("of the stranger")
    names = {"name": "../../mine", "files": f"{tmp_path}/mine/made", "stray": "../../../mine/made"}
    if where == "name":
        shutil.copytree(mirrored.place / copy.name, mirrored.place / names["name"], dirs_exist_ok=True)
        lying = replace(copy, name=names["name"], iteration=99)
    elif where == "pipe":
        lying = replace(copy, files=copy.files | {"waits": 15})
        os.mkfifo(mirrored.place / copy.name / "waits")
    else:
        lying = replace(copy, files=copy.files | {names[where]: 15}, iteration=99)
    lying.append(mirrored.place / "copies.jsonl")
    before = sorted(mine.rglob("*"))
    with pytest.raises(RelayrunError, match="Invalid" if where == "pipe" else "a name that leads elsewhere"):
        restore.fetch_copy(str(mirrored.place), copy.iteration if where == "pipe" else None, target)
    assert sorted(mine.rglob("*")) == before
    assert (mine / "precious").read_text() == "words of this user"
