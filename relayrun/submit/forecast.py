"""What a run will need: parameters, memory, tokens, hours, node hours, checkpoints."""

from __future__ import annotations

from dataclasses import dataclass

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.lineage import Lineage
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.submit.host_memory import host_copy_bytes
from relayrun.submit.saves import SECONDS_PER_HOUR, CheckpointSize, SaveInterval, checkpoint_size, save_interval
from relayrun.submit.speed import TrainingSpeed, training_speed
from relayrun.train.model.size import (
    GpuMemoryEstimate,
    count_parameters,
    flops_per_token,
    memory_bytes,
    pad_to_multiple,
)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The plan of a run, as numbers. What is not known is None, never an assumption without a name."""

    nodes: int
    ranks: int
    gpus: int
    layout: dict[str, int]
    """Sizes of the tensor-, pipeline-, context- and data-parallel groups; that of experts where they are split."""
    parameters: int
    """Exact, with the padded vocabulary."""
    vocabulary_size: int
    memory: GpuMemoryEstimate
    """What the fullest GPU needs, by formula; a rank where there are no GPUs."""
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
    time_limit: float
    """Seconds of one job."""
    lead: float
    """Seconds before its end at which a job leaves."""
    checkpoint: CheckpointSize
    interval_steps: int
    """Iterations between two saves, as set."""
    save_interval: SaveInterval | None
    cost_per_node_hour: float | None
    currency: str

    @property
    def hours(self) -> float | None:
        """Hours of training that are left; without queues, starts and lost work."""
        return None if self.speed is None else self.tokens_left / self.speed.tokens_per_second / SECONDS_PER_HOUR

    @property
    def node_hours(self) -> float | None:
        return None if self.hours is None else self.hours * self.nodes

    @property
    def cost(self) -> float | None:
        """What the node hours that are left cost, in `currency`."""
        if self.node_hours is None or self.cost_per_node_hour is None:
            return None
        return self.node_hours * self.cost_per_node_hour

    @property
    def jobs(self) -> int | None:
        """Jobs of the chain that are left, at least."""
        usable = self.time_limit - self.lead
        return None if self.hours is None or usable <= 0 else max(1, -int(-self.hours * SECONDS_PER_HOUR // usable))

    @property
    def best_interval_steps(self) -> int | None:
        """Iterations between two saves by the formula; None where it lacks something."""
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
        nodes=job.nodes + job.spare_nodes,
        ranks=config.world_size,
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
        time_limit=plan.time_limit,
        lead=plan.lead,
        checkpoint=checkpoint_size(config, count, run),
        interval_steps=config.checkpoint.interval,
        save_interval=save_interval(config, run),
        cost_per_node_hour=config.cluster.cost_per_node_hour,
        currency=config.cluster.currency,
    )


def format_bytes(size: float) -> str:
    """Return a number of bytes for people, in powers of ten."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 999.5 * factor else f"{size / factor:,.0f} {unit}"
    return f"{size:.0f} bytes"
