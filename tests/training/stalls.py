"""A hook that lets one rank stand still in saves and in reads of data, for as long as a file system may.

    {hook: "tests.training.stalls:Stalls", options: {reads: {"30:1": 2.5}, saves: {"50": 4.0}, scale: 10}}

`reads`: seconds by ITERATION:RANK; `saves`: by iteration. The least limits of sections are divided by `scale`.
"""

from __future__ import annotations

import time
from pathlib import Path

from relayrun.train.hooks import Hook, HookContext, StepStart
from relayrun.train.reporting import liveness


class Stalls(Hook):
    def __init__(self, reads: dict[str, float], saves: dict[str, float], scale: float = 1.0) -> None:
        self._reads, self._saves = reads, saves
        liveness.SHORTEST_STEP_LIMIT /= scale
        liveness.SHORTEST_OTHER_LIMIT /= scale
        self._now = ""

    def setup(self, context: HookContext) -> None:
        self._rank = context.ranks.rank
        from relayrun.tokens.order.batches import BatchReader

        read = BatchReader.__next__

        def stalled(reader: BatchReader) -> object:
            time.sleep(self._reads.get(self._now, 0.0))
            return read(reader)

        BatchReader.__next__ = stalled  # type: ignore[method-assign, assignment]

    def before_step(self, start: StepStart) -> None:
        self._now = f"{start.iteration}:{self._rank}"

    def before_publish(self, iteration: int, folder: Path) -> None:
        time.sleep(self._saves.get(str(iteration), 0.0))
