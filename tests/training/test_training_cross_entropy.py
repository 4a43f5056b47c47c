"""The loss that torch compiles on GPUs, here uncompiled, on one tensor-parallel rank and two."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from tests import warm

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("ranks", [1, 2])
def test_losses_and_gradients_are_megatron_cores_but_for_rounding(tmp_path: Path, ranks: int) -> None:
    program = Path(__file__).with_name("cross_entropy.py")
    commands = [[sys.executable, str(program), str(rank), str(ranks), str(tmp_path / "store")] for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        ended = [*pool.map(partial(warm.run, cwd=ROOT), commands)]
    assert [each.returncode for each in ended] == [0] * ranks, ended
    for dtype, (loss, gradient, largest) in json.loads(ended[0].stdout).items():
        assert largest > 10
        assert loss < 1e-4, dtype
        assert gradient < (1e-6 if dtype == "torch.float32" else 5e-3), dtype
