"""Which rank reads which blocks: each once, none much more than its share."""

from __future__ import annotations

import random
import time

import pytest

from relayrun.train.checkpoint.parallel_load import BlockLocation, assign_reads, size_batches


def wanted_by(ranks: int, seed: int) -> list[list[BlockLocation]]:
    """Blocks that all want, some want and one wants; one is as large as many others."""
    generator = random.Random(seed)
    sizes = [generator.choice([0, 1, 900, generator.randrange(50_000)]) for _ in range(60)]
    sizes[17] = sum(sizes) // 2
    places = [BlockLocation(f"__{number % 3}_0.distcp", number << 20, size) for number, size in enumerate(sizes)]
    wanted: list[list[BlockLocation]] = [[] for _ in range(ranks)]
    for number, place in enumerate(places):
        takers = range(ranks) if number % 3 else generator.sample(range(ranks), generator.randrange(1, ranks + 1))
        for rank in takers:
            wanted[rank].append(place)
    return wanted


@pytest.mark.parametrize("ranks", [1, 2, 4, 7, 64])
def test_each_block_is_read_once_and_nobody_reads_more_than_its_share_and_the_largest(ranks: int) -> None:
    for seed in range(10):
        wanted = wanted_by(ranks, seed)
        division = assign_reads(wanted)
        shared = [place for places in division.shared for place in places]
        alone = [place for places in division.alone for place in places]
        assert sorted(shared + alone) == sorted({place for places in wanted for place in places})
        for rank, places in enumerate(division.alone):
            assert all(place in wanted[rank] for place in places)
            assert all(sum(place in other for other in wanted) == 1 for place in places)
        reads = [
            sum(place.bytes for place in (*mine, *own))
            for mine, own in zip(division.shared, division.alone, strict=True)
        ]
        own = max(sum(place.bytes for place in places) for places in division.alone)
        share, largest = sum(reads) / ranks, max(place.bytes for places in wanted for place in places)
        assert max(reads) <= max(own, share + largest)


def test_the_division_of_another_layouts_checkpoint_grows_with_its_blocks_alone() -> None:
    """Blocks of as many writers, each of which two ranks need: with four times the ranks there are four times the
    blocks, and a look at every rank for each block would take sixteen times as long."""

    def seconds(ranks: int) -> float:
        places = [[BlockLocation(f"__{rank}_0.distcp", at, 900 + at) for at in range(16)] for rank in range(ranks)]
        wanted = [[*places[rank], *places[rank - 1]] for rank in range(ranks)]
        since = time.process_time()
        division = assign_reads(wanted)
        spent = time.process_time() - since
        assert sum(map(len, division.shared)) == 16 * ranks
        return spent

    assert min(seconds(1024) for _ in range(7)) < 10 * min(seconds(256) for _ in range(7))


def test_the_order_in_which_ranks_name_blocks_changes_nothing() -> None:
    wanted = wanted_by(5, 1)
    assert assign_reads([places[::-1] for places in wanted]) == assign_reads(wanted)


def test_a_round_is_as_large_as_it_may_be_or_one_block() -> None:
    places = [BlockLocation("a", at, size) for at, size in enumerate([3, 4, 5, 100, 1, 0, 9])]
    found = size_batches(places, 10, lambda place: place.bytes)
    assert [[place.bytes for place in part] for part in found] == [[3, 4], [5], [100], [1, 0, 9]]
    assert size_batches([], 10, len) == []
