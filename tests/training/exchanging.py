"""Run by test_divided_load.py: ranks over gloo, forked here, exchange blocks and messages; each writes what it met.

exchanging.py FOLDER
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from relayrun.train.checkpoint.checksums import DamagedCheckpoint
from relayrun.train.checkpoint.parallel_load import BlockExchange, BlockLocation, assign_reads
from relayrun.train.messages import RankObjectCollectives, send_no_pickles

RANKS = 4
FOLDER = Path(sys.argv[1])


def blocks() -> list[BlockLocation]:
    """60 blocks of random sizes, one of which is a third of all."""
    generator = random.Random(5)
    sizes = [generator.randrange(1, 9000) for _ in range(60)]
    sizes[11] = sum(sizes) // 2
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [BlockLocation("data", start, size) for start, size in zip(starts, sizes, strict=True)]


def wanted(rank: int) -> list[BlockLocation]:
    """All ranks want the first ones, two of them others, and each has some of its own."""
    every = blocks()
    return every[:40] + (every[40:48] if rank in (1, 3) else []) + every[48 + 3 * rank : 51 + 3 * rank]


def content(place: BlockLocation) -> bytearray:
    with (FOLDER / "data").open("rb") as file:
        file.seek(place.at)
        return bytearray(file.read(place.bytes))


def exchange(
    rank: int,
    read: Callable[[BlockLocation], bytearray] = content,
    put: Callable[[BlockLocation, bytearray], None] = lambda place, data: None,
) -> dict[str, Any]:
    """What this rank read and got, or what it met."""
    has_read: list[int] = []
    got: dict[BlockLocation, str] = {}

    def counted(place: BlockLocation) -> bytearray:
        has_read.append(place.bytes)
        return read(place)

    def kept(place: BlockLocation, data: bytearray) -> None:
        put(place, data)
        assert place not in got
        got[place] = xxhash.xxh3_128_hexdigest(data)

    found = BlockExchange(dist.group.WORLD, torch.device("cpu"), batch_bytes=20_000, message_bytes=4096)
    try:
        found.blocks(wanted(rank), counted, kept)
    except Exception as error:
        return {"met": [type(error).__name__, str(error)], "got": len(got)}
    right = {place: xxhash.xxh3_128_hexdigest(content(place)) for place in wanted(rank)}
    return {"read": sum(has_read), "right": got == right}


def damaged(rank: int) -> dict[str, Any]:
    """The third block of rank 2 is not what was saved; only who reads it sees that."""
    place = assign_reads([wanted(rank) for rank in range(RANKS)]).shared[2][2]

    def read(asked: BlockLocation) -> bytearray:
        if asked == place:
            raise DamagedCheckpoint(f"read by rank {rank}", where=FOLDER)
        return content(asked)

    return exchange(rank, read)


class Stubborn(Exception):
    """An error that cannot be sent."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)
        self.lock = threading.Lock()


def not_unpacked(rank: int) -> dict[str, Any]:
    """Rank 1 cannot unpack a block that all of them have."""

    def put(place: BlockLocation, data: bytearray) -> None:
        if rank == 1 and place == blocks()[20]:
            raise Stubborn("not ", "unpacked")

    return exchange(rank, put=put)


def lost(rank: int) -> dict[str, Any]:
    """Rank 0 does not know what it wants."""
    found = BlockExchange(dist.group.WORLD, torch.device("cpu"))
    try:
        found.blocks(wanted(rank), content, lambda place, data: None, met=KeyError("index") if rank == 0 else None)
    except Exception as error:
        return {"met": [type(error).__name__, str(error)]}
    return {}


def alone(rank: int) -> dict[str, Any]:
    """Rank 3 cannot read what it alone wants: the others have all that they want."""

    def read(place: BlockLocation) -> bytearray:
        if place == blocks()[48 + 9]:
            raise DamagedCheckpoint("its own", where=FOLDER)
        return content(place)

    return exchange(rank, read)


def messages(rank: int) -> dict[str, Any]:
    """A thread that sends messages, beside collectives of the same group in the main thread."""
    talk = RankObjectCollectives(dist.group.WORLD, tag=1)
    heard: list[Any] = []

    def send() -> None:
        heard.extend(talk.all_gather((rank, number, "x" * (number * 37 % 5000))) for number in range(100))
        heard.append(talk.scatter([f"for {each}" for each in range(RANKS)] if rank == 0 else None))
        heard.append(talk.broadcast("from 0" if rank == 0 else None))
        heard.append(talk.gather(rank))

    thread = threading.Thread(target=send)
    thread.start()
    sums = []
    for number in range(300):
        tensor = torch.tensor([rank + number])
        dist.all_reduce(tensor)
        sums.append(int(tensor))
    thread.join(300)
    rounds = [[(each, number, "x" * (number * 37 % 5000)) for each in range(RANKS)] for number in range(100)]
    return {
        "all_gather": heard[:100] == rounds,
        "rest": heard[100:],
        "sums": sums == [sum(range(RANKS)) + RANKS * number for number in range(300)],
    }


def main(rank: int) -> None:
    send_no_pickles()
    dist.init_process_group("gloo", init_method=f"file://{FOLDER}/store", rank=rank, world_size=RANKS)
    cases = {
        "whole": exchange,
        "damaged": damaged,
        "not unpacked": not_unpacked,
        "lost": lost,
        "alone": alone,
        "messages": messages,
    }
    results = {}
    for name, case in cases.items():
        results[name] = case(rank)
        dist.barrier()
    (FOLDER / f"rank-{rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    children = []
    for number in range(RANKS):
        if child := os.fork():
            children.append(child)
            continue
        try:
            main(number)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os._exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
