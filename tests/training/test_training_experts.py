"""Mixtures of experts: in every layout a resume is exact, and another layout computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.checkpoints import assert_same_bytes, whole_tensors
from tests.training.test_training_parallel import (
    CUT,
    DISTRIBUTED,
    OVERLAP,
    PIPELINE,
    STEPS,
    TENSOR,
    VIRTUAL,
    assert_as_forecast,
    resumed_from,
    settings,
)

Make = Callable[..., Any]

pytestmark = pytest.mark.slow

EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 48,
    "moe_aux_loss_coeff": 0.01,
}
SENT: dict[str, Any] = EXPERTS | {
    "moe_token_dispatcher_type": "alltoall",
    "moe_shared_expert_intermediate_size": 32,
    "moe_z_loss_coeff": 1e-3,
}
BALANCED: dict[str, Any] = EXPERTS | {
    "moe_layer_freq": [1, 0, 0, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.0,
}
EP2 = {"expert_model_parallel_size": 2}
LEAVE_OUT = {"hook": "tests.training.user_hooks:Objector", "options": {"action": "SKIP", "iteration": CUT + 1}}
SMOOTH = {"hidden_dropout": 0.0, "attention_dropout": 0.0}

LAYOUTS = [
    pytest.param(2, EP2, {}, EXPERTS, id="EP2-plain-Adam"),
    pytest.param(2, OVERLAP | EP2, {"precision": "bf16"}, SENT, id="EP2-bf16-alltoall-shared-overlap"),
    pytest.param(2, EP2, {"precision": "bf16"}, EXPERTS, id="EP2-bf16-plain-Adam"),
    pytest.param(
        2,
        TENSOR,
        {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
        EXPERTS,
        id="TP2-sequence-recomputed",
    ),
    pytest.param(2, PIPELINE, {}, BALANCED, id="PP2-some-layers-bias"),
    pytest.param(4, TENSOR | EP2, {}, SENT, id="DP2-TP2-EP2-alltoall"),
    pytest.param(4, VIRTUAL | EP2, {"precision": "bf16"}, EXPERTS, id="DP2-PP2-virtual-EP2"),
    pytest.param(2, DISTRIBUTED | EP2 | {"context_parallel_size": 2}, {}, SENT, id="CP2-EP2-alltoall"),
]


def sections(
    ranks: int, parallel: dict[str, Any], training: dict[str, Any], experts: dict[str, Any], **model: Any
) -> dict[str, dict[str, Any]]:
    made = settings(ranks, parallel, training)
    return made | {"model": made["model"] | {"transformer": experts} | model}


def assert_close(found: dict[int, Any], expected: dict[int, Any], *, loss: float, norm: float = 1e-5) -> None:
    assert found
    for iteration, step in found.items():
        assert abs(step["loss"] - expected[iteration]["loss"]) < loss, iteration
        assert step["grad_norm"] == pytest.approx(expected[iteration]["grad_norm"], rel=norm), iteration


def test_two_ranks_share_the_experts(harness: Make) -> None:
    """The one test of `make test`: tokens travel, both losses are there, and all parameters are counted."""
    made = harness(
        training={"steps": 3, "eval_steps": 1, "global_batch_size": 4},
        model={"transformer": SENT} | SMOOTH,
        checkpoint={"interval": 3},
        parallel=DISTRIBUTED | EP2,
    )
    attempt = made.train()
    assert "DP2 x TP1 x PP1 x EP2" in attempt.output()
    for step in attempt.steps().values():
        # 1 is a router that gives all experts as much; ln(4)^2 scores that are all 0
        assert step["auxiliary_losses"]["load_balancing_loss"] == pytest.approx(1.0, abs=0.2)
        assert step["auxiliary_losses"]["z_loss"] == pytest.approx(1.92, abs=0.5)


@pytest.mark.long
@pytest.mark.parametrize(("ranks", "parallel", "training", "experts"), LAYOUTS)
def test_a_resume_is_exact(
    harness: Make, ranks: int, parallel: dict[str, Any], training: dict[str, Any], experts: dict[str, Any]
) -> None:
    whole, rest = (harness(**sections(ranks, parallel, training, experts)) for _ in range(2))
    reference = whole.train()
    assert_as_forecast(whole, reference)
    resumed = resumed_from(whole, rest)
    assert sorted(resumed.steps()) == list(range(CUT + 1, STEPS + 1))
    for iteration, step in resumed.steps().items():
        for name in ("loss", "grad_norm"):
            assert step[name].hex() == reference.steps()[iteration][name].hex(), (iteration, name)
        assert step.get("auxiliary_losses") == reference.steps()[iteration].get("auxiliary_losses")
    assert_same_bytes(whole.run.checkpoint(STEPS), rest.run.checkpoint(STEPS))


@pytest.mark.long
@pytest.mark.parametrize(
    ("parallel", "training"),
    [(DISTRIBUTED, {}), ({}, {}), (DISTRIBUTED, {"precision": "bf16"}), ({}, {"precision": "bf16"})],
    ids=["distributed", "plain", "distributed-bf16", "plain-bf16"],
)
def test_experts_move_to_other_ranks_with_their_optimizer(
    harness: Make, parallel: dict[str, Any], training: dict[str, Any]
) -> None:
    """From EP1 to EP2 and back; what is loaded is what was saved, to the bit."""
    loss = 2e-2 if training else 1e-6

    def made(**layout: int) -> Any:
        return harness(**sections(2, parallel | layout, training, EXPERTS, **SMOOTH))

    one, two = made(), made(**EP2)
    reference = one.train().steps()
    split = two.train().steps()
    assert_close(split, reference, loss=loss, norm=0.1 if training else 1e-5)  # fresh weights are the same
    for whole, layout in ((one, EP2), (two, {})):
        other = made(**layout)
        assert_close(resumed_from(whole, other).steps(), reference, loss=loss, norm=0.1 if training else 1e-5)
        still = made(**layout)  # loads, leaves the update out, and saves
        still.config["training"] |= {"steps": CUT + 1, "hooks": [LEAVE_OUT]}
        resumed_from(whole, still)
        was, now = (whole_tensors(path) for path in (whole.run.checkpoint(CUT), still.run.checkpoint(CUT + 1)))
        assert set(was) == set(now)
        assert [name for name, value in was.items() if not torch.equal(value, now[name])] == []


@pytest.mark.long
def test_another_way_to_split_experts_computes_the_same(harness: Make) -> None:
    """Over tensor- and pipeline-parallel ranks, over replicas: micro-batches hold the same samples everywhere."""
    plain = sections(2, DISTRIBUTED, {}, SENT, **SMOOTH)
    whole = harness(**plain)
    reference = whole.train().steps()
    for ranks, parallel in ((1, DISTRIBUTED), (2, TENSOR), (2, VIRTUAL), (4, TENSOR | EP2)):
        other = resumed_from(whole, harness(**sections(ranks, parallel, {}, SENT, **SMOOTH)))
        assert_close(other.steps(), reference, loss=1e-5, norm=1e-4)
        for iteration, step in other.steps().items():
            for name, value in step["auxiliary_losses"].items():
                assert value == pytest.approx(reference[iteration]["auxiliary_losses"][name], abs=1e-5)
