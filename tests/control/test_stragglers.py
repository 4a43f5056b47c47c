"""Which rank is slower than its peers: what is compared, and where people see it."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from relayrun.control.rundir.node_health import STRAGGLER_RATIO, Straggler, slowest_rank
from relayrun.train.reporting.trackers import MetricPoint

USUAL = [0.001, 0.100, 0.010, 0.002]
FOUND = Straggler(rank=3, node="n1", section="forward", ratio=1.42, seconds=0.05)


@pytest.mark.parametrize(
    ("place", "seconds", "section", "ratio"),
    [
        (0, 0.040, "data", 1.345),
        (1, 0.200, "forward", 1.885),
        (2, 0.050, "optimizer", 1.354),
        (3, 0.100, "save", 1.867),
    ],
)
def test_the_slow_rank_and_its_section(place: int, seconds: float, section: str, ratio: float) -> None:
    slow = list(USUAL)
    slow[place] = seconds
    rank, found, where, more = slowest_rank([USUAL, USUAL, slow, USUAL])
    assert (rank, where) == (2, section)
    assert found == pytest.approx(ratio, abs=1e-3)
    assert found >= STRAGGLER_RATIO
    assert more == pytest.approx(seconds - USUAL[place])


def test_ranks_that_are_alike_are_no_stragglers() -> None:
    assert slowest_rank([USUAL, USUAL])[1] == 1.0
    a_little = [1.2 * seconds for seconds in USUAL]
    assert slowest_rank([USUAL, a_little, USUAL])[1] == pytest.approx(1.2)
    ten_times_of_little = [0.010, *USUAL[1:]]  # a hundredth of a second in a section that hardly counts
    assert slowest_rank([USUAL, ten_times_of_little, USUAL])[1] < STRAGGLER_RATIO
    assert slowest_rank([[0.0] * 4, [0.0] * 4])[1] == 1.0


def test_two_slow_ranks_of_eight_are_compared_with_the_others() -> None:
    slow = [2 * seconds for seconds in USUAL]
    rank, ratio, _, _ = slowest_rank([USUAL] * 3 + [slow, slow] + [USUAL] * 3)
    assert (rank, ratio) == (3, pytest.approx(2.0))


def test_a_straggler_is_told_in_one_line() -> None:
    assert FOUND.words == "rank 3 on n1 takes 1.42 times as long as its peers, 50 ms a step more in forward"
    assert Straggler.of(asdict(FOUND)) == FOUND


def test_trackers_have_the_ratio() -> None:
    point = MetricPoint(20)
    point.add({"iteration": 20, "slowest_rank_ratio": 1.42, "straggler": asdict(FOUND)})
    assert point.values == {"speed/slowest_rank_ratio": 1.42}
