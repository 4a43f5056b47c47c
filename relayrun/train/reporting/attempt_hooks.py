"""The hooks of one attempt on one rank: relayrun's own, in the order of their calls, then those of `training.hooks`.

`TrackerProcesses` starts a feed for each tracker as a process of its own on rank 0. Nothing here may stop or slow
training: what fails is said in one line.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.control.trainers.tools import wandb_mode
from relayrun.errors import RelayrunError
from relayrun.train.distributed import Ranks
from relayrun.train.hook_list import Hooks, import_hooks
from relayrun.train.hooks import (
    Hook,
    HookContext,
)
from relayrun.train.loss_guard import LossGuard
from relayrun.train.model.gpt import ModelStage
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.reporting.debugging import Profiler
from relayrun.train.reporting.liveness import FirstStepNotice, SectionReporter, Timings, has_agent
from relayrun.train.reporting.metrics import Metrics, ProgressLog

if TYPE_CHECKING:
    pass


LEAVE_SECONDS = 5.0
"""How long rank 0 waits for its feeds when its state is durable and its outcome is written. Less than the margin of
the lead (`rundir.time_limit.GRACE_MARGIN`); what is not handed on by then, the next attempt's feed hands on."""


class TrackerProcesses(Hook):
    """The feeds of one attempt."""

    def __init__(self, run: Run, attempt: int, config: RunConfig, say: Callable[[str], None]) -> None:
        self._run, self._attempt, self._config, self._say = run, attempt, config, say
        self._feeds: list[subprocess.Popen[bytes]] = []

    def at_start(self, iteration: int, consumed_samples: int) -> None:
        run, config, say = self._run, self._config, self._say
        mode = wandb_mode(os.environ)
        names = (["wandb"] if mode else []) + (["tensorboard"] if config.tracking.tensorboard else [])
        try:
            stream = update_tracker_runs(run)[-1] if names else None
            for name in names:
                self._feeds.append(_start(name, run, self._attempt))
        except (OSError, RelayrunError) as error:
            say(f"warning: W&B and TensorBoard are off in this attempt: {error}")
            return
        if mode and stream is not None:
            say(f"W&B is on ({mode}): project {config.project}, run {config.name}, id {stream.id}")
        else:
            say("W&B is off: neither WANDB_API_KEY nor WANDB_MODE=offline is in the environment")

    def close(self) -> None:
        """Let the feeds hand on the rest, LEAVE_SECONDS at most for all of them together."""
        end = time.monotonic() + LEAVE_SECONDS
        for feed in self._feeds:
            with contextlib.suppress(OSError):
                assert feed.stdin is not None
                feed.stdin.write(b"\n")
                feed.stdin.close()
        for feed in self._feeds:
            try:
                feed.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                feed.kill()
                feed.wait()


def _start(name: str, run: Run, attempt: int) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "relayrun.train.reporting.tracker_feed",
        name,
        f"--run-dir={run.path}",
        f"--attempt={attempt}",
        f"--parent={os.getpid()}",
    ]
    return subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)


def attempt_hooks(
    run: Run,
    begin: AttemptStart,
    config: RunConfig,
    ranks: Ranks,
    model: ModelStage,
    optimizer: ScheduledOptimizer,
    *,
    timings: Timings,
    guard: LossGuard,
    metrics: Metrics,
    sections: SectionReporter,
) -> Hooks:
    """Make and set up the hooks of an attempt on this rank; called by all ranks together.

    Raises ConfigError on all ranks alike if one of `training.hooks` cannot be imported or made.
    """
    own = [timings, guard, metrics, *_reports(run, begin, config, ranks, model, metrics)]
    hooks = Hooks(own, import_hooks(config.training.hooks, ranks), ranks, sections)
    context = HookContext(
        run_dir=run.path,
        attempt=begin.attempt,
        config=config,
        ranks=ranks,
        model=model,
        optimizer=optimizer,
        say=metrics.say,
    )
    hooks.setup(context)
    return hooks


def _reports(
    run: Run, begin: AttemptStart, config: RunConfig, ranks: Ranks, model: ModelStage, metrics: Metrics
) -> Iterator[Hook]:
    """What this rank writes for people and other programs, besides the metrics."""
    if ranks.rank == 0:
        yield ProgressLog(
            run.progress,
            job_id=begin.job_id,
            ranks=ranks.world_size,
            flops_per_token=model.flops_per_token(),
            seq_length=config.training.seq_length,
        )
    if config.debug.profile is not None and ranks.rank in config.debug.profile_ranks:
        folder = run.debug_of(begin.attempt) / "profile"
        yield Profiler(config.debug, rank=ranks.rank, folder=folder, say=metrics.say)
    if ranks.rank == 0 and has_agent():
        yield FirstStepNotice()
    if ranks.rank == 0:
        yield TrackerProcesses(run, begin.attempt, config, metrics.say)
