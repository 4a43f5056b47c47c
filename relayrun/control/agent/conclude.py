"""What comes of a round that has failed, when none of its ranks lives: its record, and where another one starts."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from relayrun.control.agent.between import ForeignRestart
from relayrun.control.agent.current_round import CurrentRestart
from relayrun.control.agent.memory_copies import newest_complete_copy
from relayrun.control.agent.places import NodeRanks
from relayrun.control.rundir import rounds
from relayrun.control.rundir.attempt import Attempt
from relayrun.control.rundir.lineage import ResumePoint
from relayrun.control.rundir.rounds import FailedRestart
from relayrun.control.rundir.run import Run


@dataclass(frozen=True, kw_only=True)
class RestartConclusion:
    """What is on record of a failed round, and what another one is given; whether there is one says the record."""

    failed: FailedRestart
    exit_code: int
    """That of the rank that failed first."""
    base: ResumePoint
    """The newest whole checkpoint."""
    memory: int | None
    """The iteration whose copies in memory are newer than that; None: there are none."""
    source: str
    """Where the state comes from: `disk`, `memory` or `neighbour`."""
    nodes: Sequence[int]
    """Those of another round, by place."""
    moved: Sequence[str]
    """What was moved away for it, in words."""


def conclude_restart(
    run: Run,
    attempt: Attempt,
    current: CurrentRestart,
    places: NodeRanks,
    *,
    there: Collection[int],
    name: Callable[[int], str],
    ranks_per_node: int,
    asked: str,
    max_failed_rounds: int,
    between: ForeignRestart | None,
) -> RestartConclusion:
    """Judge the round, put it on record, and make the records ready for another one. Raises OSError and RelayrunError.

    Args:
        there: nodes with an agent that is heard. name: of a node.
        asked: why the ranks were asked to leave; empty where they were not.
        between: the records of a foreign program; None: ranks write them themselves.
    """
    death = current.first_death(attempt)
    base = rounds.restart_checkpoint(run, attempt)
    ranks = len(places.nodes) * ranks_per_node
    memory, source = newest_complete_copy(current.copies(there), ranks=ranks, after=base.iteration) or (None, "disk")
    taken = places.taken(there)
    following = places.following(taken)
    if len(following) != len(places.nodes):
        memory, source = None, "disk"  # copies are of as many ranks as made them
    gone = places.gone()
    failed = current.judged(
        attempt,
        death,
        durable=base.iteration,
        start=base.iteration if memory is None else memory,
        source=source,
        lost={name(node): name(taken[node]) if node in taken else "" for node in gone},
        why_none="" if following else places.why_none(", ".join(name(node) for node in gone if node not in taken)),
        fewer=len(following) if len(following) < len(places.nodes) else 0,
        asked=asked,
        max_failed_rounds=max_failed_rounds,
        complete=between is not None and between.complete(base),
    )
    rounds.record_failed_restart(attempt, failed)
    moved: list[str] = []
    if failed.again:
        number = current.number + 1
        moved += [] if between is None else between.prepare(base, number=number)
        moved += rounds.prepare_restart(run, attempt, base, next_round=number, next_iteration=memory)
        if between is not None:
            between.go_on()
    return RestartConclusion(
        failed=failed,
        exit_code=death.exit_code,
        base=base,
        memory=memory,
        source=source,
        nodes=following,
        moved=moved,
    )


def record_too_few_nodes(
    attempt: Attempt, places: NodeRanks, *, there: Collection[int], name: Callable[[int], str], base: ResumePoint
) -> FailedRestart:
    """Put on record that no round can begin, since too few nodes are left, as round 0. Raises OSError.

    Nodes that never came count as lost, unless none came at all: then none of them is to blame.
    """
    gone = sorted(places.lost)
    words = {places.lost[node].error for node in gone}
    failed = FailedRestart(
        round=0,
        time=time.time(),
        rank=None,
        node=", ".join(name(node) for node in gone),
        words="; ".join(sorted(words)),
        iteration=base.iteration,
        base_iteration=base.iteration,
        durable_iteration=base.iteration,
        next_iteration=base.iteration,
        again=False,
        reason=f"{places.wanted} nodes are to train, and {len(there)} are left",
        lost={name(node): "" for node in gone if there and not places.lost[node].sick},
    )
    rounds.record_failed_restart(attempt, failed)
    return failed
