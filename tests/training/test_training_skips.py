"""An update that is skipped, for whatever reason, changes no state of a rank; random state and samples move on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from relayrun.files import read_json_lines
from tests.checkpoints import assert_same_bytes

pytestmark = pytest.mark.slow

SKIPPED = {7: "loss nan, gradient norm nan", 11: "is a spike", 13: "the hook says so"}
FAULTS = "nan-sample=50,spike-sample=82:100"
EXPERTS = {
    "num_moe_experts": 4,
    "moe_ffn_hidden_size": 32,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_router_load_balancing_type": ["seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.01],
    "moe_z_loss_coeff": 0.001,
}
HOOK = {"hook": "tests.training.state_hashes:RecordsState", "options": {"skipped": [13]}}


def made(harness: Callable[..., Any], precision: str, parallel: dict[str, Any]) -> Any:
    return harness(
        model={"transformer": EXPERTS},
        training={"steps": 16, "spike_window": 8, "on_nan": "skip", "on_spike": "skip", "precision": precision}
        | {"hooks": [HOOK]},
        parallel=parallel,
        checkpoint={"interval": 11, "keep_last": 100},
    )


def hashes(run: Any, rank: int) -> dict[int, dict[str, Any]]:
    """By iteration; those of a later attempt hold."""
    return {line.pop("iteration"): line for line in read_json_lines(run.run.path / f"hashes-{rank}.jsonl")}


@pytest.mark.parametrize(
    ("precision", "parallel"),
    [
        ("bf16", {"use_distributed_optimizer": True, "overlap_grad_reduce": True}),
        pytest.param("fp32", {"expert_model_parallel_size": 2}, marks=pytest.mark.long),
    ],
)
def test_a_skipped_update_changes_no_state_and_a_resume_agrees(
    harness: Callable[..., Any], precision: str, parallel: dict[str, Any]
) -> None:
    whole, pieces = made(harness, precision, parallel), made(harness, precision, parallel)
    steps = whole.train(inject=FAULTS).steps()
    assert {iteration: line["skipped"] for iteration, line in steps.items() if line["skipped"]}.keys() == SKIPPED.keys()
    for iteration, reason in SKIPPED.items():
        assert reason in steps[iteration]["skipped"]
    assert pieces.start(inject=f"{FAULTS},crash-at=14").wait() == [1, 1]
    assert 12 in pieces.train(inject=FAULTS).steps()
    for rank in range(2):
        found = hashes(whole, rank)
        for iteration in range(2, 16):
            before, after = found[iteration], found[iteration + 1]
            same = {name for name in before if before[name] == after[name]}
            assert same == ({"parameters", "buffers", "main weights", "optimizer"} if iteration in SKIPPED else set())
            assert after["consumed_samples"] == before["consumed_samples"] + 8
        again = hashes(pieces, rank)
        assert {(at, name) for at, line in found.items() for name in line if again[at][name] != line[name]} == set()
    assert_same_bytes(whole.run.checkpoint(16), pieces.run.checkpoint(16))
