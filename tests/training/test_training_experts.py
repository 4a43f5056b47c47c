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
    "moe_shared_expert_gate": True,
    "moe_z_loss_coeff": 1e-3,
}
GATHERED: dict[str, Any] = SENT | {"moe_token_dispatcher_type": "allgather"}
BALANCED: dict[str, Any] = EXPERTS | {
    "moe_layer_freq": [1, 0, 0, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_aux_loss_coeff": 0.0,
}
GROUPED: dict[str, Any] = EXPERTS | {
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.02],
    "moe_router_num_groups": 2,
    "moe_router_group_topk": 1,
    "moe_router_pre_softmax": True,
    "moe_router_topk_scaling_factor": 2.0,
    "moe_router_dtype": "fp32",
}
DROPPED: dict[str, Any] = SENT | {
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
    "moe_token_drop_policy": "position",
    "moe_input_jitter_eps": 0.01,
}
ASSIGNED: dict[str, Any] = EXPERTS | {
    "moe_router_load_balancing_type": "sinkhorn",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_topk": 1,
    "moe_apply_probs_on_input": True,
}
EP2 = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
ETP2 = {"expert_tensor_parallel_size": 2}
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
    pytest.param(2, DISTRIBUTED | EP2, {}, GROUPED, id="EP2-groups-two-losses"),
    pytest.param(2, DISTRIBUTED | EP2, {}, DROPPED, id="EP2-capacity-jitter"),
    pytest.param(2, EP2, {"precision": "bf16"}, ASSIGNED, id="EP2-bf16-sinkhorn"),
    pytest.param(4, TENSOR | EP2, {}, GATHERED, id="DP2-TP2-EP2"),
    pytest.param(4, VIRTUAL | EP2, {"precision": "bf16"}, EXPERTS, id="DP2-PP2-virtual-EP2"),
    pytest.param(2, DISTRIBUTED | EP2 | {"context_parallel_size": 2}, {}, SENT, id="CP2-EP2-alltoall"),
    pytest.param(2, TENSOR | EP2 | ETP1, {}, SENT, id="TP2-EP2-ETP1-alltoall"),
    pytest.param(2, TENSOR | ETP1, {"precision": "bf16"}, EXPERTS, id="TP2-ETP1-bf16"),
    pytest.param(2, DISTRIBUTED | ETP2, {}, GATHERED, id="DP2-ETP2"),
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
    experts = EXPERTS if parallel else EXPERTS | {"add_bias_linear": True}

    def made(**layout: int) -> Any:
        return harness(**sections(2, parallel | layout, training, experts, **SMOOTH))

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
    layouts = ((1, DISTRIBUTED, SENT), (2, TENSOR, SENT), (2, VIRTUAL, SENT), (4, TENSOR | EP2, GATHERED))
    for ranks, parallel, experts in layouts:
        other = resumed_from(whole, harness(**sections(ranks, parallel, {}, experts, **SMOOTH)))
        assert_close(other.steps(), reference, loss=1e-5, norm=1e-4)
        for iteration, step in other.steps().items():
            for name, value in step["auxiliary_losses"].items():
                assert value == pytest.approx(reference[iteration]["auxiliary_losses"][name], abs=1e-5)


@pytest.mark.long
def test_experts_that_are_split_otherwise_than_the_rest_compute_the_same(harness: Make) -> None:
    """From their first step; on other ranks, whole on tensor-parallel ranks, in parts on data-parallel ones."""
    measured = {"tracking": {"log_interval": 1, "log_params_norm_per_param": True}}

    def trained(ranks: int, parallel: dict[str, Any], experts: dict[str, Any]) -> dict[int, Any]:
        made = harness(**sections(ranks, parallel, {}, experts, **SMOOTH), **measured)
        steps: dict[int, Any] = made.train().steps()
        return steps

    reference = trained(2, DISTRIBUTED, GATHERED)
    assert len([name for name in reference[1]["params_norm_per_param"] if ".0.mlp.experts.local_experts." in name]) == 8
    layouts = (
        (2, TENSOR | EP2 | ETP1, SENT),
        (2, TENSOR | ETP1, SENT),
        (2, DISTRIBUTED | ETP2, GATHERED),
        (2, DISTRIBUTED | EP2, SENT),
        (4, TENSOR | EP2 | ETP1, SENT),
    )
    for ranks, parallel, experts in layouts:
        found = trained(ranks, parallel, experts)
        assert_close(found, reference, loss=1e-5, norm=1e-4)
        for iteration, step in found.items():
            norms = step["params_norm_per_param"]
            assert norms == pytest.approx(reference[iteration]["params_norm_per_param"], rel=1e-4), parallel


@pytest.mark.long
def test_the_balancing_loss_is_one_of_micro_batches(harness: Make) -> None:
    """Another size of them is another loss to train on; without that loss it is not."""
    for factor in (0.0, 0.1):
        experts = EXPERTS | {"moe_aux_loss_coeff": factor}
        large, small = (
            harness(**sections(2, DISTRIBUTED, {"micro_batch_size": size}, experts, **SMOOTH)).train().steps()
            for size in (4, 1)
        )
        assert large[1]["loss"] == pytest.approx(small[1]["loss"], abs=1e-6)  # fresh weights
        apart = max(abs(large[at]["loss"] - small[at]["loss"]) for at in large)
        assert apart > 1e-5 if factor else apart < 1e-6, (factor, apart)


@pytest.mark.long
def test_experts_move_to_other_ranks_with_muon(harness: Make) -> None:
    def made(**layout: int) -> Any:
        return harness(**sections(2, layout, {}, EXPERTS, **SMOOTH), optimizer={"name": "muon"})

    one, two = made(), made(**EP2)
    reference = one.train().steps()
    assert_close(two.train().steps(), reference, loss=1e-5, norm=1e-4)
    for whole, layout in ((one, EP2), (two, {})):
        assert_close(resumed_from(whole, made(**layout)).steps(), reference, loss=1e-5, norm=1e-4)


@pytest.mark.long
def test_muon_gathers_experts_over_the_ranks_that_share_them(harness: Make) -> None:
    """Over tensor-parallel ranks, split as all else is and otherwise."""

    def made(ranks: int, **layout: Any) -> Any:
        return harness(**sections(ranks, layout, {}, GATHERED, **SMOOTH), optimizer={"name": "muon"})

    tensor = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    one = made(1)
    reference = one.train().steps()
    for ranks, layout in ((2, tensor), (2, tensor | EP2 | ETP1), (2, ETP2), (4, tensor | EP2)):
        whole, rest = made(ranks, **layout), made(ranks, **layout)
        assert_close(whole.train().steps(), reference, loss=1e-5, norm=1e-4)
        resumed = resumed_from(whole, rest).steps()
        assert {at: step["loss"].hex() for at, step in resumed.items()} == {
            at: step["loss"].hex() for at, step in whole.attempts[-1].steps().items() if at > CUT
        }
        assert_close(resumed_from(one, made(ranks, **layout)).steps(), reference, loss=1e-5, norm=1e-4)
