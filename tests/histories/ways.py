"""What each way to go on after a failure is worth: the histories that break a law without it.

`python -m tests.histories.ways FIRST LAST [WAY ...]` plays the histories with one way switched off at a time. Random
ones seldom meet the hole that the guard or the second try closes: these have histories of their own (`DIRECTED`).
Orphaned agents are no part of these histories: `tests.chain.test_orphaned`, `tests.slurm.test_nodes_apart_slurm`.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any
from unittest import mock

from relayrun.control.chain import jobs, supervisor
from relayrun.control.chain.watch import Watch

from .nodes import ChainWork
from .story import History, KilledScript, PassingLimit, play

look_after_successor = Watch._look_after_successor


def without_retry(watch: Watch) -> None:
    """Look at a successor that is queued, and queue none."""
    if not watch.attempt.retry_successor.exists():
        look_after_successor(watch)


WAYS: dict[str, tuple[Any, str, Any]] = {
    "successor": (supervisor, "_queue_successor", lambda *_: False),
    "retry": (Watch, "_look_after_successor", without_retry),
    "guard": (Watch, "_guard", lambda *_: None),
    "again": (ChainWork, "_again", lambda *_: 1),
    "fallback": (jobs, "queue_fallback_job", lambda *_, **__: None),
}
"""By name: the function that is replaced, and what stands in for it."""


DIRECTED: dict[str, type[History]] = {"guard": KilledScript, "retry": PassingLimit}
"""Histories that meet the hole which a way closes."""


def main() -> int:
    """Print for each way how many histories break which law without it, and the first ones."""
    first, last = int(sys.argv[1]), int(sys.argv[2])
    for way in sys.argv[3:] or WAYS:
        laws: Counter[str] = Counter()
        seeds: list[int] = []
        with mock.patch.object(*WAYS[way]):
            for seed in range(first, last):
                if broken := play(seed, DIRECTED.get(way, History)).broken:
                    laws[broken[0].partition(":")[0]] += 1
                    seeds.append(seed)
        print(f"without {way}: {len(seeds)} of {last - first} break: {dict(laws)}; {seeds[:12]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
