"""How fast a run will train: as it did, as another of the same shape did, or as a setting says; never a guess."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from relayrun.config.compose import compose
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import find_runs
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.files import read_lines_backwards

MEASURED_STEPS = 200
"""Newest steps whose median counts."""
FEWEST_STEPS = 10
"""Steps below which nothing is measured: the first ones warm up."""
OTHER_RUNS = 20
"""Newest runs that are asked for the same shape."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpeed:
    """Tokens a second over all ranks, and who says so."""

    tokens_per_second: float
    source: str


def training_speed(config: RunConfig, run: Run, flops_per_token: float) -> TrainingSpeed | None:
    """Return how fast the run trains; None where nothing is measured, and no setting says."""
    own = _newest_config(run)
    if own is not None and speed_shape(own) == speed_shape(config) and (found := measured_speed(run)) is not None:
        return TrainingSpeed(tokens_per_second=found, source="median of this run's last steps")
    others = {other: _trained_last(other) for other in find_runs.all_run_folders() if other.path != run.path}
    for other in heapq.nlargest(OTHER_RUNS, (each for each, time in others.items() if time), key=others.__getitem__):
        theirs = _newest_config(other)
        if (
            theirs is not None
            and speed_shape(theirs) == speed_shape(config)
            and (found := measured_speed(other)) is not None
        ):
            return TrainingSpeed(
                tokens_per_second=found, source=f"median of {other.path.parent.name}/{other.path.name}"
            )
    assumed, gpus = config.cluster.tflops_per_gpu, config.job.nodes * config.job.gpus_per_node
    if assumed is not None and gpus:
        return TrainingSpeed(
            tokens_per_second=assumed * 1e12 * gpus / flops_per_token, source=f"cluster.tflops_per_gpu {assumed:g}"
        )
    return None


def speed_shape(config: RunConfig) -> dict[str, Any]:
    """What two runs have in common that train as fast as each other: model, layout, batch, kernels and site."""
    training = config.training
    names = (
        "seq_length",
        "micro_batch_size",
        "global_batch_size",
        "threads",
        "precision",
        "deterministic",
        "transformer_impl",
        "recompute_granularity",
        "recompute_modules",
        "recompute_num_layers",
    )
    return {
        "cluster": config.cluster.name,
        "job": [config.job.nodes, config.job.ntasks_per_node, config.job.cpus_per_task, config.job.gpus_per_node],
        "model": config.model.model_dump(exclude={"init_method_std", "norm_epsilon"}),
        "parallel": config.parallel.model_dump(),
        **{name: getattr(training, name) for name in names},
    }


def measured_speed(run: Run) -> float | None:
    """Median tokens a second of a run's newest steps; None where it has too few."""
    steps: Iterable[dict[str, Any]] = (
        line for _, line in read_lines_backwards(run.metrics_view) if "tokens_per_second" in line
    )
    try:
        found = [float(line["tokens_per_second"]) for line in islice(steps, MEASURED_STEPS)]
    except (OSError, TypeError, ValueError):
        return None
    return median(found) if len(found) >= FEWEST_STEPS else None


def _trained_last(run: Run) -> float:
    """When a run's metrics were written last; 0 where there are none, or others may not look."""
    try:
        return run.metrics_view.stat().st_mtime
    except OSError:
        return 0.0


def _newest_config(run: Run) -> RunConfig | None:
    try:
        revisions = run.revisions()
        newest = compose.read_resolved_config(run.config_revision(revisions[-1])) if revisions else None
        return newest if isinstance(newest, RunConfig) else None
    except (RelayrunError, OSError):
        return None
