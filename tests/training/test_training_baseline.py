"""What the published baselines set: bf16 gradients, the fused loss, deferred gradients, and what they log."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from relayrun.files import read_json_lines
from tests.checkpoints import assert_same_bytes, contents

Make = Callable[..., Any]

pytestmark = pytest.mark.slow

STEPS = 4
MEASURED = {
    "log_interval": 2,
    "log_params_norm": True,
    "log_params_norm_per_param": True,
    "log_num_zeros_in_grad": True,
    "timing_log_level": 2,
}
BF16 = {"precision": "bf16", "cross_entropy_loss_fusion": True}
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
VIRTUAL = PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1}
FLUSH = {"overlap_p2p_communication_warmup_flush": True}
DEFERRED = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": 2}


def settings(
    parallel: dict[str, Any],
    training: dict[str, Any] | None = None,
    optimizer: dict[str, Any] | None = None,
    *,
    ranks: int = 2,
    tracking: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    return {
        "training": {"steps": STEPS, "eval_steps": 1} | (training or {}),
        "model": {"num_layers": 4},
        "parallel": parallel,
        "optimizer": optimizer or {},
        "job": {"ntasks_per_node": ranks},
        "tracking": tracking or {},
    }


def variant(change: str) -> list[str]:
    return [sys.executable, "-m", "tests.training.variants", change, "--"]


def losses(attempt: Any) -> list[str]:
    return [attempt.steps()[iteration]["loss"].hex() for iteration in range(1, STEPS + 1)]


def apart(one: Any, other: Any) -> float:
    """The largest difference of two runs' losses."""
    return max(abs(one.steps()[n]["loss"] - other.steps()[n]["loss"]) for n in range(1, STEPS + 1))


def norm_of(checkpoint: Path) -> float:
    """Norm of the weights in a checkpoint: the optimizer's own, where it has some."""
    tensors = {name: value for name, value in contents(checkpoint).items() if isinstance(value, torch.Tensor)}
    for prefix in (("optimizer.state.param.",), ("optimizer.state.fp32_param.",), ("embedding.", "decoder.", "output")):
        found = [value.double() for name, value in tensors.items() if name.startswith(prefix)]
        if found:
            return math.sqrt(sum(float(value.square().sum()) for value in found))
    raise AssertionError("no weights")


def assert_measured(attempt: Any, made: Any) -> None:
    """Iterations of the interval have everything, others nothing; the norm is that of the weights that were saved."""
    names = {"params_norm", "params_norm_per_param", "num_zeros_in_grad", "timers"}
    for iteration, step in attempt.steps().items():
        assert names & step.keys() == (names if iteration % 2 == 0 else set()), iteration
    step = attempt.steps()[STEPS]
    assert step["params_norm"] == pytest.approx(norm_of(made.run.checkpoint(STEPS)), rel=1e-6)
    norms = step["params_norm_per_param"]
    assert math.sqrt(sum(norm**2 for norm in norms.values())) == pytest.approx(step["params_norm"], rel=1e-9)
    layers = {name.split(".")[2] for name in norms if name.startswith("decoder.layers.")}
    assert (layers, len(norms)) == ({"0", "1", "2", "3"}, 4 * 6 + 3)
    padding = (384 - 300) * 64  # rows of the embedding that no token has
    assert padding <= step["num_zeros_in_grad"] < 384 * 64
    timers = step["timers"]
    assert {"forward-backward", "forward-compute", "all-grads-sync", "optimizer-inner-step"} <= timers.keys()
    assert all(0 < times["min"] <= times["max"] for times in timers.values())
    assert timers["forward-compute"]["max"] < timers["forward-backward"]["max"]


def test_measurements_wait_for_the_device_no_more_often_than_iterations_without(harness: Make) -> None:
    made = harness(**settings(DISTRIBUTED, BF16, {"main_grads_dtype": "bf16"}, tracking=MEASURED))
    attempt = made.start(prefix=variant("count-waits"))
    assert attempt.wait() == [0, 0], attempt.output()
    waits = [line.split()[1:] for line in attempt.output().splitlines() if line.startswith("waits: ")]
    assert [int(iteration) for iteration, _ in waits] == [1, 2, 3, 4]
    after_first = {int(count) for _, count in waits[1:]}
    assert len(after_first) == 1, waits
    assert min(after_first) >= 2, "loss and norm at least are read"
    assert_measured(attempt, made)
    (evaluated,) = (line for line in read_json_lines(attempt.directory.metrics) if "validation" in line)
    assert evaluated["perplexity"] == {name: math.exp(loss) for name, loss in evaluated["validation"].items()}


@pytest.mark.long
@pytest.mark.parametrize(
    ("ranks", "parallel", "training"),
    [
        pytest.param(2, {}, {}, id="DP2"),
        pytest.param(2, {}, {"precision": "bf16"}, id="DP2-bf16"),
        pytest.param(2, DISTRIBUTED, {}, id="DP2-distributed"),
        pytest.param(4, DISTRIBUTED | TENSOR | PIPELINE, {}, id="TP2-PP2"),
        pytest.param(4, OVERLAP | VIRTUAL, {"precision": "bf16"}, id="DP2-PP2-virtual-bf16"),
    ],
)
def test_norms_are_those_of_the_weights_in_every_layout(
    harness: Make, ranks: int, parallel: dict[str, Any], training: dict[str, Any]
) -> None:
    made = harness(**settings(parallel, training, ranks=ranks, tracking=MEASURED))
    assert_measured(made.train(), made)


