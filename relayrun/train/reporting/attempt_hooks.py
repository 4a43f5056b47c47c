"""The hooks of one attempt on one rank: relayrun's own, in the order of their calls, then those of `training.hooks`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
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
from relayrun.train.reporting.tracker_processes import TrackerProcesses

if TYPE_CHECKING:
    pass


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
