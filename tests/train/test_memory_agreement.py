"""At every moment one iteration is whole in memory everywhere, with or without the loss of a node.

Two ranks on a node each copy their states, one of them slowly; after each change of a slot, which a kill may follow at
once, the copies that are left must have a whole set.
"""

from __future__ import annotations

import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relayrun.control.agent.memory_copies import MemorySlot, newest_complete_copy, read_copies
from relayrun.tokens.order.batches import TrainingProgress

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch's own
    from relayrun.train.checkpoint.memory_replication import MemoryCopy, NeighbourReplica
    from relayrun.train.checkpoint.memory_tier import MemoryTier
    from relayrun.train.distributed import Ranks

COPIES = 12
INTERVAL = 2


class World:
    """Two ranks, whose collectives are a barrier."""

    def __init__(self) -> None:
        self.flags: dict[int, list[int]] = {}
        self._barrier = threading.Barrier(2, timeout=300)

    def maximum(self, rank: int, flags: list[int]) -> list[int]:
        self.flags[rank] = flags
        self._barrier.wait()
        found = [max(pair) for pair in zip(*self.flags.values(), strict=True)]
        self._barrier.wait()
        return found


def write(slot: MemorySlot, rank: int, iteration: int, *, pause: float) -> None:
    slot.reserve(10)
    slot.void()
    time.sleep(pause)
    slot.commit(rank=rank, iteration=iteration, hash=f"{rank}.{iteration}")


def older(slots: list[MemorySlot]) -> MemorySlot:
    return min(slots, key=lambda slot: (slot.header() or {"iteration": -1})["iteration"])


def newest_of(folders: list[Path]) -> int:
    return max((copy.iteration for folder in folders for copy in read_copies(folder)), default=0)


class Ring(NeighbourReplica):
    """Lays the copy of one rank into the memory of the other's node, without messages."""

    def __init__(self, folder: Path, rank: int, *, pause: float) -> None:
        self._slots = [MemorySlot(folder, rank, number, kept=True) for number in range(2)]  # on the other node
        self._thread = None
        self._rank, self._pause = rank, pause

    def _run(self, copy: MemoryCopy) -> None:
        time.sleep(self._pause)
        write(older(list(self._slots)), self._rank, copy.header["iteration"], pause=self._pause)


class Tier(MemoryTier):
    """The copies of a rank whose state is its iteration."""

    def __init__(self, world: World, folders: list[Path], rank: int, *, ring: bool, pause: float) -> None:
        alike = SimpleNamespace(rank=rank, world_size=2, maximum=lambda flags: world.maximum(rank, flags))
        self._ranks = cast(Ranks, alike)
        self._checkpointer = cast(Any, SimpleNamespace(state=lambda position: position))
        self._slots = [MemorySlot(folders[rank], rank, number) for number in range(2)]
        self._neighbour = Ring(folders[1 - rank], rank, pause=pause) if ring else None
        self._on, self._pause = True, pause
        self.synced: list[int] = []
        """The newest iteration of all copies, each time that the record was synced."""
        self._metrics = cast(Any, SimpleNamespace(sync=lambda: self.synced.append(newest_of(folders))))
        self._interval, self._newest = INTERVAL, 0

    def _write(self, iteration: int, state: Any) -> MemoryCopy:
        write(older(self._slots), self._ranks.rank, iteration, pause=self._pause)
        return MemoryCopy({"iteration": iteration}, cast(Any, None))


@pytest.mark.parametrize("ring", [False, True], ids=["own", "own-and-neighbours"])
@pytest.mark.parametrize("slow", [0, 1])
def test_a_kill_at_any_point_leaves_a_whole_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ring: bool, slow: int
) -> None:
    folders = [tmp_path / "n0", tmp_path / "n1"]
    for folder in folders:
        folder.mkdir()
    world, changing, reached, found = World(), threading.Lock(), [0, 0], []

    def look(words: str) -> None:
        """What a kill here would leave: to both nodes, and to each alone where the other is lost with its memory."""
        at = min(reached)
        for lost, left in ((None, folders), (0, folders[1:]), (1, folders[:1])):
            if lost is not None and not ring:
                continue
            whole = newest_complete_copy([copy for folder in left for copy in read_copies(folder)], ranks=2, after=0)
            steps = at - (0 if whole is None else whole[0])
            most = INTERVAL if lost is None else 2 * INTERVAL  # the newest may be on its way to the other node
            if at > (INTERVAL if lost is None else 2 * INTERVAL) and (whole is None or steps > most):
                found.append(f"{words}, node {lost} lost at iteration {at}: {whole}")

    for name in ("void", "commit"):
        real = getattr(MemorySlot, name)

        def changed(slot: MemorySlot, *, name: str = name, real: Any = real, **values: Any) -> None:
            with changing:
                real(slot, **values)
                look(f"{slot.path.name} {name}")

        monkeypatch.setattr(MemorySlot, name, changed)
    tiers = [Tier(world, folders, rank, ring=ring, pause=0.02 if rank == slow else 0.0) for rank in (0, 1)]

    def train(rank: int) -> None:
        for iteration in range(INTERVAL, INTERVAL * COPIES + 1, INTERVAL):
            reached[rank] = iteration
            tiers[rank].save(cast(TrainingProgress, SimpleNamespace(iteration=iteration)))
        tiers[rank].finish()

    threads = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
        assert not thread.is_alive()
    assert not found, found[:4]
    before = list(range(0, INTERVAL * COPIES, INTERVAL))
    assert tiers[0].synced == (before if ring else []), "once a copy, before any rank has the next one"
    copies = [copy for folder in folders for copy in read_copies(folder)]
    assert newest_complete_copy(copies, ranks=2, after=0) == (INTERVAL * COPIES, "memory")


def test_multiples_of_the_interval_are_copied_and_those_after_a_rollback_again(tmp_path: Path) -> None:
    tier = Tier(World(), [tmp_path, tmp_path], 0, ring=False, pause=0.0)
    tier._ranks = cast(Any, SimpleNamespace(rank=0, world_size=1, maximum=lambda flags: flags))
    copied = []
    for iteration in (*range(4, 8), *range(3, 8)):
        if iteration == 4 and not copied:
            tier.start(iteration)
        if tier.due(iteration):
            copied.append(iteration)
            tier.save(cast(TrainingProgress, SimpleNamespace(iteration=iteration)))
    assert copied == [6, 4, 6]
