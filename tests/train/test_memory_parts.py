"""A tensor that several ranks of a node have is in the copy of one of them."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    from megatron.core.dist_checkpointing import ShardedTensor

    from relayrun.train.checkpoint.memory_tier import NodeDivision, divide_among_node, tensor_parts
    from relayrun.train.distributed import Ranks

RANKS, PER_NODE = 4, 2
WEIGHTS = [f"layer.{number}" for number in range(9)]


def state(rank: int) -> list[ShardedTensor]:
    """Weights that all ranks have, and the rank's own part of Adam's state; replicas of one name differ in their id."""
    shared = [
        ShardedTensor.from_rank_offsets(name, torch.full((3 + number,), number, dtype=torch.bfloat16), replica_id=rank)
        for number, name in enumerate(WEIGHTS)
    ]
    own = ShardedTensor.from_rank_offsets("exp_avg", torch.full((5,), float(rank)), (0, rank, RANKS), replica_id=0)
    return [*shared[:4], own, *shared[4:]]


def divided(folders: list[Path]) -> list[NodeDivision]:
    barrier = threading.Barrier(RANKS, timeout=60)
    flags: dict[int, list[int]] = {}
    found: list[Any] = [None] * RANKS

    def maximum(rank: int, own: list[int]) -> list[int]:
        flags[rank] = own
        barrier.wait()
        highest = [max(each) for each in zip(*flags.values(), strict=True)]
        barrier.wait()
        return highest

    def run(rank: int) -> None:
        ranks = SimpleNamespace(rank=rank, world_size=RANKS, maximum=lambda own: maximum(rank, own))
        found[rank] = divide_among_node(folders[rank], cast(Ranks, ranks), PER_NODE, tensor_parts(state(rank)))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def test_each_node_has_each_tensor_once_and_its_ranks_write_alike(tmp_path: Path) -> None:
    folders = [tmp_path / str(rank // PER_NODE) for rank in range(RANKS)]
    for folder in set(folders):
        folder.mkdir()
    divisions = divided(folders)
    bodies = {
        rank: b"".join(
            tensor.data.view(torch.uint8).numpy().tobytes()
            for tensor, place in zip(state(rank), divisions[rank].places, strict=True)
            if place.rank == rank
        )
        for rank in range(RANKS)
    }
    sizes = [len(bodies[rank]) for rank in range(RANKS)]
    assert sizes == [each.own_bytes for each in divisions]
    weights = sum(2 * (3 + number) for number in range(len(WEIGHTS)))
    assert sum(sizes) == RANKS // PER_NODE * weights + RANKS * 20
    assert max(sizes) - min(sizes) <= 2 * (3 + len(WEIGHTS))
    for rank, division in enumerate(divisions):
        for tensor, place in zip(state(rank), division.places, strict=True):
            assert place.rank // PER_NODE == rank // PER_NODE
            assert bodies[place.rank][place.at :].startswith(tensor.data.view(torch.uint8).numpy().tobytes())
    assert len({division.layout for division in divisions}) == RANKS


def test_a_folder_that_takes_no_file_lets_every_rank_copy_all_that_it_has(tmp_path: Path) -> None:
    folders = [tmp_path, tmp_path, tmp_path / "gone", tmp_path / "gone"]
    for rank, division in enumerate(divided(folders)):
        assert {place.rank for place in division.places} == {rank}


@pytest.mark.parametrize("change", ["replica", "shape", "type"])
def test_tensors_of_one_key_that_are_no_replicas_stay_with_their_ranks(change: str) -> None:
    kinds = {"replica": ((4,), torch.float32, 0), "shape": ((5,), torch.float32, 1), "type": ((4,), torch.int32, 1)}
    shape, dtype, replica = kinds[change]
    first = ShardedTensor.from_rank_offsets("w", torch.zeros(4), replica_id=0)
    second = ShardedTensor.from_rank_offsets("w", torch.zeros(shape, dtype=dtype), replica_id=replica)
    parts = {0: tensor_parts([first]), 1: tensor_parts([second])}
    assert [NodeDivision(rank, parts).places[0].rank for rank in (0, 1)] == [0, 1]
