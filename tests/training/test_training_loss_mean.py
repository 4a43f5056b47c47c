"""`training.loss_mean`: what a masked loss is a mean over, in the real model, over several layouts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.training import own_ranks

Found = dict[str, np.ndarray]
SETTINGS: dict[str, tuple[int, dict[str, int], tuple[int, ...]]] = {
    "DP1": (1, {}, (1, 2, 4)),
    "DP2": (2, {}, (1, 4)),
    "PP2": (2, {"pipeline_model_parallel_size": 2}, (2,)),
    "CP2": (2, {"context_parallel_size": 2}, (1, 4)),
}
"""Ranks, the section `parallel`, and micro-batch sizes, by name of the layout."""


def run(folder: Path, ranks: int, parallel: dict[str, int], sizes: tuple[int, ...]) -> list[Found]:
    own_ranks.run("tests.training.loss_mean", folder, ranks, json.dumps([str(folder), parallel, sizes]))
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(ranks)]


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Found]]:
    return {name: run(tmp_path_factory.mktemp(name), *layout) for name, layout in SETTINGS.items()}


def gradients(found: Found, mean: str, size: int) -> Found:
    start = f"{mean}/{size}/gradient/"
    return {name.removeprefix(start): value for name, value in found.items() if name.startswith(start)}


def distance(one: Found, other: Found) -> float:
    """The distance of two sets of gradients over the norm of the second, which may hold those of one stage alone."""
    assert len(other) > 5
    square = sum(float(((one[name] - value) ** 2).sum()) for name, value in other.items())
    return float(np.sqrt(square / sum(float((value**2).sum()) for value in other.values())))


@pytest.mark.slow
@pytest.mark.parametrize("layout", SETTINGS)
@pytest.mark.parametrize("mean", ["token", "sample", "None"])
def test_these_means_do_not_depend_on_the_layout(layouts: dict[str, list[Found]], mean: str, layout: str) -> None:
    first = layouts["DP1"][0]
    for size in SETTINGS[layout][2]:
        for found in layouts[layout]:
            assert distance(gradients(first, mean, 1), gradients(found, mean, size)) < 2e-6
            for what in ("loss", "evaluation"):
                assert found[f"{mean}/{size}/{what}"] == pytest.approx(first[f"{mean}/1/{what}"], rel=1e-6)


@pytest.mark.slow
def test_of_micro_batches_the_gradient_does_and_the_reported_loss_does_not(layouts: dict[str, list[Found]]) -> None:
    found = layouts["DP1"][0]
    assert distance(gradients(found, "micro_batch", 1), gradients(found, "sample", 1)) < 2e-6  # of one sample each
    for size in SETTINGS["DP1"][2]:
        assert distance(gradients(found, "micro_batch", size), gradients(found, "token", 1)) > 1e-2
        for what in ("loss", "evaluation"):
            assert found[f"micro_batch/{size}/{what}"] == pytest.approx(float(found[f"token/1/{what}"]), rel=1e-6)
    assert distance(gradients(found, "micro_batch", 1), gradients(found, "micro_batch", 4)) > 1e-2
    assert abs(found["sample/1/loss"] - found["token/1/loss"]) > 1e-3
    for shared in layouts["CP2"]:  # the same micro-batches, each on two ranks
        assert distance(gradients(shared, "micro_batch", 4), gradients(found, "micro_batch", 4)) < 2e-6
    two = layouts["DP2"][0]  # one micro-batch on each rank: the two of a single one
    assert distance(gradients(two, "micro_batch", 4), gradients(found, "micro_batch", 4)) < 2e-6
