"""Losses of routers weigh the same whatever the tokens' loss is a mean over; a skipped update moves no bias."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.training import own_ranks

pytestmark = pytest.mark.slow

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "DP2": (2, {}),
    "CP2": (2, {"context_parallel_size": 2}),
    "TP2": (2, TENSOR),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
}
LOSSES = ("aux", "sequence", "two", "z")


def run(folder: Path, layout: str, cases: list[list[Any]]) -> dict[str, np.ndarray]:
    """What all ranks have found in each case: name, loss_mean, micro-batch size, loss, share of ends."""
    ranks, parallel = LAYOUTS[layout]
    own_ranks.run("tests.training.router_losses", folder, ranks, json.dumps([str(folder), parallel, cases]))
    return {name: value for rank in range(ranks) for name, value in np.load(folder / f"{rank}.npz").items()}


def distance(one: dict[str, np.ndarray], first: str, other: dict[str, np.ndarray], second: str) -> float:
    """How far the router gradients of two cases are apart, over the norm of the second."""
    names = [key.removeprefix(f"{first}/") for key in one if key.startswith(f"{first}/") and key.endswith("weight")]
    assert names
    own, its = (
        np.concatenate([found[f"{case}/{name}"].ravel() for name in names])
        for found, case in ((one, first), (other, second))
    )
    assert np.linalg.norm(its) > 1e-3
    return float(np.linalg.norm(own - its) / np.linalg.norm(its))


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    cases = [
        [f"{mean} {loss} {share}", mean, 4, loss, share]
        for mean in ("micro_batch", "token")
        for loss in (*LOSSES, "global")
        for share in (0.0, 0.9)
    ]
    cases += [["whole batch", "token", 8, "global", 0.5]]
    cases += [[f"token sequence of {size}", "token", size, "sequence", 0.5] for size in (1, 4)]
    return run(tmp_path_factory.mktemp("one"), "one", cases)


@pytest.mark.parametrize("share", [0.0, 0.9])
@pytest.mark.parametrize("loss", [*LOSSES, "global"])
def test_masked_tokens_do_not_change_the_weight_of_the_routers_losses(
    one_rank: dict[str, np.ndarray], loss: str, share: float
) -> None:
    assert distance(one_rank, f"token {loss} {share}", one_rank, f"micro_batch {loss} {share}") < 1e-4
    reported = [key for key in one_rank if key.startswith(f"token {loss} {share}/reported")]
    assert reported
    for key in reported:
        assert one_rank[key] == pytest.approx(float(one_rank[key.replace("token", "micro_batch", 1)]), rel=1e-5)


def test_a_loss_of_sequences_does_not_depend_on_the_micro_batch_size(one_rank: dict[str, np.ndarray]) -> None:
    assert distance(one_rank, "token sequence of 1", one_rank, "token sequence of 4") < 1e-4


@pytest.mark.parametrize(
    "layout", ["DP2", pytest.param("CP2", marks=pytest.mark.long), pytest.param("TP2", marks=pytest.mark.long), "PP2"]
)
def test_nor_does_the_layout(tmp_path: Path, one_rank: dict[str, np.ndarray], layout: str) -> None:
    names = [f"token {loss} {share}" for loss in LOSSES for share in (0.0, 0.9)]
    found = run(tmp_path, layout, [[name, "token", 4, name.split()[1], float(name.split()[2])] for name in names])
    for name in names:
        assert distance(found, name, one_rank, name) < 1e-3, name


@pytest.mark.parametrize("layout", ["DP2", pytest.param("CP2", marks=pytest.mark.long)])
def test_a_loss_of_the_global_batch_does_not_shrink_with_the_replicas(
    tmp_path: Path, one_rank: dict[str, np.ndarray], layout: str
) -> None:
    size = 4 if layout == "DP2" else 8  # the same number of micro-batches: the loss is a running mean over them
    found = run(tmp_path, layout, [["whole batch", "token", size, "global", 0.5]])
    assert distance(found, "whole batch", one_rank, "whole batch") < 1e-3


def test_a_skipped_update_moves_no_bias_of_experts(tmp_path: Path) -> None:
    own_ranks.run("tests.training.router_losses", tmp_path, 1, json.dumps([str(tmp_path), {}, []]))
    for found in json.loads((tmp_path / "0.log").read_text().splitlines()[-1]).values():
        assert found["skipped"] == found["skipped again"] == []
        assert [name for name in found["updated"] if name.endswith("expert_bias")] != []
        assert "forwards" in found["updated"]
        assert found["counted"] == [16 * 4 * 32 * 2] * 2
        assert found["untouched"]
        assert found["moved"] == pytest.approx(1e-3, rel=1e-3)  # by one rate: the step that was left counts for nothing
