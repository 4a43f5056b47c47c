"""docs/benchmarks.md says what the benchmarks measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_that_of_the_results() -> None:
    code = "import _report; print(_report.render(), end='')"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks", capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert made.stdout == (ROOT / "docs" / "benchmarks.md").read_text(), "run python benchmarks/_report.py"
