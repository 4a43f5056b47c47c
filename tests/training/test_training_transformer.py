"""Models of today (`model.transformer`): a resume is exact, and another way to split them computes the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relayrun.config.compose.schema import RunConfig
from relayrun.train.model.size import count_parameters, pad_to_multiple
from tests.checkpoints import assert_same_bytes
from tests.workspace import VOCABULARY

Make = Callable[..., Any]

pytestmark = pytest.mark.slow

CUT, STEPS = 2, 4
DISTRIBUTED = {"use_distributed_optimizer": True}
TENSOR = DISTRIBUTED | {"tensor_model_parallel_size": 2}
APERTUS = {
    "kv_channels": 32,
    "qk_layernorm": True,
    "activation_func": "xielu",
    "gated_linear_unit": False,
    "window_size": [15, 0],
    "window_attn_skip_freq": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "heads of their own, norms of queries and keys": {"transformer": {"kv_channels": 32, "qk_layernorm": True}},
    "Apertus with a window": {"transformer": APERTUS},
    "biases of queries, norms without weights": {
        "transformer": {"add_qkv_bias": True, "qk_l2_norm": True, "softmax_scale": 0.5}
    },
    "LayerNorm, gelu, biases": {
        "transformer": {
            "normalization": "LayerNorm",
            "layernorm_zero_centered_gamma": True,
            "activation_func": "gelu",
            "gated_linear_unit": False,
            "add_bias_linear": True,
            "qk_layernorm": True,
        }
    },
    "gates": {
        "transformer": {
            "attention_output_gate": True,
            "activation_func": "quick_gelu",
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": 7.0,
            "embedding_init_method_std": 0.1,
        }
    },
    "rotary positions in part": {
        "transformer": {"rotary_interleaved": True, "no_rope_freq": [0, 1], "activation_func": "squared_relu"},
        "rotary_percent": 0.5,
    },
}


def made(harness: Make, model: dict[str, Any], parallel: dict[str, Any], *, ranks: int = 2, **training: Any) -> Any:
    return harness(
        model={"hidden_dropout": 0.0, "attention_dropout": 0.0} | model,
        training={"steps": STEPS, "eval_steps": 1} | training,
        checkpoint={"interval": CUT},
        parallel=parallel,
        job={"ntasks_per_node": ranks},
    )


def resumed_from(whole: Any, other: Any) -> Any:
    """Another run, from the first one's checkpoint in the middle."""
    return other.train(base_iteration=CUT, base_path=str(whole.run.checkpoint(CUT)))


def assert_a_resume_is_exact(harness: Make, model: dict[str, Any], *, ranks: int) -> tuple[Any, Any]:
    whole, rest = (made(harness, model, DISTRIBUTED, ranks=ranks) for _ in range(2))
    reference = whole.train()
    config = RunConfig.model_validate(whole.config)
    count = count_parameters(config.model, pad_to_multiple(VOCABULARY, config.model.make_vocab_size_divisible_by))
    assert f": {count:,} parameters on " in reference.output()
    resumed = resumed_from(whole, rest)
    assert sorted(resumed.steps()) == list(range(CUT + 1, STEPS + 1))
    for iteration, step in resumed.steps().items():
        for name in ("loss", "grad_norm"):
            assert step[name].hex() == reference.steps()[iteration][name].hex(), (iteration, name)
    assert_same_bytes(whole.run.checkpoint(STEPS), rest.run.checkpoint(STEPS))
    return whole, reference


def test_a_model_with_all_of_it_resumes_exactly(harness: Make) -> None:
    assert_a_resume_is_exact(harness, {"transformer": APERTUS}, ranks=1)


@pytest.fixture(scope="module")
def llama(harness: Make) -> float:
    """The last loss of a plain Llama."""
    loss: float = made(harness, {}, DISTRIBUTED).train().steps()[STEPS]["loss"]
    return loss


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_resume_is_exact_and_another_way_to_split_the_model_computes_the_same(
    harness: Make, llama: float, name: str
) -> None:
    """In fp32, without dropout: the loss differs by what other orders of summation make."""
    whole, reference = assert_a_resume_is_exact(harness, MODELS[name], ranks=2)
    losses = {iteration: step["loss"] for iteration, step in reference.steps().items()}
    assert abs(llama - losses[STEPS]) > 1e-4  # the setting makes another model
    layouts = [TENSOR | {"sequence_parallel": True}, DISTRIBUTED | {"pipeline_model_parallel_size": 2}]
    for parallel in [TENSOR, *layouts] if MODELS[name]["transformer"] is APERTUS else layouts:
        other = resumed_from(whole, made(harness, MODELS[name], parallel))
        for iteration, step in other.steps().items():
            assert abs(step["loss"] - losses[iteration]) < 1e-5, (parallel, iteration)
            assert step["grad_norm"] == pytest.approx(reference.steps()[iteration]["grad_norm"], rel=1e-4)


@pytest.mark.long
def test_in_bf16_with_recomputation_a_resume_is_exact(harness: Make) -> None:
    parallel = TENSOR | {"sequence_parallel": True}
    settings = {"precision": "bf16", "recompute_granularity": "full"}
    dropout = {"transformer": APERTUS, "hidden_dropout": 0.1, "attention_dropout": 0.1}
    whole, rest = (made(harness, dropout, parallel, **settings) for _ in range(2))
    reference, resumed = whole.train(), resumed_from(whole, rest)
    for iteration, step in resumed.steps().items():
        assert step["loss"].hex() == reference.steps()[iteration]["loss"].hex()
    assert_same_bytes(whole.run.checkpoint(STEPS), rest.run.checkpoint(STEPS))
