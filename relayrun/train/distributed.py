"""Ranks of one attempt: process groups, agreement between ranks, random generators, determinism, file limits.

`relayrun help exactness` lists the effects of `training.deterministic`: torch's flag covers torch's kernels,
megatron-core's `deterministic_mode` the embeddings (`weight[ids]`, whose gradients torch sorts first), and
environment variables (`relayrun.config.compose.determinism`) the rest. CPUs are deterministic anyway; there only the
embeddings change.

Generators: torch's (dropout on a CPU), CUDA's (dropout on a GPU), megatron-core's named states, which replace them
around dropout in model-parallel regions, and Python's and numpy's, which a user's data or a library may use.
"""

from __future__ import annotations

import os
import random
import resource
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from relayrun.config.compose import determinism
from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.job_script import sbatch_script_options
from relayrun.control.agent.authentication import interface_towards
from relayrun.control.scheduler.slurm_commands import asks_for_gpus
from relayrun.errors import FatalTrainingError, RelayrunError
from relayrun.files import raise_open_file_limit
from relayrun.train.messages import RankObjectCollectives, send_no_pickles

T = TypeVar("T")
GROUP_TIMEOUT = timedelta(minutes=30)
"""Time that a rank waits for the others in one collective before it fails."""
SAVE_TAG = 1
"""Message tag of the save threads."""


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """Reported loss before the last division, which follows the sum over the data-parallel ranks."""

    total: float
    """Sum of losses in nats, over samples (each a mean over its tokens) or over tokens."""
    count: float
    """Number of summands, weights included."""


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Position of this rank in the layout, and its process groups."""

    rank: int
    world_size: int
    device: torch.device
    device_name: str
    cpu_group: dist.ProcessGroup
    """All ranks, over gloo: small agreements on the host, which never wait for a GPU."""
    data_parallel_rank: int
    data_parallel_size: int
    tensor_rank: int
    tensor_size: int
    context_size: int
    """Number of ranks that share a sequence."""
    expert_size: int
    """Number of ranks over which the experts of a layer are split; for other layers these ranks may be data-, context-
    or tensor-parallel."""
    expert_tensor_size: int
    """Number of ranks over which each expert is split."""
    pipeline_rank: int
    pipeline_size: int
    virtual_stages: int
    """Model chunks on each pipeline stage."""
    is_last_stage: bool
    """True if this rank computes the loss."""
    messages: RankObjectCollectives | None = None
    """Transport of agreements in save threads; None in the main thread, which uses the collectives of `cpu_group`."""

    @property
    def layout(self) -> str:
        """The layout in words, such as `DP4 x TP2 x PP1`, for logs and checkpoints; equal layouts have equal words."""
        virtual = f" x VPP{self.virtual_stages}" if self.virtual_stages > 1 else ""
        context = f" x CP{self.context_size}" if self.context_size > 1 else ""
        expert = f" x EP{self.expert_size}" if self.expert_size > 1 else ""
        expert += f" x ETP{self.expert_tensor_size}" if self.expert_tensor_size != self.tensor_size else ""
        sizes = f"DP{self.data_parallel_size} x TP{self.tensor_size} x PP{self.pipeline_size}"
        return f"{sizes}{virtual}{context}{expert}"

    @property
    def replicas_share_experts(self) -> bool:
        """True if ranks of different replicas exchange tokens because they hold the experts of a layer together."""
        return self.tensor_size % (self.expert_size * self.expert_tensor_size) != 0

    def in_save_thread(self) -> Ranks:
        """Return these ranks for agreements between save threads."""
        return replace(self, messages=RankObjectCollectives(self.cpu_group, tag=SAVE_TAG))

    def maximum(self, flags: list[int]) -> list[int]:
        """Return the element-wise maximum of `flags` over all ranks, the same on every rank."""
        assert self.messages is None
        tensor = torch.tensor(flags, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.cpu_group)
        return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Return `value` of every rank, in rank order, on every rank: values of `train.messages`, for rare use."""
        if self.messages is not None:
            return self.messages.all_gather(value)
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.cpu_group)
        return values

    def on_first_rank(self, action: Callable[[], T], failure: type[Exception]) -> T:
        """Run `action` on rank 0; return its result on every rank.

        If it raises, every rank raises: FatalTrainingError unchanged, any other error as `failure`.
        """
        answer: list[Any] = [None, None]
        if self.rank == 0:
            try:
                answer[0] = action()
            except Exception as error:
                fatal = isinstance(error, FatalTrainingError)
                known = isinstance(error, RelayrunError)
                answer[1] = (fatal, str(error) if known else f"{type(error).__name__}: {error}")
        if self.messages is not None:
            answer = self.messages.broadcast(answer)
        else:
            dist.broadcast_object_list(answer, src=0, group=self.cpu_group)
        if answer[1] is not None:
            fatal, text = answer[1]
            raise FatalTrainingError(text) if fatal else failure(text)
        result: T = answer[0]
        return result

    def sum_over_samples(self, values: list[float]) -> list[float]:
        """Sum float64 values over the data-parallel replicas, in rank order; return the same sums on every rank.

        Only values of the last pipeline stage count. The fixed order makes a sum independent of the backend and of the
        other values summed with it: torch adds several columns in another order.
        """
        own = torch.tensor(values, dtype=torch.float64, device=self.device)
        parts = [torch.empty_like(own) for _ in range(self.data_parallel_size)]
        dist.all_gather(parts, own, group=parallel_state.get_data_parallel_group())
        total = torch.cat([torch.stack([part[i : i + 1] for part in parts]).sum(dim=0) for i in range(len(values))])
        if self.pipeline_size > 1:
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast(total, src=last, group=parallel_state.get_pipeline_model_parallel_group())
        return total.tolist()

    def mean_loss(self, own: LossSum) -> float:
        """Return the mean loss over all replicas, the same on every rank. `own`: the loss of this rank."""
        return self.mean_loss_and([], own)[0]

    def mean_loss_and(self, counts: list[int], own: LossSum) -> tuple[float, list[int]]:
        """Return the mean loss and, from the same message, sums of `counts` (below 2^53) over all replicas."""
        total, count, *sums = self.sum_over_samples([own.total, own.count, *map(float, counts)])
        return total / max(count, 1.0), [int(value) for value in sums]


