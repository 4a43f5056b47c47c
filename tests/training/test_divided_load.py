"""Replicas divide what they read of a checkpoint: each block is read once, and none waits for a rank that gave up."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.run import Run
from relayrun.train.checkpoint.reader import read_metadata
from tests import warm
from tests.checkpoints import assert_same_bytes

from .conftest import Harness

pytestmark = pytest.mark.slow

RANKS = 4
Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """By rank: what it met in each case of exchanging.py."""
    folder = tmp_path_factory.mktemp("exchange")
    (folder / "data").write_bytes(random.Random(1).randbytes(600_000))
    done = warm.run([sys.executable, Path(__file__).with_name("exchanging.py"), folder])
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def test_every_rank_has_what_it_wants_and_reads_its_share(results: Results) -> None:
    found = [each["whole"] for each in results]
    assert all(each["right"] for each in found)
    read = [each["read"] for each in found]
    largest = 131_072  # at most: a third of all
    assert max(read) <= 1.5 * sum(read) / RANKS + largest
    assert sum(read) < 600_000, "each block is read once"


def test_who_reads_wrong_bytes_stops_all(results: Results) -> None:
    words = results[0]["damaged"]["met"][1]
    assert {tuple(each["damaged"]["met"]) for each in results} == {("DamagedCheckpoint", words)}
    assert "read by rank 2" in words


def test_who_cannot_unpack_stops_all_in_words_where_its_error_cannot_be_sent(results: Results) -> None:
    assert {tuple(each["not unpacked"]["met"]) for each in results} == {("RuntimeError", "Stubborn: not unpacked")}


def test_who_does_not_know_what_it_wants_stops_all(results: Results) -> None:
    assert {tuple(each["lost"]["met"]) for each in results} == {("KeyError", "'index'")}


def test_what_one_rank_alone_wants_stops_it_alone(results: Results) -> None:
    assert [each["alone"].get("right") for each in results] == [True, True, True, None]
    assert results[3]["alone"]["met"][0] == "DamagedCheckpoint"


def test_messages_go_beside_collectives_of_the_same_group(results: Results) -> None:
    for rank, each in enumerate(results):
        found = each["messages"]
        assert found["all_gather"]
        assert found["sums"]
        assert found["rest"] == [f"for {rank}", "from 0", [0, 1, 2, 3] if rank == 0 else None]


def bytes_of_a_rank(made: Harness) -> tuple[int, int]:
    """What a rank read of tensors at most, and needs at most, as the newest attempt says."""
    ((read, needed),) = re.findall(
        r"read at most ([\d,]+) bytes of tensors, and needs at most ([\d,]+)", made.attempts[-1].output()
    )
    return int(read.replace(",", "")), int(needed.replace(",", ""))


@pytest.mark.long
@pytest.mark.parametrize("distributed", [False, True], ids=["adam", "distributed-optimizer"])
def test_four_replicas_go_on_to_the_bit_and_read_their_share(
    harness: Callable[..., Harness], tmp_path: Path, distributed: bool
) -> None:
    made = harness(
        training={"steps": 8, "stop_after": 4, "micro_batch_size": 1},
        checkpoint={"interval": 4},
        job={"ntasks_per_node": RANKS},
        parallel={"use_distributed_optimizer": distributed},
    )
    made.train()
    info = read_metadata(made.run.checkpoint(4)).storage_data.values()
    blocks = {(each.relative_path, each.offset): each.length for each in info}
    total, largest = sum(blocks.values()), max(blocks.values())
    runs = {}
    for divided in (False, True):
        shutil.copytree(made.run.path, tmp_path / str(divided))
        runs[divided] = Harness(Run(tmp_path / str(divided)), dict(made.config))
        runs[divided].config["training"] = made.config["training"] | {"stop_after": None}
        runs[divided].config["checkpoint"] = {"interval": 4, "fully_parallel_load": divided}
        runs[divided].train()
    plain, (read, needed) = bytes_of_a_rank(runs[False]), bytes_of_a_rank(runs[True])
    print(f"{total:,} bytes of blocks, the largest {largest:,}: a rank reads {plain[0]:,} plainly, {read:,} divided")
    assert plain == (needed, needed)
    assert read <= 1.5 * total / RANKS + largest
    assert distributed or read < needed / 2
    steps = {divided: run.attempts[-1].steps() for divided, run in runs.items()}
    assert sorted(steps[True]) == [5, 6, 7, 8]
    for number, step in steps[True].items():
        for name in ("loss", "grad_norm"):
            assert step[name] == steps[False][number][name], (number, name)
    assert_same_bytes(runs[True].run.checkpoint(8), runs[False].run.checkpoint(8))
