"""docs/benchmarks.md and the README say what the benchmarks measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def printed(code: str) -> str:
    made = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True, timeout=600
    )
    assert made.returncode == 0, made.stderr
    return made.stdout


def test_the_page_is_that_of_the_results() -> None:
    made = printed("import _report; print(_report.render(), end='')")
    assert made == (ROOT / "docs" / "benchmarks.md").read_text(), "run python benchmarks/_report.py"


def test_the_figures_of_the_readme_are_those_of_the_drill() -> None:
    made = printed("import _readme; print(_readme.written(_readme.README.read_text()), end='')")
    page = (ROOT / "README.md").read_text()
    assert made == page, "run python benchmarks/_readme.py"
    assert "| effective training time |" in page
