"""`relayrun runs`: what lies where, and a run that is moved, whatever is cut, full, changed or wrong."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relayrun import leftovers, places
from relayrun.cli import main
from relayrun.cli.watch import runs as command
from relayrun.control.rundir import campaign
from relayrun.control.rundir.campaign import Campaign, CampaignMember, CampaignMembership, MemberStarted
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.errors import InputError, RunDirError
from relayrun.submit import move_run
from relayrun.watch.status.queue import QueueStatus
from tests.cli.test_resume_command import submitted  # noqa: F401 - a fixture
from tests.history import make_history, queue_is_run

PAGE = (Path(__file__).resolve().parents[2] / "docs/how-to/runs.md").read_text(encoding="utf-8")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose chain has ended, in a project, with links and a folder that is closed to others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / places.PROJECT_MARKER).touch()
    run = make_history(tmp_path / "logs/runs/my-project/my-run", lines=30, attempts=3)
    shutil.rmtree(run.path / "local")
    run.stop.write_text("done: all\n")
    (run.path / "latest").symlink_to("checkpoints/iter_0000030")
    (run.path / "big").symlink_to("/elsewhere/big")
    (run.path / "private").mkdir(mode=0o700)
    (run.path / "private/key").write_text("k")
    (run.path / "private/key").chmod(0o600)
    (tmp_path / "archive").mkdir()
    return run


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the archive were another file system."""
    rename, without_replacing = os.rename, leftovers._rename

    def between(source: Any, target: Any, *flag: int) -> Any:
        if "archive" in str(target) and "archive" not in str(source):
            raise OSError(errno.EXDEV, os.strerror(errno.EXDEV), str(source), None, str(target))
        return without_replacing(source, target, *flag) if flag else rename(source, target)

    monkeypatch.setattr(os, "rename", between)
    monkeypatch.setattr(leftovers, "_rename", between)


def held(path: Path) -> dict[str, object]:
    """All that lies below a path: bytes, times, modes, links; but the lock, whose time is when it was first moved, and
    the number of the directory in its plan."""
    found: dict[str, object] = {
        name: (entry, (path / name).read_bytes() if entry.kind == "file" else None)
        for name, entry in move_run.list_entries(path).items()
        if name != ".submit.lock"
    }
    return found | {"plan.json": json.loads((path / "plan.json").read_bytes()) | {"directory": 0}}


