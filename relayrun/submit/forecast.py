"""The forecast of a run: parameters, memory, tokens, hours, node hours, checkpoint sizes, and how often to save.

Numbers come from formulas or from measurements: speed is measured in this run or in another run of the same shape, or
a setting gives it; it is never guessed. `daly_interval` computes the best save interval; `host_copy_bytes` the memory
of a node that copies of saves take.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from statistics import median
from typing import Any

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import find_runs
from relayrun.control.rundir.checkpoint_records import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.time_limit import GRACE_SAVES
from relayrun.errors import RelayrunError
from relayrun.files import read_json_lines_backwards
from relayrun.train.checkpoint.host_buffers import BUFFER_PIECE_BYTES, lay_out_buffers, pinned_bytes
from relayrun.train.model.size import (
    GpuMemoryEstimate,
    count_parameters,
    flops_per_token,
    memory_bytes,
    pad_to_multiple,
)

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class CheckpointDiskUsage:
    """The size of checkpoints on disk."""

    bytes: int
    """Bytes of a checkpoint."""
    source: str
    """Origin of the size: measured or computed."""
    kept: int
    """Checkpoints that the run keeps at its end."""
    most: int
    """Maximum checkpoints at a time: the kept checkpoints, and the checkpoint that is being written."""

    @property
    def kept_bytes(self) -> int:
        return self.kept * self.bytes

    @property
    def most_bytes(self) -> int:
        return self.most * self.bytes


@dataclass(frozen=True, kw_only=True)
class SaveInterval:
    """The best time between saves by Daly's formula, and its inputs, in seconds."""

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
    save with r = save / (2 mtbf), if r < 1, and mtbf otherwise.
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


def checkpoint_size(config: RunConfig, parameters: int, run: Run) -> CheckpointDiskUsage:
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
    return CheckpointDiskUsage(bytes=size, source=source, kept=kept, most=kept + 1 + min(waiting, max(0, saves - kept)))


def save_interval(config: RunConfig, run: Run) -> SaveInterval | None:
    """Return what the formula needs; None if a save was never measured, or nothing is known of failures."""
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
    """Return how fast the run trains; None if nothing is measured, and no setting says."""
    if (found := _speed_of_shape(run, config)) is not None:
        return TrainingSpeed(tokens_per_second=found, source="median of this run's last steps")
    others = {other: _trained_last(other) for other in find_runs.all_run_folders() if other.path != run.path}
    for other in heapq.nlargest(OTHER_RUNS, (each for each, time in others.items() if time), key=others.__getitem__):
        if (found := _speed_of_shape(other, config)) is not None:
            source = f"median of {other.path.parent.name}/{other.path.name}"
            return TrainingSpeed(tokens_per_second=found, source=source)
    assumed, gpus = config.cluster.tflops_per_gpu, config.job.nodes * config.job.gpus_per_node
    if assumed is not None and gpus:
        return TrainingSpeed(
            tokens_per_second=assumed * 1e12 * gpus / flops_per_token, source=f"cluster.tflops_per_gpu {assumed:g}"
        )
    return None


def speed_shape(config: RunConfig) -> dict[str, Any]:
    """Return the settings that determine the speed of a run: model, layout, batch, kernels and site."""
    training = config.training
    names = ["seq_length", "micro_batch_size", "global_batch_size", "threads", "precision", "deterministic"]
    names += ["transformer_impl", "recompute_granularity", "recompute_modules", "recompute_num_layers"]
    return {
        "cluster": config.cluster.name,
        "job": [config.job.nodes, config.job.ntasks_per_node, config.job.cpus_per_task, config.job.gpus_per_node],
        "model": config.model.model_dump(exclude={"init_method_std", "norm_epsilon"}),
        "parallel": config.parallel.model_dump(),
        **{name: getattr(training, name) for name in names},
    }


def measured_speed(run: Run) -> float | None:
    """Median tokens a second of a run's newest steps; None if it has too few."""
    steps: Iterable[dict[str, Any]] = (
        line for _, line in read_json_lines_backwards(run.metrics_view) if "tokens_per_second" in line
    )
    try:
        found = [float(line["tokens_per_second"]) for line in islice(steps, MEASURED_STEPS)]
    except (OSError, TypeError, ValueError):
        return None
    return median(found) if len(found) >= FEWEST_STEPS else None


def _trained_last(run: Run) -> float:
    """Time of the last write of a run's metrics; 0 without metrics, or without the permission to look."""
    try:
        return run.metrics_view.stat().st_mtime
    except OSError:
        return 0.0


def _speed_of_shape(run: Run, config: RunConfig) -> float | None:
    """The measured speed of a run whose newest config has the shape of `config`; None for another shape."""
    try:
        revisions = run.revisions()
        newest = resolve.read_resolved_config(run.config_revision(revisions[-1])) if revisions else None
    except (RelayrunError, OSError):
        return None
    same = isinstance(newest, RunConfig) and speed_shape(newest) == speed_shape(config)
    return measured_speed(run) if same else None


COPY_BUFFER_BYTES = 1 << 26
"""Bytes of the buffers of which an estimate takes what a rank saves to be made, but for the largest one."""


