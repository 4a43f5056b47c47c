"""Every way to split the model: a resume is exact, and another way to split it computes the same."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.submit.forecast import checkpoint_size
from relayrun.train.model.size import count_parameters, pad_to_multiple
from tests.checkpoints import assert_same_bytes
from tests.workspace import VOCABULARY

Make = Callable[..., Any]

pytestmark = pytest.mark.slow

CUT, STEPS = 3, 6
DISTRIBUTED = {"use_distributed_optimizer": True}
OVERLAP = DISTRIBUTED | {"overlap_grad_reduce": True, "overlap_param_gather": True}
TENSOR = DISTRIBUTED | {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = DISTRIBUTED | {"pipeline_model_parallel_size": 2}
VIRTUAL = PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1}

LAYOUTS = [
    pytest.param(2, OVERLAP, {"precision": "bf16"}, id="DP2-bf16-overlap"),
    pytest.param(
        2,
        TENSOR,
        {"precision": "bf16", "recompute_granularity": "full", "recompute_num_layers": 1},
        id="TP2-bf16-sequence-recompute",
    ),
    pytest.param(2, VIRTUAL, {"manual_gc_interval": 2}, id="PP2-virtual"),
    pytest.param(2, PIPELINE, {"precision": "bf16"}, id="PP2-bf16", marks=pytest.mark.long),
    pytest.param(2, {}, {"precision": "bf16"}, id="DP2-bf16-plain", marks=pytest.mark.long),
    pytest.param(4, TENSOR | PIPELINE, {"precision": "bf16"}, id="TP2-PP2-bf16", marks=pytest.mark.long),
    pytest.param(4, OVERLAP | TENSOR, {}, id="DP2-TP2-overlap", marks=pytest.mark.long),
    pytest.param(4, OVERLAP | VIRTUAL, {"precision": "bf16"}, id="DP2-PP2-virtual-overlap", marks=pytest.mark.long),
]


def settings(ranks: int, parallel: dict[str, Any], training: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "training": {"steps": STEPS, "eval_steps": 1} | training,
        "model": {"num_layers": 4},
        "checkpoint": {"interval": CUT},
        "parallel": parallel,
        "job": {"ntasks_per_node": ranks},
    }


def assert_as_forecast(whole: Any, trained: Any) -> None:
    """The model that was built has the parameters that `relayrun check` counts, and its checkpoint their bytes."""
    config = RunConfig.model_validate(whole.config)
    count = count_parameters(config.model, pad_to_multiple(VOCABULARY, config.model.make_vocab_size_divisible_by))
    assert f": {count:,} parameters on " in trained.output()
    tensors = sum(path.stat().st_size for path in whole.run.checkpoint(STEPS).glob("*.distcp"))
    forecast = checkpoint_size(config, count, Run(whole.run.path / "none")).bytes
    assert forecast <= tensors < forecast + 2_000_000  # names and types of the tensors come on top


def resumed_from(whole: Any, made: Any) -> Any:
    """Another run, from the first one's checkpoint in the middle."""
    return made.train(base_iteration=CUT, base_path=str(whole.run.checkpoint(CUT)))


@pytest.mark.parametrize(("ranks", "parallel", "training"), LAYOUTS)
def test_a_resume_is_exact(harness: Make, ranks: int, parallel: dict[str, Any], training: dict[str, Any]) -> None:
    whole, rest = (harness(**settings(ranks, parallel, training)) for _ in range(2))
    reference = whole.train()
    assert_as_forecast(whole, reference)
    resumed = resumed_from(whole, rest)
    assert sorted(resumed.steps()) == list(range(CUT + 1, STEPS + 1))
    for iteration, step in resumed.steps().items():
        for name in ("loss", "grad_norm"):
            assert step[name].hex() == reference.steps()[iteration][name].hex(), (iteration, name)
    assert resumed.evaluations() == reference.evaluations()
    assert_same_bytes(whole.run.checkpoint(STEPS), rest.run.checkpoint(STEPS))


def test_without_the_synchronization_before_a_save_overlapped_parameters_are_saved_stale(harness: Make) -> None:
    """What `overlap_param_gather` leaves for the next forward pass is missing then: the resume goes another way."""
    whole, rest = (harness(**settings(2, OVERLAP, {"precision": "bf16"})) for _ in range(2))
    faulty = whole.start(prefix=[sys.executable, "-m", "tests.training.without_param_sync", "--"])
    assert faulty.wait() == [0, 0], faulty.output()
    resumed = resumed_from(whole, rest)
    assert faulty.steps()[CUT + 1]["loss"] != resumed.steps()[CUT + 1]["loss"]


def test_another_way_to_split_the_model_computes_the_same(harness: Make) -> None:
    """Without dropout, in fp32: the loss differs by what other orders of summation make."""
    plain = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "num_layers": 4}
    whole = harness(**settings(2, DISTRIBUTED, {}) | {"model": plain})
    reference = whole.train().steps()
    for parallel in (TENSOR, VIRTUAL):
        other = resumed_from(whole, harness(**settings(2, parallel, {}) | {"model": plain}))
        for iteration, step in other.steps().items():
            assert abs(step["loss"] - reference[iteration]["loss"]) < 1e-6, (parallel, iteration)
            assert step["grad_norm"] == pytest.approx(reference[iteration]["grad_norm"], rel=1e-5)
        assert "dropout masks start anew" in other.output()
