"""Run by test_sockets.py: so many ranks over gloo, forked here, do nothing but the set-up, and count their sockets.

sockets.py RANKS GROUPS FOLDER
"""

from __future__ import annotations

import os
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from relayrun.train.messages import RankObjectCollectives

LIMIT = timedelta(minutes=5)


def sockets() -> int:
    """Open sockets of this process."""
    links = []
    for entry in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{entry}"))
        except FileNotFoundError:  # that of the list itself
            continue
    return sum(link.startswith("socket:") for link in links)


def main(rank: int, ranks: int, groups: int, folder: Path) -> None:
    before = sockets()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), ranks, rank == 0, LIMIT, multi_tenant=True)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    if groups == 2:
        second = dist.new_group(backend="gloo", timeout=LIMIT)
        dist.barrier(second)
    else:
        assert RankObjectCollectives(dist.group.WORLD, tag=1).all_gather(rank) == [*range(ranks)]
    dist.barrier()
    (folder / f"{groups}-{rank}").write_text(str(sockets() - before))
    dist.barrier()


if __name__ == "__main__":
    ranks, groups, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    children = []
    for number in range(ranks):
        if child := os.fork():
            children.append(child)
            continue
        try:
            main(number, ranks, groups, folder)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    os._exit(max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children))
