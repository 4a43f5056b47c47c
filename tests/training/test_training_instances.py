"""Several distributed optimizers, each of a group of replicas: the same training, and checkpoints for any number."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import assert_same_bytes

from .conftest import Harness

RANKS = 4
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


def settings(instances: int, stop: int | None = None, **parallel: Any) -> dict[str, Any]:
    divided = {"use_distributed_optimizer": True, "num_distributed_optimizer_instances": instances}
    return {
        "training": {"steps": 8, "stop_after": stop, "micro_batch_size": 1},
        "checkpoint": {"interval": 4},
        "job": {"ntasks_per_node": RANKS},
        "parallel": divided | parallel,
    }


def losses(made: Harness, number: int = -1) -> dict[int, tuple[float, float]]:
    return {at: (step["loss"], step["grad_norm"]) for at, step in made.attempts[number].steps().items()}


@pytest.mark.long
@pytest.mark.parametrize("overlap", [{}, OVERLAP], ids=["plain", "overlapped"])
def test_two_instances_train_as_one_and_resume_to_the_bit(
    harness: Callable[..., Harness], overlap: dict[str, bool]
) -> None:
    one, two = harness(**settings(1, **overlap)), harness(**settings(2, **overlap))
    one.train()
    two.train()
    expected, found = losses(one), losses(two)
    assert sorted(found) == [*range(1, 9)]
    for at, pair in found.items():  # they add gradients up in another order
        assert pair == pytest.approx(expected[at], rel=2e-5), at
    pieces = harness(**settings(2, stop=4, **overlap))
    pieces.train()
    pieces.config["training"]["stop_after"] = None
    pieces.train()
    assert losses(pieces, 0) | losses(pieces) == found
    assert_same_bytes(pieces.run.checkpoint(8), two.run.checkpoint(8))


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (4, 2)])
def test_a_checkpoint_fits_another_number_of_instances(
    harness: Callable[..., Harness], before: int, after: int
) -> None:
    whole, made = harness(**settings(before)), harness(**settings(before, stop=4))
    whole.train()
    made.train()
    made.config["training"]["stop_after"] = None
    made.config["parallel"]["num_distributed_optimizer_instances"] = after
    made.train()
    expected = losses(whole)
    for at, pair in losses(made).items():
        assert pair == pytest.approx(expected[at], rel=2e-5), at
    assert sorted(losses(made)) == [5, 6, 7, 8]
    blocks = [
        sum(path.stat().st_size for path in Path(run.run.checkpoint(8)).glob("*.distcp")) for run in (whole, made)
    ]
    assert blocks[1] == pytest.approx(blocks[0], rel=0.05), "nothing is written twice"


@pytest.mark.long
def test_experts_over_ranks_train_in_several_instances_too(harness: Callable[..., Harness]) -> None:
    """The validation set gives one replica fewer batches than another, which sends it tokens all the same."""

    def of_experts(instances: int, stop: int | None = None) -> dict[str, Any]:
        model = {"transformer": {"num_moe_experts": 4, "moe_router_topk": 2}}
        return settings(instances, stop, expert_model_parallel_size=2) | {"model": model}

    one, two, pieces = harness(**of_experts(1)), harness(**of_experts(2)), harness(**of_experts(2, stop=4))
    for made in (one, two, pieces):
        made.train()
    expected, found = losses(one), losses(two)
    for at, pair in found.items():
        assert pair == pytest.approx(expected[at], rel=2e-5), at
    pieces.config["training"]["stop_after"] = None
    pieces.train()
    assert losses(pieces, 0) | losses(pieces) == found
    assert_same_bytes(pieces.run.checkpoint(8), two.run.checkpoint(8))
