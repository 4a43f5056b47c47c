"""A snapshot holds the code as it is, and a chain runs it whatever becomes of the checkout."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun.files import read_json
from relayrun.monitoring.environment import code
from relayrun.rundir.records import AttemptStart
from relayrun.rundir.run import Run
from relayrun.submit.code_snapshot import LARGEST, snapshot
from tests.readme import break_code, copy_tracked
from tests.workspace import Workspace, ends, steps


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A git checkout with a committed, a changed, a new, an ignored, a deleted and a large file, and a link."""
    root = tmp_path / "it's a checkout"
    (root / "package").mkdir(parents=True)
    for name in ("package/kept.py", "package/changed.py", "gone.py"):
        (root / name).write_text("old\n")
    (root / "run.sh").write_text("#!/bin/bash\n")
    (root / "run.sh").chmod(0o755)
    (root / ".gitignore").write_text("ignored/\n")
    (root / "link").symlink_to("package/kept.py")
    git = ["git", "-C", str(root), "-c", "user.name=n", "-c", "user.email=e"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    (root / "package/changed.py").write_text("new\n")
    (root / "new ünï.py").write_text("new\n")
    (root / "gone.py").unlink()
    (root / "ignored").mkdir()
    (root / "ignored" / "x").write_text("x")
    (root / "data.bin").write_bytes(bytes(LARGEST + 1))
    return root


def run_dir(folder: Path) -> Run:
    folder.mkdir()
    return Run(folder)


def test_uncommitted_and_new_files_are_in_it(
    checkout: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = snapshot(run_dir(tmp_path / "run"), checkout)
    found = {str(path.relative_to(taken)) for path in taken.rglob("*") if not path.is_dir() or path.is_symlink()}
    assert found == {"package/kept.py", "package/changed.py", "new ünï.py", "run.sh", "link", ".gitignore"}
    assert (taken / "package/changed.py").read_text() == "new\n"
    assert os.access(taken / "run.sh", os.X_OK)
    assert os.readlink(taken / "link") == "package/kept.py"
    commit, difference = code(taken)
    assert commit == code(checkout)[0]
    assert len(commit) == 40
    assert "-old\n+new" in difference
    assert "too large for code: " in capsys.readouterr().err


def test_the_same_code_is_the_same_snapshot_and_other_code_another(checkout: Path, tmp_path: Path) -> None:
    run = run_dir(tmp_path / "run")
    first = snapshot(run, checkout)
    assert snapshot(run, checkout) == first
    (checkout / "package/kept.py").write_text("edited\n")
    second = snapshot(run, checkout)
    assert (first.name, second.name) == ("0001", "0002")
    assert (first / "package/kept.py").read_text() == "old\n"


def test_a_folder_without_git_gives_its_code(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for name in ("relayrun/cli.py", "relayrun/__pycache__/cli.pyc", "launchers/lib/job.sh", "data/tokens.bin"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    taken = snapshot(run_dir(tmp_path / "run"), root)
    assert {str(path.relative_to(taken)) for path in taken.rglob("*.*")} == {"relayrun/cli.py", "launchers/lib/job.sh"}


@pytest.mark.slow
def test_a_checkout_that_breaks_under_a_running_chain_does_not_break_its_next_job(tmp_path: Path) -> None:
    root = tmp_path / "checkout"
    copy_tracked(root)
    workspace = Workspace.make(tmp_path)
    config = workspace.config(
        "run",
        training={"steps": 40_000},
        checkpoint={"interval": 40_000},
        job={"ntasks_per_node": 1},
        debug={"backup_codebase": True},
    )
    run = workspace.run("run")
    submit = [sys.executable, "-m", "relayrun.cli", "submit", str(config)]
    process = subprocess.Popen(
        submit, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}, stderr=subprocess.PIPE, text=True
    )
    try:
        while not run.attempt(1).metrics.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        break_code(root)
        os.kill(read_json(run.path / "local/job-0001.json")["pid"], signal.SIGUSR2)
        while not run.attempt(2).metrics.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.1)
        (run.triggers / "exit").touch()
        process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    assert sorted(steps(run)) == list(range(1, len(steps(run)) + 1))
    begin = AttemptStart.read(run.attempt(2).begin)
    assert begin is not None
    assert begin.base_iteration > 0
    assert "code/0001" in (run.debug_of(2) / "compute_environment.txt").read_text()
