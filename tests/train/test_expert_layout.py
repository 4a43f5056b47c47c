"""Experts and latent attention in a run config: what is refused, and how many parameters there are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from relayrun.config.compose.layout_rules import expert_layers
from relayrun.config.compose.schema import ModelSection, RunConfig
from relayrun.train.model.size import count_parameters, flops_per_token, memory_bytes, routed_parameters

EXPERTS: dict[str, Any] = {"num_moe_experts": 8, "moe_aux_loss_coeff": 0.01}
TENSOR: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LATENT: dict[str, Any] = {"multi_latent_attention": True}
MIXTRAL = ModelSection(
    num_layers=32,
    hidden_size=4096,
    ffn_hidden_size=14336,
    num_attention_heads=32,
    num_query_groups=8,
    transformer=EXPERTS,  # type: ignore[arg-type]
)
LITE = ModelSection(
    num_layers=27,
    hidden_size=2048,
    ffn_hidden_size=10944,
    num_attention_heads=16,
    num_query_groups=16,
    transformer={  # type: ignore[arg-type]
        "num_moe_experts": 64,
        "moe_router_topk": 6,
        "moe_layer_freq": [0] + [1] * 26,
        "moe_ffn_hidden_size": 1408,
        "moe_shared_expert_intermediate_size": 2 * 1408,
        "multi_latent_attention": True,
        "q_lora_rank": None,
        "qk_layernorm": True,
    },
)
"""DeepSeek-V2-Lite (arXiv 2405.04434, appendix B)."""


def made(transformer: dict[str, Any], **sections: dict[str, Any]) -> RunConfig:
    config: dict[str, Any] = {
        "project": "tests",
        "name": "experts",
        "model": {
            "num_layers": 4,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "num_query_groups": 4,
            "transformer": transformer,
        },
        "data": {"tokenizer": "none", "datasets": ["none"]},
        "training": {"steps": 10, "micro_batch_size": 1, "global_batch_size": 16, "seq_length": 64},
        "optimizer": {"lr": 1e-3},
        "checkpoint": {"interval": 10},
        "job": {"time": "10", "ntasks_per_node": 4},
        "cluster": {"name": "test", "scheduler": "local"},
    }
    for name, changes in sections.items():
        config[name] = config.get(name, {}) | changes
    return RunConfig.model_validate_json(json.dumps(config))


@pytest.mark.parametrize(
    ("transformer", "sections", "words"),
    [
        ({}, {"parallel": {"expert_model_parallel_size": 2}}, "set model.transformer.num_moe_experts"),
        (EXPERTS | {"num_moe_experts": 6}, {"parallel": {"expert_model_parallel_size": 4}}, "6 is no multiple of"),
        (EXPERTS, {"parallel": {"expert_model_parallel_size": 8}}, "4 of them .* are no multiple of"),
        (EXPERTS, {"parallel": {"tensor_model_parallel_size": 2}}, "need parallel.sequence_parallel=true"),
        (
            EXPERTS | {"moe_token_dispatcher_type": "alltoall"},
            {
                "parallel": TENSOR | {"expert_model_parallel_size": 2},
            },
            "which gloo, without GPUs .* cannot; set allgather",
        ),
        ({}, {"parallel": {"expert_tensor_parallel_size": 2}}, "set model.transformer.num_moe_experts"),
        (
            EXPERTS,
            {"parallel": TENSOR | {"expert_tensor_parallel_size": 1, "expert_model_parallel_size": 8}},
            "4 of them .tensor 2 x data 2 x context 1. are no multiple of parallel.expert_tensor_parallel_size 1 x",
        ),
        (
            EXPERTS | {"moe_ffn_hidden_size": 66},
            {"parallel": {"expert_tensor_parallel_size": 4}},
            "moe_ffn_hidden_size 66 is no multiple of parallel.expert_tensor_parallel_size 4",
        ),
        (
            EXPERTS | {"moe_layer_freq": [0, 0, 1, 1]},
            {"parallel": {"expert_tensor_parallel_size": 2, "pipeline_model_parallel_size": 2}},
            "with parallel.expert_tensor_parallel_size 2 every stage needs one",
        ),
        (
            EXPERTS | {"add_bias_linear": True},
            {"parallel": {"expert_tensor_parallel_size": 2}},
            "biases of experts are not split",
        ),
        (
            EXPERTS,
            {
                "parallel": {
                    "expert_tensor_parallel_size": 4,
                    "num_distributed_optimizer_instances": 2,
                    "use_distributed_optimizer": True,
                }
            },
            "1 for experts. are no multiple of parallel.num_distributed_optimizer_instances 2",
        ),
        (
            EXPERTS | {"moe_ffn_hidden_size": 33},
            {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}},
            "moe_ffn_hidden_size 33 is no multiple",
        ),
        (
            EXPERTS | {"moe_layer_freq": [0, 0, 1, 1]},
            {"parallel": {"expert_model_parallel_size": 2, "pipeline_model_parallel_size": 2}},
            "pipeline stage 0 has no layer with experts",
        ),
        (EXPERTS | {"moe_router_topk": 9}, {}, "moe_router_topk 9 is above num_moe_experts 8"),
        (EXPERTS | {"moe_router_topk": 1}, {}, "set model.transformer.moe_router_pre_softmax=true"),
        (EXPERTS | {"moe_router_enable_expert_bias": True}, {}, "moe_router_score_function=sigmoid"),
        (EXPERTS | {"moe_aux_loss_coeff": [0.1, 0.1]}, {}, "one factor for each"),
        (EXPERTS | {"moe_router_group_topk": 2}, {}, "groups of equal size"),
        (
            EXPERTS | {"moe_router_group_topk": 4, "moe_router_num_groups": 4, "moe_router_topk": 6},
            {},
            "no multiple of",
        ),
        (EXPERTS | {"moe_shared_expert_overlap": True}, {}, "moe_token_dispatcher_type=alltoall"),
        (EXPERTS | {"moe_grouped_gemm": True}, {}, "training.transformer_impl=transformer_engine"),
        (
            EXPERTS | {"add_bias_linear": True, "moe_shared_expert_intermediate_size": 64},
            {},
            "shared experts have none; set it to false",
        ),
        (
            EXPERTS,
            {"training": {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}},
            "all layers have experts; write moe",
        ),
        (LATENT, {"model": {"num_query_groups": 2}}, "set it to num_attention_heads, 4"),
        (LATENT, {"model": {"rope_scaling_factor": 8.0}}, "rope_type=yarn"),
        (
            LATENT | {"qk_layernorm": True},
            {"parallel": {"tensor_model_parallel_size": 2}},
            "needs parallel.sequence_parallel=true",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_to_change(
    transformer: dict[str, Any], sections: dict[str, dict[str, Any]], words: str
) -> None:
    if "model" in sections:
        sections = {"model": made(transformer).model.model_dump() | sections["model"]}
    with pytest.raises(ValidationError, match=words):
        made(transformer, **sections)


def test_virtual_parts_of_a_stage_count_together() -> None:
    """Stage 0 has layers 0 and 2, stage 1 has 1 and 3."""
    virtual = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}
    layout = {"parallel": virtual | {"expert_model_parallel_size": 2}}
    made(EXPERTS | {"moe_layer_freq": [0, 0, 1, 1]}, **layout)
    with pytest.raises(ValidationError, match="pipeline stage 1 has no layer"):
        made(EXPERTS | {"moe_layer_freq": 2}, **layout)


def test_which_layers_have_experts() -> None:
    assert expert_layers(made({}).model) == [False] * 4
    assert expert_layers(made(EXPERTS | {"moe_layer_freq": 2}).model) == [True, False, True, False]
    assert expert_layers(made(EXPERTS | {"moe_layer_freq": [0, 1, 1, 0]}).model) == [False, True, True, False]


def test_published_models_have_as_many_parameters_as_their_authors_say() -> None:
    assert count_parameters(MIXTRAL, 32000) == 46_702_792_704
    assert count_parameters(LITE, 102400) == 15_706_484_224
    used = (flops_per_token(MIXTRAL, 32000, 0) / 6, flops_per_token(LITE, 102400, 0) / 6)
    assert [round(each / 1e9, 1) for each in used] == [12.7, 2.5]  # without the embedding lookup


def test_a_rank_holds_its_part_of_the_experts() -> None:
    """In fp32 a weight and its gradient take 8 bytes."""
    whole = memory_bytes(made(EXPERTS), 100)
    split = memory_bytes(made(EXPERTS, parallel={"expert_model_parallel_size": 4}), 100)
    moments = 8 * routed_parameters(made(EXPERTS).model) * 3 / 4
    assert whole.state - split.state == 8 * routed_parameters(made(EXPERTS).model) * 3 / 4 + moments
    assert whole.activations == split.activations


def test_experts_may_lie_on_tensor_parallel_ranks() -> None:
    """Four ranks of a stage: four whole experts each on one, or two halves on two; as many bytes of weights on each."""
    held = []
    for size, own in ((4, 1), (2, 2), (1, 4)):
        sizes = {"expert_model_parallel_size": size, "expert_tensor_parallel_size": own}
        config = made(EXPERTS, parallel=TENSOR | {"use_distributed_optimizer": True} | sizes)
        assert config.expert_replicas == 1
        held.append(memory_bytes(config, 100).state)
    assert held[0] == held[1] == held[2]
    config = made(EXPERTS, parallel=TENSOR | {"expert_tensor_parallel_size": 1})
    assert config.expert_replicas == 4
    sent = EXPERTS | {"moe_token_dispatcher_type": "alltoall"}
    made(sent, parallel=TENSOR | {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1})
