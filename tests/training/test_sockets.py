"""A rank has one socket to each other one: agreements and saves share a group."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from relayrun.control.scheduler.local_srun import free_port
from tests import warm

RANKS = 24


def counted(folder: Path, groups: int) -> list[int]:
    program = Path(__file__).with_name("sockets.py")
    os.environ["MASTER_PORT"] = str(free_port())
    done = warm.run([sys.executable, program, str(RANKS), str(groups), folder])
    assert done.returncode == 0, done.stderr
    return [int((folder / f"{groups}-{rank}").read_text()) for rank in range(RANKS)]


@pytest.mark.long
def test_sockets_of_a_rank_are_as_many_as_other_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "0")
    one, two = counted(tmp_path, 1), counted(tmp_path, 2)
    for rank, pair in enumerate(zip(one, two, strict=True)):
        print(f"rank {rank} of {RANKS}: {pair[0]} sockets, with two groups {pair[1]}")
    extra = max(one[1:]) - (RANKS - 1)  # the store, and where others connect: as many whatever the number of ranks
    assert extra < 8
    assert max(two[1:]) - max(one[1:]) >= RANKS - 1
    assert one[0] <= 2 * (RANKS - 1) + extra + 8
