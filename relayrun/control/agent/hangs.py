"""Whether the ranks of a round hang, and for whom the others wait: judged by where they stand.

Ranks that wait for each other stand still together, so a hang is judged for all at once: the one that has come further
last is still for longer than the longest limit of any rank's section. A rank that reads data for a minute lets others
wait in a collective, whose own limit does not count then. Before the first step there is no limit, but for a rank whose
process does nothing at all.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from relayrun.control.agent.sections import UNLIMITED_SECTIONS, RankActivity
from relayrun.control.rundir import stacks as of_ranks
from relayrun.control.rundir.records import Hang

STACKS_SECONDS = 2.0
"""How long ranks that hang have to write their Python stacks."""


class HangDetector:
    """What agents say of where their ranks stand, in one round."""

    def __init__(self) -> None:
        self._nodes: dict[int, Sequence[RankActivity]] = {}
        self._asked: float | None = None
        """When ranks that hang were asked for their stacks."""

    def hear(self, node: int, standing: Iterable[Sequence[object]] | None) -> None:
        """Take the word of an agent; None: its ranks come further, or have not begun."""
        if standing is None:
            self._nodes.pop(node, None)
        else:
            self._nodes[node] = [RankActivity(*values) for values in standing]  # type: ignore[arg-type]

    def look(self, nodes: Iterable[int], *, ranks: int) -> tuple[Sequence[RankActivity] | None, bool]:
        """Where ranks stand that hang and have had the time to write their stacks; whether to ask for these now."""
        found = self.judge(nodes, ranks=ranks)
        if found is None:
            self._asked = None
        elif self._asked is None:
            self._asked = time.monotonic()
            return None, True
        elif time.monotonic() - self._asked > STACKS_SECONDS:
            return found, False
        return None, False

    def judge(self, nodes: Iterable[int], *, ranks: int) -> Sequence[RankActivity] | None:
        """Where all ranks stand if they hang; None where they do not. `nodes`: those that train."""
        found = sorted(standing for node in nodes for standing in self._nodes.get(node, ()))
        if len(found) != ranks:
            return None
        if any(one.section in UNLIMITED_SECTIONS and one.state and one.seconds >= one.limit for one in found):
            return found  # the others may wait for it as long as they like
        return found if min(one.seconds for one in found) > max(one.limit for one in found) else None


def hang_record(found: Sequence[RankActivity], stacks: Path) -> Hang:
    """The record of a hang; `stacks`: what ranks wrote when they were asked for theirs.

    Who is late: a rank whose process does nothing at all; else who has entered fewer sections than others; else whose
    stack is in no collective while others' are.
    """
    stopped = {one.rank: f"{one.section}, {one.state}" for one in found if one.state}
    most = max(one.entered for one in found)
    behind = {one.rank: one.section for one in found if one.entered < most}
    by_stack = of_ranks.late_ranks(stacks)
    late: Mapping[int, str] = stopped or {rank: by_stack.get(rank, section) for rank, section in behind.items()}
    late = late or by_stack
    first = next((one for one in found if one.rank in late), found[0])
    return Hang(
        iteration=max(one.iteration for one in found),
        phase=first.section,
        seconds=min(one.seconds for one in found),
        silent=sorted({one.rank for one in found} - of_ranks.ranks_with_stacks(stacks)),
        late={str(rank): place for rank, place in late.items()},
        time=time.time(),
    )