def test_the_list(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(path.stat().st_size for path in run.path.rglob("*") if path.is_file() and not path.is_symlink())
    shutil.copytree(run.path, run.path.with_name("damaged"), symlinks=True)
    (run.path.with_name("damaged") / "plan.json").write_text("{")
    assert main(["runs", "list"]) == 0
    out = capsys.readouterr().out
    assert re.search(rf"{run.path} +stopped +{size / 1e3:.1f} kB +\S+ days ago +30 +\S+ days ago +done: all", out)
    assert re.search(rf"{run.path.with_name('damaged')} +damaged ", out)
    assert "2 runs, " in out
    assert main(["runs", "list", "--json", str(run.path.parent)]) == 0
    rows = {Path(row["path"]).name: row for row in json.loads(capsys.readouterr().out)}
    assert (rows["my-run"]["state"], rows["my-run"]["bytes"]) == ("stopped", size)
    assert main(["runs", "list", "archive"]) == 0
    assert capsys.readouterr().out == "no runs below archive\n"
    assert main(["runs", "list", "none"]) == 1
    assert "none: it cannot be looked into" in capsys.readouterr().err


@pytest.mark.usefixtures("elsewhere")
def test_the_commands_of_the_page_about_runs(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    (text,) = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.M | re.S)
    lines = [line.partition("#")[0].split() for line in text.splitlines()]
    assert [line[:3] for line in lines] == [
        ["relayrun", "runs", "list"],
        ["relayrun", "runs", "list"],
        ["relayrun", "runs", "archive"],
        ["relayrun", "runs", "move"],
    ]
    place = Path("archive").absolute()
    before = held(run.path)
    for line in lines:
        assert main([word.replace("/archive", str(place)) for word in line[1:]]) == 0
    out = capsys.readouterr().out
    assert f"are in {place}/my-project/my-run, each read back: the copy is whole\n{run.path} is removed\n" in out
    assert "big is a link, as it was: what it leads to is not copied" in out
    assert "go on: relayrun resume " in out
    moved = Run(Path("logs/runs/my-project/my-run").absolute())
    assert held(moved.path) == before
    assert list(place.rglob("*")) == [place / "my-project"]
    assert resume_point(moved).path == str(moved.checkpoint(30))


def test_inside_a_file_system_it_is_a_rename(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    inode = run.metrics_view.stat().st_ino
    assert main(["runs", "archive", "my-project/my-run", "--to", "archive"]) == 0
    assert "renamed to" in capsys.readouterr().out
    assert Path("archive/my-project/my-run/metrics.jsonl").stat().st_ino == inode
    assert not run.path.exists()


class Cut(BaseException):
    """A kill."""


def cut_at(monkeypatch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Kill at the step of this number; return the steps that were done until then."""
    steps: list[str] = []

    def before(module: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(module, name)

        def step(*values: Any, **options: Any) -> Any:
            if len(steps) == number:
                raise Cut
            steps.append(name)
            return real(*values, **options)

        monkeypatch.setattr(module, name, step)

    for module, name in [
        (move_run, "append_line"),
        (move_run, "write_json"),
        (move_run, "fsync_directory"),
        (move_run, "file_checksum"),
        (os, "rename"),
        (move_run, "rename_no_replace"),
        (shutil, "rmtree"),
    ]:
        before(module, name)
    return steps


@pytest.mark.slow
@pytest.mark.usefixtures("elsewhere")
def test_a_kill_at_any_step_loses_nothing(tmp_path: Path, run: Run) -> None:
    for attempt in (2, 3):
        shutil.rmtree(run.attempt(attempt).path)
    before = held(run.path)
    target = tmp_path / "archive/my-project/my-run"
    for number in range(1000):
        with pytest.MonkeyPatch.context() as patch:
            steps = cut_at(patch, number)
            try:
                move_run.move_run_directory(run, target)
                done = True
            except Cut:
                done = False
        whole = [path for path in (run.path, target) if path.exists() and held(path) == before]
        assert whole, (number, steps)
        assert not target.exists() or target in whole  # nothing half-copied has the name
        if not done:
            assert move_run.finish_move(run.path, target) or move_run.move_run_directory(run, target) is None, (
                number,
                steps,
            )
        assert held(target) == before
        assert [path.name for path in run.path.parent.iterdir()] == []
        assert [path.name for path in target.parent.iterdir()] == ["my-run"]
        if done:
            break
        shutil.copytree(target, run.path, symlinks=True)
        for name, entry in move_run.list_entries(target).items():
            if entry.kind == "file":
                os.utime(run.path / name, ns=(entry.changed, entry.changed))
        shutil.rmtree(target)
    assert {"append_line", "file_checksum", "rename", "rmtree", "write_json"} <= set(steps)
    assert number > 30


@pytest.mark.usefixtures("elsewhere")
def test_a_second_call_copies_what_is_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        steps = cut_at(patch, 20)
        with pytest.raises(Cut):
            main(["runs", "archive", str(run.path), "--to", "archive"])
    copied = []
    real = move_run._copy_file
    monkeypatch.setattr(move_run, "_copy_file", lambda *values: copied.append(values[0]) or real(*values))
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 0
    total = sum(entry.kind == "file" for entry in move_run.list_entries(Path("archive/my-project/my-run")).values())
    assert len(copied) == total - steps.count("append_line")


@pytest.mark.usefixtures("elsewhere")
def test_a_copy_that_is_wrong_is_not_claimed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = held(run.path)
    real = move_run.file_checksum

    def flipped(path: Path) -> str:
        if path.name == "plan.json":
            path.write_bytes(path.read_bytes().replace(b"h", b"H", 1))
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move_run, "file_checksum", flipped)
        assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
    assert "what was read back is not what was written" in capsys.readouterr().err
    assert held(run.path) == before
    assert not Path("archive/my-project/my-run").exists()
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 0


@pytest.mark.usefixtures("elsewhere")
def test_a_run_that_changes_meanwhile_stays(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    real = move_run.file_checksum

    def writes(path: Path) -> str:
        if path.name == "plan.json":
            run.stop.write_text("done: all, and more\n")
        return real(path)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move_run, "file_checksum", writes)
        assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
    assert re.search("changed since it was copied: STOP|it changes while it is moved", capsys.readouterr().err)
    assert run.stop.exists()
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 0
    assert Path("archive/my-project/my-run/STOP").read_text() == "done: all, and more\n"


@pytest.mark.usefixtures("elsewhere")
def test_a_full_place_is_said_before_anything_is_copied(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(move_run, "free_space", lambda _: 10)
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
    assert re.search(r"bytes are to be copied, and 10 are free", capsys.readouterr().err)
    assert run.plan.exists()


def test_a_run_that_lives_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = make_history(tmp_path / "run", lines=30, attempts=3)
    with queue_is_run(run):
        for command in (["archive", str(run.path), "--to", str(tmp_path)], ["move", str(run.path), "elsewhere"]):
            assert main(["runs", *command]) == 1
            assert "the chain is running" in capsys.readouterr().err
    assert run.plan.exists()


def test_a_run_that_a_stage_begins_with_or_that_waits_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its campaign looks for both where they are."""
    monkeypatch.chdir(tmp_path)
    first, second = (make_history(tmp_path / f"c-{name}", lines=30, attempts=3) for name in ("a", "b"))
    shutil.rmtree(second.attempts)
    for run in (first, second):
        shutil.rmtree(run.path / "local")
    first.stop.write_text("stopped by ada\n")
    folder = tmp_path / "c"
    (folder / "members/a").mkdir(parents=True)
    members = [
        CampaignMember(name="a", run_dir=str(first.path)),
        CampaignMember(name="b", run_dir=str(second.path), source="a"),
    ]
    for member in members:
        CampaignMembership(folder=str(folder), member=member.name).write(campaign.membership_path(member.run))
    Campaign(kind="stages", name="p/c", owner=os.geteuid(), scheduler="local", at_once=None, members=members).save(
        folder
    )
    MemberStarted(job_id="1", time=0.0).write(campaign.member_started_path(folder, "a"))
    assert main(["runs", "move", str(first.path), "elsewhere"]) == 1
    assert "stages look for this run here, and have no checkpoint of their own yet: b" in capsys.readouterr().err
    assert main(["runs", "move", str(second.path), "elsewhere"]) == 1
    assert "the stage before it, begins this run later, and looks for it here" in capsys.readouterr().err
    assert first.plan.exists()
    assert second.plan.exists()
    assert not (tmp_path / "elsewhere").exists()
    second.stop.write_text("stopped by ada\n")
    assert main(["runs", "move", str(first.path), "elsewhere"]) == 0


@pytest.mark.usefixtures("elsewhere")
def test_what_cannot_be_a_place_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").mkdir()
    for target, words in [
        (run.path / "inside", "cannot be moved into itself"),
        (run.path, "cannot be moved into itself"),
        (tmp_path / "taken", "something is there already"),
        (tmp_path / ".relayrun" / "x", "it is not moved"),
    ]:
        assert main(["runs", "move", str(run.path), str(target)]) == 1
        assert words in capsys.readouterr().err
    assert main(["runs", "archive", str(run.path), "--to", "none"]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    assert main(["runs", "archive", "my-project/no-run", "--to", "archive"]) == 1
    assert "there is no such run" in capsys.readouterr().err
    (run.path / "out").symlink_to("../../x")
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
    assert "a relative link leads out of the run directory: out -> ../../x" in capsys.readouterr().err
    (run.path / "out").unlink()
    other = tmp_path / "archive/my-project/.relayrun-moving-my-run"
    other.mkdir(parents=True)
    (other / "moving.json").write_text('{"source": "/another/run"}')
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
    assert "another run is being moved to this place" in capsys.readouterr().err
    assert run.plan.exists()


@pytest.mark.usefixtures("elsewhere")
def test_a_socket_is_left_behind(run: Run, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        os.chdir(run.path)
        made.bind("socket")
        os.chdir(tmp_path)
        move_run.move_run_directory(run, tmp_path / "archive/x")
    assert not (tmp_path / "archive/x/socket").exists()


def test_one_that_fails_does_not_keep_the_others(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "archive", "my-project/none", "my-project/my-run", "--to", "archive"]) == 1
    out = capsys.readouterr().out
    assert "not archived: " in out
    assert "renamed to" in out


@pytest.mark.slow
def test_a_moved_run_goes_on(submitted: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(move_run, "_staging", lambda target: target.parent / ".relayrun-moving-x")
    (tmp_path / ".relayrun-moving-x").mkdir()  # as if it had been copied
    assert main(["runs", "move", str(submitted.path), str(tmp_path / "elsewhere")]) == 0
    moved = Run(tmp_path / "elsewhere")
    assert main(["resume", str(moved.path)]) == 0
    assert str(moved.path) in moved.job_script.read_text()
    assert Plan.load(moved).total_steps == 33


@pytest.mark.usefixtures("elsewhere")
def test_before_the_original_is_removed_the_copy_is_said_to_be_whole(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever sees it end there knows which of the two is the run."""
    before = held(run.path)
    target = Path("archive/my-project/my-run").absolute()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: raise_error(path))
        assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
    said = capsys.readouterr()
    assert re.search(rf"files, [\d,]+ bytes are in {target}, each read back: the copy is whole", said.out)
    assert f"the run is whole in {target}; what is left of the original cannot be removed: No space" in said.err
    assert "nothing is removed" not in said.err
    assert held(target) == before
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 0
    assert f"the run is in {target}" in capsys.readouterr().out
    assert os.listdir(run.path.parent) == []


def raise_error(path: Path) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


@pytest.mark.usefixtures("elsewhere")
def test_an_original_that_changed_behind_its_copy_is_told_from_one_that_changes(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(move_run, "_unchanged", unchanged_once(move_run._unchanged))
        with pytest.raises(Cut):
            main(["runs", "archive", str(run.path), "--to", "archive"])
    run.stop.write_text("done: all, and more\n")
    for _ in range(2):
        assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
        said = capsys.readouterr().err
        assert "it changed since it was copied: STOP" in said
        assert "holds the run as it was: keep one of the two" in said
    assert run.stop.read_text() == "done: all, and more\n"


def unchanged_once(real: Callable[..., None]) -> Callable[..., None]:
    """Cut behind the name of the copy."""
    calls: list[Path] = []

    def look(source: Path, proven: Any) -> None:
        calls.append(source)
        if len(calls) == 2:
            raise Cut
        real(source, proven)

    return look


@pytest.mark.usefixtures("elsewhere")
def test_a_run_behind_a_link_is_the_one_that_the_link_leads_to(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = tmp_path / "scratch/123"
    real.parent.mkdir()
    run.path.rename(real)
    run.path.symlink_to(real)
    before = held(real)
    target = tmp_path / "archive/my-project/my-run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path, **_: raise_error(path))
        assert main(["runs", "archive", "my-project/my-run", "--to", "archive"]) == 1
    assert not real.exists()
    assert main(["runs", "archive", "my-project/my-run", "--to", "archive"]) == 0
    assert held(target) == before
    assert os.listdir(real.parent) == []
    assert f"{run.path} is a link to where it was: ln -sfn {target} {run.path}" in capsys.readouterr().out


def test_links_are_looked_at_where_it_is_a_rename_too(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run.path / "..data").mkdir()
    (run.path / "inside").symlink_to("..data")
    (run.path / "own").symlink_to(run.path / "checkpoints")
    (run.path / "out").symlink_to("../../x")
    assert main(["runs", "archive", str(run.path), "--to", "archive"]) == 1
    assert "a relative link leads out of the run directory: out -> ../../x" in capsys.readouterr().err
    assert run.plan.exists()
    beside = run.path.with_name("renamed")
    assert main(["runs", "move", str(run.path), str(beside)]) == 0  # there it leads where it led
    said = capsys.readouterr().out
    assert f"own is a link into {run.path}, where nothing is any more" in said
    assert "big is a link, as it was: what it leads to is not copied" in said
    (beside / "out").unlink()
    assert main(["runs", "move", str(beside), str(tmp_path / "archive/x")]) == 0


def test_a_run_with_queued_evaluations_is_refused(run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Their jobs write into its directory."""
    queue = QueueStatus(evaluations={"7": "pending", "8": "running", "9": "gone"})
    plan = run.plan.read_text()
    replace(Plan.load(run), scheduler="slurm").write(run.plan)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command.queue, "query_queue", lambda _: queue)
        assert main(["runs", "move", str(run.path), str(tmp_path / "x")]) == 1
    said = capsys.readouterr().err
    assert "jobs that evaluate its checkpoints write into its directory: 7 (pending), 8 (running)" in said
    assert "wait for them, or end them: scancel 7 8" in said
    run.plan.write_text(plan)
    assert main(["runs", "move", str(run.path), str(tmp_path / "x")]) == 0


def test_errors_say_where(run: Run, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="itself"):
        move_run.move_run_directory(run, run.path / "x")
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="nothing is removed from the original"):
        move_run.move_run_directory(run, tmp_path / "file/x")
