"""scripts/conversion/do-convert.sh sets up what the jobs of the run set up."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from tests.history import make_history
from tests.plans import plan_with

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/conversion/do-convert.sh"


def convert(tmp_path: Path, run: Run | str, **environment: str) -> subprocess.CompletedProcess[str]:
    name = run if isinstance(run, str) else str(run.path)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") and name != "PYTHON"}
    return subprocess.run(
        ["bash", SCRIPT, name, tmp_path / "it's out", "--dtype", "float32"],
        env=clean | {"PATH": f"{tmp_path}:{os.environ['PATH']}"} | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def program(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_setup_environment_prefix_container_and_python_are_the_runs(tmp_path: Path) -> None:
    run = make_history(tmp_path / "a run", lines=6, attempts=1)
    script = program(
        tmp_path / "its python",
        "if [[ $2 == relayrun.train.export.job_environment ]]; then exec " + sys.executable + ' "$@"; fi\n'
        'printf "%s\\n" "SITE=$SITE MINE=$MINE" "$@"',
    )
    program(tmp_path / "boxed", 'echo "in a box: $1"\nshift\nexec "$@"')
    plan = Plan.load(run)
    changes = {
        "environment": {"SITE": "a b", "PYTHONPATH": "/site"},
        "setup": ["MINE=$SITE-c", "export MINE"],
        "command_prefix": ["boxed", "it's"],
        "program": [script, "-m", "relayrun.train"],
    }
    plan_with(plan, **changes).write(run.plan)
    done = convert(tmp_path, run, PYTHON=sys.executable, MINE="")
    assert done.returncode == 1, done.stderr  # the program is the Python that was given: there is no such checkpoint
    assert done.stdout.startswith("in a box: it's\n")
    (tmp_path / "python3").symlink_to(sys.executable)
    done = convert(tmp_path, run)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert said[:2] == ["in a box: it's", "SITE=a b MINE=a b-c"]
    assert said[2:] == [
        *("-m", "relayrun.cli", "export", "hf", str(run.path), "--output", str(tmp_path / "it's out")),
        *("--dtype", "float32"),
    ]


def test_a_line_of_setup_that_fails_ends_it(tmp_path: Path) -> None:
    run = make_history(tmp_path / "run", lines=6, attempts=1)
    plan_with(Plan.load(run), setup=["true", "ls /no/such/thing"]).write(run.plan)
    done = convert(tmp_path, run, PYTHON=sys.executable)
    assert done.returncode != 0
    assert "job.setup failed (exit code 2) at: ls /no/such/thing" in done.stderr


@pytest.mark.slow
def test_a_run_that_there_is_not_is_the_exports_own_error(tmp_path: Path) -> None:
    done = convert(tmp_path, "no/such", PYTHON=sys.executable)
    assert done.returncode == 1
    assert "no/such: there is no such run" in done.stderr


def test_no_line_of_another_users_plan_is_executed(tmp_path: Path) -> None:
    """A run directory that is not this user's is exported with this user's own Python and surroundings."""
    run = make_history(tmp_path / "run", lines=6, attempts=1)
    harm = tmp_path / "harm"
    plan_with(Plan.load(run), setup=[f"touch {harm}"], command_prefix=["touch", str(harm)]).write(run.plan)
    run.plan.chmod(0o666)
    done = convert(tmp_path, run, PYTHON=sys.executable)
    assert done.returncode == 1
    assert "may write this" in done.stderr
    assert not harm.exists()
