"""The norm of gradients, their clipping, AdamW's counts of steps, and what pipeline stages let go of."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.checkpoints import assert_same_bytes

Make = Callable[..., Any]

pytestmark = pytest.mark.slow

DISTRIBUTED = {"use_distributed_optimizer": True}
TENSOR = DISTRIBUTED | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
STEPS = 4


def settings(parallel: dict[str, Any], ranks: int = 2, **training: Any) -> dict[str, dict[str, Any]]:
    return {
        "training": {"steps": STEPS, "eval_steps": 1} | training,
        "model": {"num_layers": 4},
        "parallel": parallel,
        "optimizer": {"clip_grad": 0.5},
        "job": {"ntasks_per_node": ranks},
    }


def variant(change: str) -> list[str]:
    return [sys.executable, "-m", "tests.training.variants", change, "--"]


@pytest.mark.parametrize(
    ("ranks", "parallel", "training"),
    [
        pytest.param(2, {}, {}, id="DP2"),
        pytest.param(2, DISTRIBUTED, {}, id="DP2-distributed"),
        pytest.param(2, TENSOR, {"precision": "bf16"}, id="TP2-bf16"),
        pytest.param(4, TENSOR | PIPELINE, {}, id="TP2-PP2", marks=pytest.mark.long),
        pytest.param(4, TENSOR, {}, id="DP2-TP2", marks=pytest.mark.long),
    ],
)
def test_norms_and_clipped_gradients_are_megatron_cores_to_the_last_bit(
    harness: Make, ranks: int, parallel: dict[str, Any], training: dict[str, Any]
) -> None:
    attempt = harness(**settings(parallel, ranks, **training)).start(prefix=variant("compare-gradients"))
    assert attempt.wait() == [0] * ranks, attempt.output()
    compared = [line.split()[1:4:2] for line in attempt.output().splitlines() if line.startswith("compared: ")]
    assert len(compared) == STEPS
    assert all(int(gradients) == int(clipped) > 10 for gradients, clipped in compared), compared
    assert all(step["grad_norm"] > 0.5 for step in attempt.steps().values()), "the test is about clipping"


@pytest.mark.parametrize(
    ("parallel", "training"),
    [
        pytest.param(PIPELINE, {}, id="PP2"),
        pytest.param(PIPELINE | DISTRIBUTED, {"precision": "bf16", "recompute_granularity": "full"}, id="PP2-bf16"),
    ],
)
def test_stages_that_let_go_of_what_they_sent_compute_the_same_bits(
    harness: Make, parallel: dict[str, Any], training: dict[str, Any]
) -> None:
    lets_go, keeps = (harness(**settings(parallel, **training)) for _ in range(2))
    reference = lets_go.train()
    attempt = keeps.start(prefix=variant("keep-pipeline-outputs"))
    assert attempt.wait() == [0, 0], attempt.output()
    for iteration, step in attempt.steps().items():
        for name in ("loss", "grad_norm"):
            assert step[name].hex() == reference.steps()[iteration][name].hex(), (iteration, name)
    assert_same_bytes(lets_go.run.checkpoint(STEPS), keeps.run.checkpoint(STEPS))


@pytest.mark.parametrize(
    "parallel",
    [pytest.param({}, marks=pytest.mark.long), DISTRIBUTED],
    ids=["adam", "distributed-optimizer"],
)
def test_a_fused_adamw_resumes_exactly_and_goes_on_from_one_that_was_not(
    harness: Make, parallel: dict[str, Any]
) -> None:
    """With torch's fused kernel for CPUs, whose bits are others on most processors."""
    asked = settings(parallel) | {"checkpoint": {"interval": STEPS // 2}}
    plain, fused, resumed, changed = (harness(**asked) for _ in range(4))
    reference = plain.train().steps()
    whole = fused.start(prefix=variant("fuse-adamw"))
    assert whole.wait() == [0, 0], whole.output()
    assert "the fused kernel has run" in whole.output()
    pieces = []
    for made, base in ((resumed, fused), (changed, plain)):
        path = str(base.run.checkpoint(STEPS // 2))
        attempt = made.start(prefix=variant("fuse-adamw"), base_iteration=STEPS // 2, base_path=path)
        assert attempt.wait() == [0, 0], attempt.output()
        pieces.append(attempt.steps())
    for iteration in range(STEPS // 2 + 1, STEPS + 1):
        assert pieces[0][iteration]["loss"].hex() == whole.steps()[iteration]["loss"].hex()
        assert pieces[1][iteration]["loss"] == pytest.approx(reference[iteration]["loss"], abs=1e-5)
    assert_same_bytes(fused.run.checkpoint(STEPS), resumed.run.checkpoint(STEPS))


PROGRAM = """
import json, types
import torch
from relayrun.train.optimizer import megatron_optimizer

def adam(device, fused):
    made = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2, device=device)) for _ in range(2)], lr=0.1)
    for group in made.param_groups:
        for parameter in group["params"]:
            made.state[parameter] = {"step": torch.tensor(3.0)}
    chained = types.SimpleNamespace(chained_optimizers=[types.SimpleNamespace(optimizer=made)])
    before = made.param_groups[0]["fused"]
    if fused:
        megatron_optimizer.use_fused_adam(chained)
    megatron_optimizer.place_step_counts(chained)
    counts = [state["step"] for state in made.state.values()]
    return before, made.param_groups[0]["fused"], made.defaults["fused"], [str(count.device) for count in counts]

print(json.dumps([adam("meta", True), adam("meta", False), adam("cpu", True)]))
"""


def test_a_fused_adamw_has_its_counts_beside_the_parameters_and_another_on_the_host(tmp_path: Path) -> None:
    """The device without memory stands for a GPU."""
    program = tmp_path / "adamw.py"
    program.write_text(PROGRAM)
    done = warm.run([sys.executable, program], check=True)
    assert json.loads(done.stdout) == [
        [None, True, True, ["meta", "meta"]],
        [None, None, None, ["cpu", "cpu"]],
        [None, True, True, ["cpu", "cpu"]],
    ]
