"""The learning rate goes where its style says: up over the warm-up, then down to min_lr."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import warm

WAYS: dict[str, Callable[[int], float]] = {
    "constant": lambda step: 1.0,
    "linear": lambda step: 1 - 0.9 * (step - 10) / 100,
    "cosine": lambda step: 0.1 + 0.45 * (1 + math.cos(math.pi * (step - 10) / 100)),
    "inverse-square-root": lambda step: max(0.1, math.sqrt(10 / step)),
    "WSD": lambda step: 1.0 if step <= 90 else 1 - 0.9 * (step - 90) / 20,
}


@pytest.mark.slow
def test_every_style_goes_its_way() -> None:
    program = Path(__file__).with_name("schedules.py")
    done = warm.run([sys.executable, program], check=True)
    rates = json.loads(done.stdout.splitlines()[-1])
    assert rates.keys() == WAYS.keys()
    for style, way in WAYS.items():
        assert rates[style][:10] == pytest.approx([step / 10 for step in range(10)]), style
        assert rates[style][10:111] == pytest.approx([way(step) for step in range(10, 111)]), style
        assert rates[style][111:] == pytest.approx([1.0 if style == "constant" else 0.1] * 19), style
