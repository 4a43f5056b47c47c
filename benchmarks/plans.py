"""Plans of a save with 1,024 writers, and of a load, without 1,024 processes: CPU seconds, and how they grow.

    python benchmarks/plans.py [--writers 128 256 512 1024] [--tensors 8] [--quick]

The steps of `checkpoint.megatron_strategy` up to the write, one rank after the other in this process: each rank makes
the plan of its shards and packs it into a message; rank 0 unpacks the messages and joins the plans, with all metadata.
Every rank has a shard of each of so many tensors, as of an optimizer whose state is divided by all. `growth` is the
exponent by which a figure grows from the second largest to the largest number of writers: 1 is linear, 2 is squared.

A load by twice as many ranks, so that two need each block: what each rank does alone (it parses the metadata, plans its
reads, and divides the blocks of all).
"""

from __future__ import annotations

import argparse
import math
import pickle
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import _results  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core.dist_checkpointing.mapping import ShardedTensor  # noqa: E402
from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: E402
from torch.distributed.checkpoint.metadata import (  # noqa: E402
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

from relayrun.train.checkpoint.megatron_strategy import InProcessStrategy  # noqa: E402
from relayrun.train.checkpoint.parallel_load import BlockLocation, assign_reads  # noqa: E402
from relayrun.train.checkpoint.reader import parse_metadata  # noqa: E402
from relayrun.train.messages import RankObjectCollectives, pack, unpack  # noqa: E402

ROWS = 4
"""Rows of a shard."""
ROUNDS = 3


class Planned(Exception):
    """A rank has got as far as it goes here."""


class OneRank:
    """The messages of one rank: its plan is kept, and rank 0 gets all of them."""

    def __init__(self, rank: int, packed: list[bytes]) -> None:
        self.rank, self.packed = rank, packed
        self.seconds: dict[str, float] = {}
        self._since = time.process_time()

    def _lap(self, name: str) -> None:
        now = time.process_time()
        self.seconds[name], self._since = now - self._since, now

    def gather(self, value: Any) -> list[Any]:
        self._lap("own")
        message = pack(value)
        self._lap("pack")
        if self.rank:
            self.packed.append(message)
            raise Planned
        everywhere = [value, *map(unpack, self.packed)]
        self._lap("unpack")
        return everywhere

    def scatter(self, answers: list[Any]) -> None:
        self._lap("join")
        self.seconds["answers"] = 0.0
        for answer in answers:
            pack(answer)
        self._lap("answers")
        raise Planned


def plan(writers: int, tensors: int, folder: str) -> dict[str, float]:
    """CPU seconds of a rank (`own`, `pack`) and of rank 0, and bytes of the messages."""
    packed: list[bytes] = []
    own: list[float] = []
    for rank in [*range(1, writers), 0]:
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=writers)
        data = torch.zeros(ROWS, 8)
        shards = {
            f"tensor.{number}": ShardedTensor.from_rank_offsets(f"tensor.{number}", data, (0, rank, writers))
            for number in range(tensors)
        }
        messages = OneRank(rank, packed)
        strategy = InProcessStrategy(cast(RankObjectCollectives, messages))
        try:
            strategy.write(strategy.by_key(shards), folder)
        except Planned:
            own.append(messages.seconds["own"] + messages.seconds["pack"])
        dist.destroy_process_group()
    return {
        "a_rank": sorted(own)[len(own) // 2],
        "unpack": messages.seconds["unpack"],
        "join": messages.seconds["join"],
        "answers": messages.seconds["answers"],
        "bytes_of_a_message": sum(map(len, packed)) / len(packed),
    }


def load(writers: int, tensors: int, folder: str) -> dict[str, float]:
    """CPU seconds of a rank that loads what so many writers saved, in another layout."""
    chunks = [ChunkStorageMetadata(torch.Size((ROWS * rank, 0)), torch.Size((ROWS, 8))) for rank in range(writers)]
    size, properties = torch.Size((ROWS * writers, 8)), TensorProperties(torch.float32)
    names = [f"tensor.{number}" for number in range(tensors)]
    stored = {
        MetadataIndex(name, chunk.offsets, index): _StorageInfo(f"__{index}_0.distcp", number * 256, 256)
        for number, name in enumerate(names)
        for index, chunk in enumerate(chunks)
    }
    saved = {name: TensorStorageMetadata(properties, size, chunks) for name in names}
    text = pickle.dumps(Metadata(state_dict_metadata=dict(saved), storage_data=stored))
    seconds, since = {}, time.process_time()
    metadata = parse_metadata(text, Path(folder))
    seconds["load_metadata"], since = time.process_time() - since, time.process_time()
    half = ChunkStorageMetadata(torch.Size((ROWS, 0)), torch.Size((ROWS // 2, 8)))
    for name in names:
        create_read_items_for_chunk_list(name, cast(Any, metadata.state_dict_metadata[name]), [half])
    seconds["load_plan"] = time.process_time() - since
    blocks = [
        [BlockLocation(f"__{index}_0.distcp", number * 256, 256) for number in range(tensors)]
        for index in range(writers)
    ]
    since = time.process_time()
    assign_reads([blocks[rank // 2] for rank in range(2 * writers)])
    return seconds | {"load_division": time.process_time() - since}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, nargs="+", default=[128, 256, 512, 1024])
    parser.add_argument("--tensors", type=int, default=64, help="each divided by all ranks; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="16 and 32 writers; writes no result")
    options = parser.parse_args()
    writers = [16, 32] if options.quick else options.writers
    torch.set_num_threads(1)
    by_writers: dict[str, dict[str, float]] = {}
    for number in writers:
        turns = []
        for _ in range(1 if options.quick else ROUNDS):
            with tempfile.TemporaryDirectory(prefix="plans-") as folder:
                turns.append(plan(number, options.tensors, folder) | load(number, options.tensors, folder))
        by_writers[str(number)] = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
        print(number, by_writers[str(number)], flush=True)
    before, last = (by_writers[str(number)] for number in writers[-2:])
    steps = math.log2(writers[-1] / writers[-2])
    growth = {name: math.log2(last[name] / before[name]) / steps for name in last}
    figures = {"writers": by_writers, "largest": last | {"writers": writers[-1]}, "growth": growth}
    figures["tensors"] = options.tensors
    print(growth if options.quick else _results.write("plans", figures))


if __name__ == "__main__":
    main()
