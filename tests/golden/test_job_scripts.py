"""Rendered scripts, compared whole. `UPDATE_GOLDEN=1 pytest tests/golden` writes them anew, for review."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
SHELLCHECK = Path(sys.executable).parent / "shellcheck"

BASELINES = ("440m", "1b", "3b", "8b", "70b")

SCRIPTS = {
    "demo.sbatch": [sys.executable, "launchers/submit.py", "configs/runs/demo.yaml", "--dry-run"],
    "demo-slurm.sbatch": ["bash", "launchers/submit-demo.sh", "--dry-run"],
    **{f"llama3-{size}.sbatch": ["bash", f"launchers/submit-llama3-{size}.sh", "--dry-run"] for size in BASELINES},
    "odd-names.sbatch": [
        sys.executable,
        "launchers/submit.py",
        "configs/runs/demo-slurm.yaml",
        "--dry-run",
        "--set",
        """run_dir=/tmp/it's a "run" dir/$HOME `id` 50%""",
    ],
}


LONG = pytest.mark.long  # as the 1B but for the name and the nodes


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=LONG if "440m" in name else ()) for name in SCRIPTS])
def test_the_rendered_job_is_the_golden_file(name: str, tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        SCRIPTS[name], cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
    )
    assert "Traceback" not in result.stderr  # what a submit would refuse here, such as missing data, is no matter
    # the job's name holds a hash of the run directory's path, which differs from checkout to checkout
    text = result.stdout.replace(sys.executable, "/PYTHON").replace(str(ROOT), "/ROOT")
    named = ("#SBATCH --job-name=", "export RELAYRUN_JOB_NAME=")
    lines = [line[: line.rindex("-")] + "-HASH" if line.startswith(named) else line for line in text.splitlines()]
    text = "\n".join(lines) + "\n"
    if os.environ.get("UPDATE_GOLDEN"):
        (HERE / name).write_text(text)
    assert text == (HERE / name).read_text()
    script = tmp_path / name
    script.write_text(result.stdout)
    subprocess.run([SHELLCHECK, "--shell=bash", "--exclude=SC2016", script], check=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("launcher", "config"),
    [
        ("submit-demo.sh", "demo-slurm"),
        *(
            pytest.param(f"submit-llama3-{size}.sh", f"llama3-{size}", marks=LONG if size == "440m" else ())
            for size in BASELINES
        ),
    ],
)
def test_both_launchers_end_in_the_same_job(launcher: str, config: str) -> None:
    """The Bash launcher's settings are its YAML's values, so the two renderings differ in nothing."""
    environment = {"PATH": os.environ["PATH"], "PYTHON": sys.executable, "PYTHONPATH": str(ROOT)}
    outputs = [
        subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=600
        ).stdout
        for command in (
            ["bash", f"launchers/{launcher}", "--dry-run"],
            [sys.executable, "launchers/submit.py", f"configs/runs/{config}.yaml", "--dry-run"],
        )
    ]
    assert outputs[0] == outputs[1] != ""
