"""How large checkpoints become, and how often to save."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import median

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.lead import GRACE_SAVES
from relayrun.control.rundir.lineage import Lineage
from relayrun.control.rundir.run import Run

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class CheckpointSize:
    """What checkpoints take on disk."""

    bytes: int
    """One checkpoint."""
    source: str
    """Whether it was measured or computed."""
    kept: int
    """How many the run keeps at its end."""
    most: int
    """How many lie there at a time at most: those that are kept, and the one that is being written."""

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.bytes

    @property
    def most_bytes(self) -> int:
        return self.most * self.bytes


@dataclass(frozen=True, kw_only=True)
class SaveInterval:
    """How often to save, by Daly's formula, and what it was computed from; seconds."""

    save: float
    save_source: str
    mtbf: float
    """Mean time between failures of the whole job."""
    mtbf_source: str

    @property
    def seconds(self) -> float:
        return daly_interval(self.save, self.mtbf)


def daly_interval(save: float, mtbf: float) -> float:
    """Seconds of work between two saves at which saves and lost work together cost least.

    Young (1974, Communications of the ACM 17(9)): sqrt(2 save mtbf). Daly (2006, Future Generation Computer Systems
    22(3), equation 37) takes it further for saves that are not short: sqrt(2 save mtbf) (1 + sqrt(r) / 3 + r / 9) -
    save with r = save / (2 mtbf), where r < 1, and mtbf where it is not.
    """
    if save >= 2 * mtbf:
        return mtbf
    ratio = save / (2 * mtbf)
    return math.sqrt(2 * save * mtbf) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save


def bytes_per_parameter(config: RunConfig) -> tuple[int, int]:
    """Return what a checkpoint has of weights and of the optimizer's state, per parameter.

    In bf16: 2, and 12 for fp32 weights and two moments. In fp32: 4 and 8; the distributed optimizer saves its part of
    the weights once more, 12.
    """
    if config.training.resolved_precision == "bf16":
        return 2, 12
    return 4, 12 if config.parallel.use_distributed_optimizer else 8


def checkpoint_size(config: RunConfig, parameters: int, run: Run) -> CheckpointSize:
    """Return the size of the run's newest checkpoint, or what its tensors take.

    The rest, random numbers, schedules and names, is small.
    """
    each = sum(bytes_per_parameter(config))
    size, source = each * parameters, f"{each} bytes a parameter"
    newest = next((counted.commit for counted in Lineage(run).backwards() if counted.commit.files), None)
    if newest is not None:
        size, source = sum(newest.files.values()), f"as checkpoint {newest.iteration} of this run"
    steps, settings = config.training.end_iteration, config.checkpoint
    saves = -(-steps // settings.interval)
    last = min(saves, settings.keep_last)
    kept = last
    if settings.keep_every is not None:
        multiple = math.lcm(settings.interval, settings.keep_every)
        kept += max(0, (steps - last * settings.interval) // multiple)
    waiting = config.evaluation.hold if config.evaluation is not None else 0
    waiting += 0 if settings.mirror is None else 2  # the one that is being copied, and the last verified one
    return CheckpointSize(bytes=size, source=source, kept=kept, most=kept + 1 + min(waiting, max(0, saves - kept)))


def save_interval(config: RunConfig, run: Run) -> SaveInterval | None:
    """Return what the formula needs; None where a save was never measured, or nothing is known of failures."""
    saves = Lineage(run).newest_saves(GRACE_SAVES)
    if not saves:
        return None
    failed, seconds = 0, 0.0
    for number in run.attempt_numbers():
        begin, end = run.attempt(number).read_begin(), run.attempt(number).read_end()
        if begin is not None and end is not None:
            failed += end.cause == "failed"
            seconds += max(0.0, end.end_time - begin.start_time)
    if failed:
        mtbf, source = seconds / failed, f"{failed} failed attempts in {seconds / SECONDS_PER_HOUR:.1f} h of this run"
    elif config.cluster.node_mtbf_hours is not None:
        hours, nodes = config.cluster.node_mtbf_hours, config.job.nodes
        mtbf, source = hours * SECONDS_PER_HOUR / nodes, f"cluster.node_mtbf_hours {hours:g} over {nodes} nodes"
    else:
        return None
    return SaveInterval(
        save=median(saves), save_source=f"median of the last {len(saves)} saves", mtbf=mtbf, mtbf_source=source
    )
