"""A short form of `make drill-kills`: the whole program, on a Slurm of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]


def test_ranks_killed_and_a_node_lost_change_nothing(slurm: None, tmp_path: Path) -> None:
    """Kills every 30 s for four minutes, and one node; how much time that leaves to training depends on the machine."""
    output = tmp_path / "kills.json"
    options = ["--minutes=4", "--kill-every=30", "--lose-every=150", "--spares=0", f"--output={output}"]
    command = [sys.executable, "benchmarks/kills.py", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=3000)
    assert output.exists(), done.stdout + done.stderr
    figures = json.loads(output.read_text())["figures"]
    untrue = [claim for claim in figures["does_not_hold"] if not claim.startswith("effective training time")]
    assert untrue == [], done.stdout
    assert done.returncode == bool(figures["does_not_hold"])
    (turn,) = figures["turns"]
    shown = turn["spares"]
    assert (shown["kills"], shown["nodes_lost"], shown["jobs"], shown["job_restarts"]) == (7, 1, 1, 0)
    assert shown["differences"] == {"losses": [], "weights": [], "samples": []}
    assert shown["steps"] == turn["undisturbed"]["steps"] == turn["bare"]["steps"]
    assert shown["undisturbed_seconds"] == turn["undisturbed"]["seconds"]
    assert shown["effective_training_time"] == turn["undisturbed"]["seconds"] / shown["seconds"]
    assert 0 < shown["counted_share"] < 1