@pytest.mark.long
def test_a_loss_in_compiled_kernels_is_the_same_to_the_last_bit(harness: Make) -> None:
    """The kernels run uncompiled here."""
    plain, fused = (
        harness(**settings(DISTRIBUTED | TENSOR, BF16 | {"cross_entropy_loss_fusion": each})) for each in (False, True)
    )
    assert losses(fused.train()) == losses(plain.train())
    assert_same_bytes(fused.run.checkpoint(STEPS), plain.run.checkpoint(STEPS))


@pytest.mark.long
@pytest.mark.parametrize("parallel", [{}, OVERLAP], ids=["adam", "distributed-overlap"])
def test_gradients_summed_in_bf16_train_and_resume_exactly(harness: Make, parallel: dict[str, Any]) -> None:
    asked = settings(parallel, BF16, {"main_grads_dtype": "bf16"}) | {"checkpoint": {"interval": STEPS // 2}}
    wide = harness(**settings(parallel, BF16))
    whole, rest = harness(**asked), harness(**asked)
    reference = whole.train()
    assert 0 < apart(reference, wide.train()) < 0.02
    resumed = rest.train(base_iteration=STEPS // 2, base_path=str(whole.run.checkpoint(STEPS // 2)))
    for iteration, step in resumed.steps().items():
        for name in ("loss", "grad_norm"):
            assert step[name].hex() == reference.steps()[iteration][name].hex(), (iteration, name)
    assert_same_bytes(whole.run.checkpoint(STEPS), rest.run.checkpoint(STEPS))


@pytest.mark.long
def test_deferred_gradients_and_the_warmup_flush_change_nothing(harness: Make) -> None:
    training = {"global_batch_size": 16}
    plain, flushed, deferred, early = (
        harness(**settings(OVERLAP | VIRTUAL | more, training, ranks=4))
        for more in ({}, FLUSH, FLUSH | DEFERRED, FLUSH | DEFERRED)
    )
    reference = plain.train()
    assert losses(flushed.train()) == losses(reference)
    trained = deferred.train()
    assert "gradients of weights are added up by torch" in trained.output()
    assert apart(trained, reference) < 1e-6  # the order of a sum
    attempt = early.start(prefix=variant("reduce-too-early"))
    assert attempt.wait() == [0] * 4, attempt.output()
    assert apart(attempt, reference) > 1e-5, "megatron-core reduces them in time: the patch is not needed any more"


@pytest.mark.long
def test_a_precision_aware_optimizer_reads_bf16_gradients_and_resumes_exactly(harness: Make) -> None:
    """With a stand-in for TransformerEngine's kernel, around which everything is as with it."""
    optimizer = {"main_grads_dtype": "bf16", "clip_grad": 0.5}
    checkpoint = {"checkpoint": {"interval": STEPS // 2}}
    plain = harness(**settings(OVERLAP, BF16, optimizer, tracking={"log_interval": 1, "log_params_norm": True}))
    aware = optimizer | {"use_precision_aware_optimizer": True}
    whole, rest = (
        harness(**settings(OVERLAP, BF16, aware, tracking={"log_num_zeros_in_grad": True}) | checkpoint) for _ in "ab"
    )
    trained = whole.start(prefix=variant("stand-in-fused-adam"))
    assert trained.wait() == [0, 0], trained.output()
    reference = plain.train()
    assert apart(trained, reference) < 1e-4  # clipped gradients are rounded to bf16 once more
    assert all(step["grad_norm"] > 0.5 for step in trained.steps().values()), "the test is about clipping, too"
    base = {"base_iteration": STEPS // 2, "base_path": str(whole.run.checkpoint(STEPS // 2))}
    resumed = rest.start(prefix=variant("stand-in-fused-adam"), **base)
    assert resumed.wait() == [0, 0], resumed.output()
    for iteration, step in resumed.steps().items():
        for name in ("loss", "grad_norm"):
            assert step[name].hex() == trained.steps()[iteration][name].hex(), (iteration, name)
    assert_same_bytes(whole.run.checkpoint(STEPS), rest.run.checkpoint(STEPS))
    norm = reference.steps()[STEPS]["params_norm"]
    assert norm_of(whole.run.checkpoint(STEPS)) == pytest.approx(norm, rel=1e-5), "fp32 weights are in the checkpoint"


@pytest.mark.long
def test_a_precision_aware_optimizer_without_transformer_engine_is_fatal(harness: Make) -> None:
    attempt = harness(**settings(OVERLAP, BF16, {"use_precision_aware_optimizer": True})).start()
    assert attempt.wait() != [0, 0]
    assert "set optimizer.use_precision_aware_optimizer=false" in attempt.output()
