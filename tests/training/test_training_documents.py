"""Documents of one row (`data.reset_attention_mask`, `reset_position_ids`) have the loss and gradients of documents
alone, in the real model, over its layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.training import own_ranks

LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 12,
    "rope_type": "rope",
}
STRETCHED: dict[str, Any] = LATENT | {
    "rope_type": "yarn",
    "rotary_scaling_factor": 2,
    "original_max_position_embeddings": 48,
}
WINDOW: dict[str, Any] = {"window_size": [12, 0], "window_attn_skip_freq": 2, "qk_layernorm": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "recomputed": (1, {"training": {"recompute_granularity": "full"}}),
    "core attention recomputed": (1, {"training": {"recompute_granularity": "selective"}}),
    "TP2, sequence parallel": (2, {"parallel": {"tensor_model_parallel_size": 2, "sequence_parallel": True}}),
    "PP2": (2, {"parallel": {"pipeline_model_parallel_size": 2}}),
    "PP2, virtual stages": (
        2,
        {"parallel": {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}},
    ),
    "CP2": (2, {"parallel": {"context_parallel_size": 2}}),
    "CP4": (4, {"parallel": {"context_parallel_size": 4}}),
    "latent attention": (1, {"model": {"num_query_groups": 4, "transformer": LATENT}}),
    "latent attention, stretched, CP2": (
        2,
        {"model": {"num_query_groups": 4, "transformer": STRETCHED}, "parallel": {"context_parallel_size": 2}},
    ),
    "window": (1, {"model": {"transformer": WINDOW}}),
    "window, CP2": (2, {"model": {"transformer": WINDOW}, "parallel": {"context_parallel_size": 2}}),
    "rotary positions in part": (
        1,
        {"model": {"rotary_percent": 0.5, "transformer": {"rotary_interleaved": True, "no_rope_freq": 4}}},
    ),
    "TP2, CP2": (4, {"parallel": {"tensor_model_parallel_size": 2, "context_parallel_size": 2}}),
}
IN_EVERY_TEST = ("one rank", "CP2")


def run(folder: Path, ranks: int, sections: dict[str, Any]) -> dict[str, Any]:
    logs = own_ranks.run("tests.training.packed_documents", folder, ranks, json.dumps(sections))
    found: dict[str, Any] = next(answer for log in logs if (answer := json.loads(log.read_text().splitlines()[-1])))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout", [name if name in IN_EVERY_TEST else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]
)
def test_documents_together_are_documents_apart(tmp_path: Path, layout: str) -> None:
    """They have one token, the whole window and what lies between, and weights that are fresh or have learnt."""
    found = run(tmp_path, *LAYOUTS[layout])
    for weights in ("fresh", "sharp"):
        assert found[weights]["error"] < 1e-6
        assert found[weights]["gradient error"] < 2e-6
        assert found[weights]["without documents"] > 1e-4
    assert found["sharp"]["loss"] < found["fresh"]["loss"] - 0.1
