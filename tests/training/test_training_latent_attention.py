"""Multi-latent attention: a resume is exact, and tensor-parallel ranks compute what one computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.checkpoints import assert_same_bytes
from tests.training.test_training_experts import SMOOTH, assert_close, sections
from tests.training.test_training_parallel import (
    CUT,
    DISTRIBUTED,
    PIPELINE,
    STEPS,
    TENSOR,
    assert_as_forecast,
    resumed_from,
)

Make = Callable[..., Any]

pytestmark = [pytest.mark.slow, pytest.mark.long]

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 24,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "rope_type": "rope",
    "qk_layernorm": True,
}
WITHOUT_Q: dict[str, Any] = LATENT | {"q_lora_rank": None, "qk_layernorm": False}
STRETCHED: dict[str, Any] = LATENT | {"rope_type": "yarn", "rotary_scaling_factor": 4, "mscale_all_dim": 1.0}
HEADS = {"num_query_groups": 4}

LAYOUTS = [
    pytest.param(TENSOR, {}, LATENT, id="TP2-sequence"),
    pytest.param(DISTRIBUTED | {"tensor_model_parallel_size": 2}, {}, WITHOUT_Q, id="TP2-without-q"),
    pytest.param(PIPELINE, {"precision": "bf16"}, STRETCHED, id="PP2-bf16-yarn"),
    pytest.param(DISTRIBUTED, {"recompute_granularity": "full"}, WITHOUT_Q, id="DP2-recomputed-without-q"),
    pytest.param({"context_parallel_size": 2}, {}, LATENT, id="CP2"),
]


@pytest.mark.parametrize(("parallel", "training", "latent"), LAYOUTS)
def test_a_resume_is_exact(
    harness: Make, parallel: dict[str, Any], training: dict[str, Any], latent: dict[str, Any]
) -> None:
    whole, rest = (harness(**sections(2, parallel, training, latent, **HEADS)) for _ in range(2))
    reference = whole.train()
    assert_as_forecast(whole, reference)
    resumed = resumed_from(whole, rest)
    assert sorted(resumed.steps()) == list(range(CUT + 1, STEPS + 1))
    for iteration, step in resumed.steps().items():
        for name in ("loss", "grad_norm"):
            assert step[name].hex() == reference.steps()[iteration][name].hex(), (iteration, name)
    assert_same_bytes(whole.run.checkpoint(STEPS), rest.run.checkpoint(STEPS))


@pytest.mark.parametrize("latent", [LATENT, WITHOUT_Q, STRETCHED], ids=["latent", "without-q", "yarn"])
def test_another_way_to_split_the_heads_computes_the_same(harness: Make, latent: dict[str, Any]) -> None:
    """Gradients too: keys' positions are shared by all heads, so each rank has a part of their gradient.

    It is small where attention looks everywhere alike, as with small fresh weights.
    """
    model = HEADS | SMOOTH | {"init_method_std": 0.3}
    whole = harness(**sections(2, DISTRIBUTED, {}, latent, **model))
    reference = whole.train().steps()
    layouts = [TENSOR, {"context_parallel_size": 2}]
    if not latent["qk_layernorm"]:
        layouts.append({"tensor_model_parallel_size": 2})
    for layout in layouts:
        split = DISTRIBUTED | layout
        other = resumed_from(whole, harness(**sections(2, split, {}, latent, **model)))
        assert_close(other.steps(), reference, loss=1e-6)