class OpenFileLimitTooLow(RelayrunError):
    """This node does not let a rank open enough files for its sockets; another node may."""


class NoGpuFound(RelayrunError):
    """This node has no GPU that torch can use; another node may."""


def start_process_groups(config: RunConfig) -> Ranks:
    """Join the other ranks (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT in the environment).

    The backend is nccl with CUDA, else gloo. Raises FatalTrainingError if the number of ranks does not fit the layout,
    ConfigError if there is CUDA and the config sets no precision, OpenFileLimitTooLow if this node allows too few
    sockets.
    """
    parallel = config.parallel
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size % config.model_parallel_size:
        raise FatalTrainingError(
            f"{world_size} ranks cannot be split into tensor x pipeline x context parallel size "
            f"{parallel.tensor_model_parallel_size} x {parallel.pipeline_model_parallel_size} x "
            f"{parallel.context_parallel_size}",
            hint="change job.nodes, job.ntasks_per_node or the parallel section",
        )
    raise_file_limit(int(os.environ["RANK"]), world_size)
    send_no_pickles()
    bind_to_job_network(os.environ.get("MASTER_ADDR", "localhost"))
    if parallel.tensor_model_parallel_size > 1 or parallel.context_parallel_size > 1:
        # then megatron-core relies on one queue of kernels for its overlap; in other layouts it only costs
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if torch.cuda.is_available():
        config.training.require_precision()
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=GROUP_TIMEOUT, device_id=device)
        cpu_group = dist.new_group(backend="gloo", timeout=GROUP_TIMEOUT)
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo", timeout=GROUP_TIMEOUT)
        cpu_group = dist.group.WORLD
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=config.virtual_stages if config.virtual_stages > 1 else None,
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_model_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=parallel.num_distributed_optimizer_instances,
        distributed_timeout_minutes=int(GROUP_TIMEOUT.total_seconds() // 60),
        create_gloo_process_groups=False,
    )
    return Ranks(
        rank=dist.get_rank(),
        world_size=world_size,
        device=device,
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        cpu_group=cpu_group,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        context_size=parallel_state.get_context_parallel_world_size(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        virtual_stages=config.virtual_stages,
        is_last_stage=parallel_state.is_pipeline_last_stage(),
    )


def bind_to_job_network(address: str) -> None:
    """Let gloo listen on the interface towards rank 0, unless the site names one. NCCL chooses the fastest itself."""
    if "GLOO_SOCKET_IFNAME" not in os.environ and (name := interface_towards(address)):
        os.environ["GLOO_SOCKET_IFNAME"] = name


def stop_process_groups() -> None:
    """Destroy the process groups; all ranks call it together."""
    dist.barrier()
    dist.destroy_process_group()


def raise_file_limit(rank: int, ranks: int) -> None:
    """Raise the soft limit of open files, often 1,024, to the hard limit; call it before the ranks connect.

    Raises OpenFileLimitTooLow if the hard limit is too low for this number of ranks.
    """
    hard = raise_open_file_limit()
    # one socket to every other rank in the gloo group; rank 0 also has the rendezvous store, with one more to each
    sockets = (ranks - 1) * (1 if rank else 2)
    needed = len(os.listdir("/proc/self/fd")) + sockets
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise OpenFileLimitTooLow(
            f"rank {rank} of {ranks} opens {needed} files at least, sockets to the other ranks among them, and this "
            f"node allows {hard}",
            hint="raise the hard limit of open files (`ulimit -Hn`) on the nodes: LimitNOFILE of slurmd, "
            "or ulimits of the container",
        )


def require_gpu(config: RunConfig) -> None:
    """Raise NoGpuFound if the job requests GPUs and torch finds none: the ranks would train on CPUs."""
    job, srun = config.job, dict(word.removeprefix("--").partition("=")[::2] for word in config.cluster.srun_options)
    asks = asks_for_gpus(sbatch_script_options(job.sbatch)) or asks_for_gpus(srun) or "gpus-per-node" in srun
    if torch.cuda.is_available() or not (job.gpus_per_node or asks):
        return
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    build = "CPUs alone" if torch.version.cuda is None and torch.version.hip is None else build
    raise NoGpuFound(
        f"the job asks for GPUs, and torch {torch.__version__}, built for {build}, finds none on node "
        f"{socket.gethostname()}",
        hint="`nvidia-smi` there says whether it has a driver; a job without GPUs sets job.gpus_per_node=0",
    )


def enable_determinism(config: RunConfig) -> None:
    """Apply `training.deterministic` to this process; call it before the first use of CUDA and NCCL.

    Raises ConfigError if the environment of this rank prevents determinism.
    """
    if not config.training.deterministic:
        return
    determinism.check_deterministic_environment(os.environ, where="environment of the rank")
    for name, value in determinism.deterministic_variables(config).items():
        os.environ.setdefault(name, value)
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.enable_cudnn_sdp(False)
    # the flag also fills all new memory, to find reads of uninitialized values, which costs bandwidth
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def seed_generators(*numbers: int) -> None:
    """Seed every generator with 32 bits of several numbers; nearby inputs give unrelated seeds. Tensor-parallel ranks
    share one generator for what they compute alike; megatron-core adds one per tensor rank for the rest."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def capture_random_state() -> dict[str, Any]:
    """Return a copy of the state of all generators."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "tracker": {name: state.clone() for name, state in get_cuda_rng_tracker().get_states().items()},
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys, dtype=np.int64)), position, has_gauss, cached),
    }


