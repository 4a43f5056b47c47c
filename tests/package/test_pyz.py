"""relayrun.pyz: one file with the standard library alone, for a host's own Python."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run, submit_lock
from tests.history import began, history_plan, trained

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("wrap", "status", "why", "logs", "save", "stop", "cancel")


@pytest.fixture(scope="module")
def pyz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("pyz") / "relayrun.pyz"
    subprocess.run([sys.executable, ROOT / "scripts/tools/make_pyz.py", made], check=True, capture_output=True)
    return made


def call(pyz: Path, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """With no package in sight."""
    python = [getattr(sys, "_base_executable", sys.executable), "-I", "-S"]
    environment = {"RELAYRUN_PYZ_DIR": str(pyz.parent / "unpacked"), "PATH": "/usr/bin:/bin"}
    return subprocess.run(
        [*python, str(pyz), *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_it_is_small_and_has_no_room_that_needs_packages(pyz: Path) -> None:
    assert pyz.stat().st_size < 1_000_000
    names = zipfile.ZipFile(pyz).namelist()
    assert "launchers/lib/wrapped.sh" in names
    assert not [name for name in names if name.startswith(("relayrun/train", "relayrun/config/compose"))]


def test_it_has_seven_commands_and_no_runs_of_its_own(pyz: Path, tmp_path: Path) -> None:
    assert call(pyz, "status", cwd=tmp_path).stdout == f"no runs below {tmp_path}/logs/runs\n"
    other = call(pyz, "submit", "x.yaml", cwd=tmp_path)
    assert "there is no command 'submit'" in other.stderr
    listed = call(pyz, "--help", cwd=tmp_path).stdout.partition("run:")[2]
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    assert sorted(names) == sorted(COMMANDS)
    (unpacked,) = (pyz.parent / "unpacked").iterdir()
    code = "import sys; sys.path[0] = sys.argv[1]; from relayrun import cli; [cli.adder(c) for c in sys.argv[2:]]"
    python = [getattr(sys, "_base_executable", sys.executable), "-S", "-c", code]
    subprocess.run([*python, str(unpacked), *COMMANDS], check=True, cwd=tmp_path)


def test_the_status_of_runs_needs_no_package(pyz: Path, tmp_path: Path) -> None:
    run = Run(tmp_path / "logs/runs/tests/history")
    run.path.mkdir(parents=True)
    history_plan(run, total_steps=100).write(run.plan)
    run.checkpoints.mkdir()
    began(run, 1)
    trained(run, 1, 0, 10)
    one, many = call(pyz, "status", "tests/history", cwd=tmp_path), call(pyz, "status", cwd=tmp_path)
    assert f"directory  {run.path}\n" in one.stdout, one.stderr
    assert "iteration  10 of 100" in one.stdout
    assert "tests/history" in many.stdout, many.stderr


def test_it_refuses_what_needs_a_config(pyz: Path, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("#!/bin/bash\n#SBATCH --time=1\n")
    said = call(pyz, "wrap", "--checkpoints={iteration}", "--set=name=x", "a.sh", cwd=tmp_path)
    assert "need an installed relayrun" in said.stderr
    none = call(pyz, "wrap", "--checkpoints={iteration}", "a.sh", cwd=tmp_path)
    assert none.returncode != 0
    assert "error:" in none.stderr
    assert "Traceback" not in none.stderr


def test_two_submits_at_once_are_one(pyz: Path, tmp_path: Path) -> None:
    """The lock is that of a submit with a config."""
    (tmp_path / "a.sh").write_text("#!/bin/bash\n#SBATCH --time=1\n")
    with submit_lock(Run(tmp_path / "logs/runs/wrapped/a")):
        said = call(pyz, "wrap", "--checkpoints={iteration}", "a.sh", cwd=tmp_path)
    assert "another submit of this run is under way" in said.stderr
    assert not Run(tmp_path / "logs/runs/wrapped/a").plan.exists()


def test_what_others_can_write_is_neither_executed_nor_written_to(pyz: Path, tmp_path: Path) -> None:
    (tmp_path / "a.sh").write_text("#!/bin/bash\n#SBATCH --time=1\n")
    run = Run(tmp_path / "logs/runs/wrapped/a")
    run.path.mkdir(parents=True)
    run.path.chmod(0o777)
    said = call(pyz, "wrap", "--checkpoints={iteration}", "a.sh", cwd=tmp_path)
    assert "everybody may write this" in said.stderr
    assert [path.name for path in run.path.iterdir()] == [".submit.lock"]
    (unpacked,) = (pyz.parent / "unpacked").iterdir()
    unpacked.chmod(0o777)
    (unpacked / "argparse.py").write_text(f"open({str(tmp_path / 'harm')!r}, 'w')\n")
    said = call(pyz, "status", cwd=tmp_path)
    (unpacked / "argparse.py").unlink()
    unpacked.chmod(0o755)
    assert "other users may have written this" in said.stderr
    assert not (tmp_path / "harm").exists()