def host_copy_bytes(config: RunConfig, parameters: int, vocabulary_size: int) -> int:
    """Estimate the bytes of host memory that the rank which saves most takes for its copies, by formula.

    What a checkpoint has is divided over the ranks that share a part of the model: by whole tensors, but for the state
    of the distributed optimizer, so the rank with the embedding has it all. On GPUs torch pins the memory, which it
    rounds up. `vocabulary_size`: padded.
    """
    if not config.checkpoint.async_save:
        return 0
    parallel = config.parallel
    width, state = bytes_per_parameter(config)
    own = parameters / parallel.tensor_model_parallel_size / parallel.pipeline_model_parallel_size
    replicas = config.data_parallel_size * parallel.context_parallel_size
    embedding = vocabulary_size * config.model.hidden_size / parallel.tensor_model_parallel_size
    if parallel.use_distributed_optimizer:
        largest = max(width * embedding, 4 * min(embedding, own / replicas))
        total = max(width * own / replicas, width * embedding) + state * own / replicas
    else:
        largest = 4 * embedding
        total = max((width + state) * own / replicas, largest)
    rest = max(0, round(total - largest))
    sizes = [round(largest), *[COPY_BUFFER_BYTES] * (rest // COPY_BUFFER_BYTES), rest % COPY_BUFFER_BYTES]
    lengths = lay_out_buffers(sizes, BUFFER_PIECE_BYTES)[1]
    return sum(pinned_bytes(lengths) if config.job.gpus_per_node else lengths)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The plan of a run, as numbers. What is not known is None, never an assumption without a name."""

    config: RunConfig
    plan: Plan
    nodes: int
    gpus: int
    layout: dict[str, int]
    """Sizes of the tensor-, pipeline-, context- and data-parallel groups; the size of experts if they are split."""
    parameters: int
    """Exact, with the padded vocabulary."""
    vocabulary_size: int
    memory: GpuMemoryEstimate
    """Memory of the fullest GPU by formula; without GPUs, of a rank."""
    gpu_memory: float | None
    """Bytes of a GPU, as the cluster's file says."""
    host_copies: int
    """Bytes of a node's memory that copies of saves take, by formula; 0 without checkpoint.async_save."""
    steps: int
    steps_done: int
    """Durable ones."""
    tokens: int
    """Read by all steps."""
    tokens_left: int
    flops: float
    """Model FLOPs of the tokens that are left."""
    speed: TrainingSpeed | None
    checkpoint: CheckpointDiskUsage
    save_interval: SaveInterval | None

    @property
    def hours(self) -> float | None:
        """Hours of training that are left; without queues, starts and lost work."""
        return None if self.speed is None else self.tokens_left / self.speed.tokens_per_second / SECONDS_PER_HOUR

    @property
    def node_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.nodes

    @property
    def cost(self) -> float | None:
        """Cost of the remaining node hours, in `cluster.currency`."""
        price = self.config.cluster.cost_per_node_hour
        return None if self.node_hours is None or price is None else self.node_hours * price

    @property
    def jobs(self) -> int | None:
        """Jobs of the chain that are left, at least."""
        usable = self.plan.time_limit - self.plan.grace_period
        return None if self.hours is None or usable <= 0 else max(1, -int(-self.hours * SECONDS_PER_HOUR // usable))

    @property
    def best_interval_steps(self) -> int | None:
        """Iterations between two saves by the formula; None if it lacks something."""
        if self.save_interval is None or self.speed is None:
            return None
        tokens = self.tokens / self.steps
        return max(1, round(self.save_interval.seconds * self.speed.tokens_per_second / tokens))


def forecast_run(config: RunConfig, plan: Plan, run: Run, vocabulary_size: int) -> Forecast:
    """Compute the plan of a run. `vocabulary_size`: the tokenizer's, not padded."""
    training, job, parallel = config.training, config.job, config.parallel
    size = pad_to_multiple(vocabulary_size, config.model.make_vocab_size_divisible_by)
    count = count_parameters(config.model, size)
    newest = next((counted.commit for counted in Lineage(run).backwards() if counted.published), None)
    done, consumed = (0, 0) if newest is None else (newest.iteration, newest.consumed_samples)
    samples = training.batch_sizes.consumed_by(training.end_iteration)
    left = max(0, samples - consumed)
    each = flops_per_token(config.model, size, training.seq_length)
    memory = config.cluster.gpu_memory_gb
    return Forecast(
        config=config,
        plan=plan,
        nodes=job.nodes + job.spare_nodes,
        gpus=job.nodes * job.gpus_per_node,
        layout={
            "tensor": parallel.tensor_model_parallel_size,
            "pipeline": parallel.pipeline_model_parallel_size,
            "context": parallel.context_parallel_size,
            "data": config.data_parallel_size,
            **({"expert": parallel.expert_model_parallel_size} if parallel.expert_model_parallel_size > 1 else {}),
            **({"expert tensor": parallel.expert_tensor_size} if parallel.expert_tensor_parallel_size else {}),
        },
        parameters=count,
        vocabulary_size=size,
        memory=memory_bytes(config, vocabulary_size),
        gpu_memory=None if memory is None else memory * 1e9,
        host_copies=job.ntasks_per_node * host_copy_bytes(config, count, size),
        steps=training.end_iteration,
        steps_done=done,
        tokens=samples * training.seq_length,
        tokens_left=left * training.seq_length,
        flops=each * left * training.seq_length,
        speed=training_speed(config, run, each),
        checkpoint=checkpoint_size(config, count, run),
        save_interval=save_interval(config, run),
    )