def restore_random_state(states: dict[str, Any]) -> None:
    """Restore the states that `capture_random_state` returned."""
    torch.set_rng_state(states["torch"])
    if states["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
    get_cuda_rng_tracker().set_states(dict(states["tracker"]))
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))


def wait_for_device(ranks: Ranks) -> None:
    """Wait for the work of this thread's stream on the GPU, if there is a GPU. Copies of a save continue."""
    if ranks.device.type == "cuda":
        torch.cuda.current_stream(ranks.device).synchronize()


def to_device(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy values of the host to the device: to a GPU from pinned memory, for which the host does not wait. From other
    memory it would wait for all kernels in the queue."""
    return values.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else values.to(device)


def peak_memory(ranks: Ranks) -> int:
    """Return the peak bytes so far: of the GPU's allocator, or of this process without a GPU."""
    if ranks.device.type == "cuda":
        return torch.cuda.max_memory_allocated(ranks.device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def gpu_memory_fields(ranks: Ranks) -> dict[str, Any]:
    """Return bytes of the GPU's allocator as fields of `Step`; empty without a GPU. It does not wait for the device."""
    if ranks.device.type != "cuda":
        return {}
    return {
        "memory_allocated_bytes": torch.cuda.memory_allocated(ranks.device),
        "memory_reserved_bytes": torch.cuda.memory_reserved(ranks.device),
        "memory_max_reserved_bytes": torch.cuda.max_memory_reserved(ranks.device),
    }
