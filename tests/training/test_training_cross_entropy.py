"""The loss that torch compiles on GPUs, here uncompiled, on one tensor-parallel rank and two."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_gradients_are_megatron_cores_but_for_rounding(tmp_path: Path, ranks: int) -> None:
    program = Path(__file__).with_name("cross_entropy.py")
    commands = [[sys.executable, str(program), str(rank), str(ranks), str(tmp_path / "store")] for rank in range(ranks)]
    started = [
        subprocess.Popen(each, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for each in commands
    ]
    ended = [process.communicate(timeout=300) for process in started]
    assert [process.returncode for process in started] == [0] * ranks, ended
    for dtype, (loss, gradient, largest) in json.loads(ended[0][0]).items():
        assert largest > 10
        assert loss < 1e-4, dtype
        assert gradient < (1e-6 if dtype == "torch.float32" else 5e-3), dtype
