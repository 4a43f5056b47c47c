"""A short form of the benchmark of what looks after training costs: each part is left out, and training goes on."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_each_part_can_be_left_out() -> None:
    command = [sys.executable, "benchmarks/round_cost.py", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=1000)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.findall(r"^(\w+) \{'min'", done.stdout, re.M) == ["heartbeats", "stragglers", "memory", "memory_chosen"]
