"""What is computed again in the backward pass is what was computed before, to the last bit, and is not kept."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.scheduler.local_srun import free_port
from tests import warm

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What recompute.py saw."""
    port = str(free_port())
    program = Path(__file__).with_name("recompute.py")
    done = warm.run([sys.executable, program, port])
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_every_way_to_recompute_gives_the_same_bits_and_keeps_less(found: dict[str, Any]) -> None:
    """Two micro-batches, in fp32 and bf16, with dropout and without."""
    passes = found["passes"]
    for setting, ways in passes.items():
        right = ways["none"]
        for name, way in ways.items():
            assert (way["loss"], way["gradients"]) == (right["loss"], right["gradients"]), (setting, name)
        kept = {name: way["kept"] for name, way in ways.items()}
        assert kept["full"] < kept["first layer"] < kept["none"], setting
        assert kept["mlp"] < kept["none"], setting
        assert kept["by default"] == kept["core_attn"], setting
        # with dropout torch has no flash kernel on a CPU, and keeps the matrix of scores
        assert (kept["core_attn"] < 0.9 * kept["none"]) == setting.endswith("dropout"), (setting, kept)
        assert kept["both"] <= kept["mlp"], setting
    assert passes["fp32, none"]["none"]["loss"] != passes["fp32, dropout"]["none"]["loss"]


def test_attention_within_the_fork_of_sequence_parallel_drops_out_the_same_again(found: dict[str, Any]) -> None:
    """A layer's dropout draws from the ranks' own generators already, where attention begins."""
    first, again = found["attention"]
    assert first == again


@pytest.mark.long
@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_over_tensor_parallel_ranks_with_dropout_too(harness: Callable[..., Any], sequence_parallel: bool) -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    ways: list[dict[str, Any]] = [
        {},
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
    ]
    steps = {"steps": 3, "eval_steps": 1}
    plain, *others = (harness(parallel=parallel, training=steps | way).train() for way in ways)
    assert sorted(plain.steps()) == [1, 2, 3]
    for way, other in zip(ways[1:], others, strict=True):
        for iteration, step in plain.steps().items():
            for name in ("loss", "grad_norm"):
                assert other.steps()[iteration][name].hex() == step[name].hex(), (way, iteration, name)
        assert other.evaluations() == plain.evaluations() != {}
