"""A rank that is slower than its peers, as a line of the metrics says it. Standard library only."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from relayrun.control.rundir.records import Record

STRAGGLER_WINDOW = 20
"""Steps over which ranks are compared."""
STRAGGLER_SECTIONS = ("data", "forward", "optimizer", "save")
STRAGGLER_RATIO = 1.3
"""A rank that takes this many times as long as its peers is a straggler."""


@dataclass(frozen=True, kw_only=True)
class Straggler(Record):
    """`straggler` in a line of metrics.jsonl: the slow rank of the newest WINDOW steps that were compared."""

    rank: int
    node: str
    section: str
    """In which it loses most: `data`, `forward` (both passes), `optimizer` or `save`."""
    ratio: float
    """Its own time over the median of its peers', all sections together; waits for others are nobody's own time."""
    seconds: float
    """That a step of this rank takes longer in this section than a step of its peers."""

    @property
    def words(self) -> str:
        """One line for people."""
        return (
            f"rank {self.rank} on {self.node} takes {self.ratio:.2f} times as long as its peers, "
            f"{1000 * self.seconds:.0f} ms a step more in {self.section}"
        )


def slowest_rank(seconds: Sequence[Sequence[float]]) -> tuple[int, float, str, float]:
    """The slowest rank, its time over the median of the others', the section in which it loses most, and how much.

    `seconds`: of each rank, by SECTIONS. There are at least two ranks.
    """
    totals = [sum(own) for own in seconds]
    rank = max(range(len(totals)), key=totals.__getitem__)
    others = [own for other, own in enumerate(seconds) if other != rank]
    usual = statistics.median(sum(own) for own in others)
    more = [own - statistics.median(other[place] for other in others) for place, own in enumerate(seconds[rank])]
    most = max(range(len(STRAGGLER_SECTIONS)), key=more.__getitem__)
    return rank, totals[rank] / usual if usual else 1.0, STRAGGLER_SECTIONS[most], more[most]
