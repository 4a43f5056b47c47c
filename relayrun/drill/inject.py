"""Faults inside the ranks, for drills: stands before the training program as a command prefix.

    python -m relayrun.drill.inject FAULT[,FAULT...] -- PYTHON -m relayrun.training ARG...

| fault | what it does |
|---|---|
| step-delay=S | every step takes S seconds longer |
| crash-at=I | an exception at iteration I, on every rank, in the first attempt |
| crash-at-once | an exception before the first step, in every attempt |
| sleep-at=I:R | rank R sleeps for ever at iteration I of the first attempt, while the others wait in a collective |
| publish-delay=S | S seconds between the last byte of a checkpoint and its publication, in the first attempt |
| slow-save=I:S | the save at iteration I takes S seconds longer |
| nan-sample=K | the loss of every global batch that holds sample K is no number on the last rank |
| spike-sample=K:F | there it is F times as high on all ranks |

The training program knows nothing of this.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any


def main() -> None:
    faults = dict(fault.partition("=")[::2] for fault in sys.argv[1].split(",") if fault)
    module = sys.argv.index("-m") + 1
    sys.argv = [sys.argv[module], *sys.argv[module + 1 :]]
    first = sys.argv[-1] == "--attempt=1"
    install(faults, first_attempt=first, rank=int(os.environ["RANK"]))
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


def install(faults: Mapping[str, str], *, first_attempt: bool, rank: int) -> None:
    """Put the faults in place. Raises ValueError for one that is not in the table."""
    from relayrun.training import loop
    from relayrun.training.checkpoint import publish
    from relayrun.training.model import gpt

    step = loop.Training._step
    preparation, publication = publish.prepare, publish.publish
    sample_loss = gpt._loss
    factor = [1.0]  # of the losses of this iteration

    def faulty_step(self: Any) -> bool:
        at = self.position.iteration
        time.sleep(float(faults.get("step-delay", 0)))
        if "crash-at-once" in faults or (first_attempt and faults.get("crash-at") == str(at)):
            raise RuntimeError("a fault that the drill put here")
        if first_attempt and faults.get("sleep-at") == f"{at}:{rank}":
            time.sleep(10_000)
        batch = range(self.position.consumed_samples, self.position.consumed_samples + self.position.batch_size)
        factor[0] = 1.0
        if rank == self.ranks.world_size - 1 and int(faults.get("nan-sample", -1)) in batch:
            factor[0] = float("nan")
        sample, _, times = faults.get("spike-sample", "-1").partition(":")
        if int(sample) in batch:
            factor[0] = float(times)
        done: bool = step(self)
        return done

    def faulty_loss(loss: Any, **settings: Any) -> Any:
        return sample_loss(loss * factor[0], **settings)

    def faulty_preparation(run: Any, attempt: int, iteration: int) -> Any:
        at, _, seconds = faults.get("slow-save", "").partition(":")
        if at == str(iteration):
            time.sleep(float(seconds))
        return preparation(run, attempt, iteration)

    def faulty_publication(*arguments: Any) -> None:
        if first_attempt:
            time.sleep(float(faults.get("publish-delay", 0)))
        publication(*arguments)

    known = {
        "step-delay",
        "crash-at",
        "crash-at-once",
        "sleep-at",
        "publish-delay",
        "slow-save",
        "nan-sample",
        "spike-sample",
    }
    if unknown := faults.keys() - known:
        raise ValueError(f"unknown faults: {', '.join(sorted(unknown))}")
    _replace(loop.Training, "_step", faulty_step)
    _replace(gpt, "_loss", faulty_loss)
    _replace(publish, "prepare", faulty_preparation)
    _replace(publish, "publish", faulty_publication)


def _replace(owner: object, name: str, value: Callable[..., Any]) -> None:
    setattr(owner, name, value)


if __name__ == "__main__":
    main()
