"""Faults that tests plant in a check: hooks of its training runs, and parts of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures
from relayrun.train.hooks import Hook, HookContext, Step


class FlipsABit(Hook):
    """A resume, or a later restart, that is not exact: afterwards one bit of one moment of Adam is another."""

    def setup(self, context: HookContext) -> None:
        self._optimizer = context.optimizer

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        import torch  # not above: the parts below start without it

        if not iteration:
            return
        adam = self._optimizer.inner.chained_optimizers[0].optimizer
        moment = adam.state[adam.param_groups[0]["params"][0]]["exp_avg"]
        flat = moment.view(-1).view(torch.int32)
        flat[flat.nonzero()[0]] ^= 1


class LeavesItsJob(Hook):
    """Restarts that are of no use: the ranks leave their job, as if it were over, and the next one goes on."""

    def setup(self, context: HookContext) -> None:
        self._leaves = context.attempt == 1 and context.config.chain.recovery == "node"

    def after_step(self, step: Step) -> None:
        if self._leaves and step.iteration == 3:
            os.kill(os.getpid(), signal.SIGUSR2)


class HoldsUpSaves(Hook):
    """A save that holds training for much longer than a copy takes, but for the first one of an attempt."""

    def __init__(self, seconds: float) -> None:
        self._seconds, self._saves = seconds, 0

    def state_dict(self) -> dict[str, Any]:
        self._saves += 1
        if self._saves > 2:  # once it is asked what it would save, before anything is saved
            time.sleep(self._seconds)
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


class HoldsUpSavesTenSeconds(HoldsUpSaves):
    def __init__(self) -> None:
        super().__init__(10.0)


def measures(setup: CheckSetup, figures: PartFigures) -> None:
    figures.add("found", setup.device)


def raises(setup: CheckSetup, figures: PartFigures) -> None:
    figures.add("before", 1)
    raise CheckFailed("planted by a test", where="here")


def breaks(setup: CheckSetup, figures: PartFigures) -> None:
    raise ZeroDivisionError("a defect, planted by a test")


def dies(setup: CheckSetup, figures: PartFigures) -> None:
    os.abort()


def hangs(setup: CheckSetup, figures: PartFigures) -> None:
    """For ever, with a process in a session of its own, as jobs of the local scheduler are."""
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"], start_new_session=True)
    figures.add("sleeper", sleeper.pid)
    print("now it hangs", flush=True)
    time.sleep(10_000)
