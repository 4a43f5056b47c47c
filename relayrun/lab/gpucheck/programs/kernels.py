"""Each kernel of training once, and small models: `python -m relayrun.lab.gpucheck.programs.kernels NAME`.

A row calls one kernel as training does, and compares the result with the same computed otherwise, or trains a small
model. A defect of one row does not reach the others: an error of CUDA, after which no kernel runs in this process, ends
it, and the part starts the program again for the rows that are left.
"""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from megatron.core.transformer import TransformerConfig

from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.agent.memory_copies import MemorySlot, make_memory_folder
from relayrun.control.rundir.run import Run
from relayrun.errors import RelayrunError
from relayrun.lab.gpucheck.programs.common import RankProgram, median_seconds, run_measurement, wait_for
from relayrun.train import distributed
from relayrun.train.checkpoint.async_writer import HostCopy
from relayrun.train.checkpoint.memory_replication import write_copy
from relayrun.train.distributed import Ranks
from relayrun.train.model import compiled, cpu_patches
from relayrun.train.model.attention import CausalAttention
from relayrun.train.model.gpt import MicroBatch, ModelStage
from relayrun.train.model.packed_documents import PackedDocuments
from relayrun.train.optimizer.megatron_optimizer import ScheduledOptimizer
from relayrun.train.optimizer.parameter_groups import parameter_names

TRAINED_STEPS, TIMED_STEPS = 8, 4
"""Iterations, and the number of timed ones at the end."""
END_TOKEN = 0
"""End-of-document token."""


def train_config(program: RankProgram, path: Path) -> dict[str, Any]:
    """Train a variant, and compute its loss by its exact twin. Raises any error of torch."""
    config, twin = read_config(path), path.with_name(f"{path.stem}-exact.yaml")
    exact = read_config(twin) if twin.exists() else None
    return train_variant(config, exact, join_ranks(path.parent), program.setup.sizes.resumed_vocabulary)


@cache
def join_ranks(folder: Path) -> Ranks:
    """Return the ranks, which all configs of a folder share."""
    return distributed.start_process_groups(read_config(min(folder.glob("*.yaml"))))


def read_config(path: Path) -> RunConfig:
    """Return a config that the part has resolved."""
    return resolve.require_native(resolve.read_resolved_config(path))


def train_variant(config: RunConfig, exact: RunConfig | None, ranks: Ranks, vocabulary: int) -> dict[str, Any]:
    """Train `config` and return its figures; `exact`: the same model in fp32."""
    if ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(ranks.device)
    batch = learnable_batch(config, vocabulary)
    model = ModelStage(config, ranks, vocabulary, eod=END_TOKEN)
    optimizer = ScheduledOptimizer(config, model)
    found: dict[str, Any] = {"first_loss": mean_loss(model, batch)}
    started = 0.0
    for step in range(TRAINED_STEPS):
        if step == TRAINED_STEPS - TIMED_STEPS:
            wait_for(ranks.device)
            started = time.perf_counter()
        optimizer.zero_grad()
        model.run([batch], train=True)
        optimizer.step(optimizer.prepare())
    wait_for(ranks.device)
    seconds = (time.perf_counter() - started) / TIMED_STEPS
    tokens = config.training.micro_batch_size * config.training.seq_length * ranks.data_parallel_size
    found |= {
        "last_loss": mean_loss(model, batch),
        "tokens_per_second": tokens / seconds,
        "peak_bytes": distributed.peak_memory(ranks),
    }
    if exact is not None:
        found["exact_loss"] = mean_loss(copy_weights(model, ModelStage(exact, ranks, vocabulary, eod=END_TOKEN)), batch)
    return found


def learnable_batch(config: RunConfig, vocabulary: int) -> MicroBatch:
    """Return a micro-batch of documents over a skewed vocabulary, from which a model can learn."""
    generator = np.random.default_rng(28)
    shape = (config.training.micro_batch_size, config.training.seq_length + 1)
    tokens = np.minimum(generator.geometric(10 / vocabulary, shape), vocabulary - 1)
    tokens[generator.random(shape) < 4 / config.training.seq_length] = END_TOKEN
    return MicroBatch(tokens=tokens)


def mean_loss(model: ModelStage, batch: MicroBatch) -> float:
    """Return the loss without dropout, equal on all ranks."""
    model.train_mode(False)
    with torch.no_grad():
        found = model.ranks.mean_loss(model.run([batch], train=False))
    model.train_mode(True)
    return found


@torch.no_grad()
def copy_weights(model: ModelStage, other: ModelStage) -> ModelStage:
    """Copy the weights of `model` into `other`; return it."""
    weights = {name: parameter for parameter, name in parameter_names(model.chunks)}
    for parameter, name in parameter_names(other.chunks):
        parameter.copy_(weights.pop(name))
    assert not weights, sorted(weights)
    return other


def export_and_compare() -> None:
    """Export the newest checkpoint of `--run-dir` to `--folder`, and compare logits."""
    from relayrun.train.export import compare_logits, huggingface  # transformers: seconds
    from relayrun.train.export.source_and_target import find_checkpoint

    program = RankProgram.begin("run-dir", "folder")
    source = find_checkpoint(Run(Path(program.options.run_dir)))
    folder = Path(program.options.folder)
    folder.mkdir(parents=True)
    made = huggingface.write_huggingface(source, folder, dtype="auto", max_shard_size=huggingface.SHARD_SIZE)
    found = compare_logits.compare_logits(source, folder)
    program.write(
        {
            "parameters": made.parameters,
            "tokens": found.tokens,
            "difference": found.difference,
            "largest": found.largest,
        }
    )


Kernel = Callable[[RankProgram], dict[str, Any]]
"""Returns the figures of a row: `words` says what was seen. Raises any error if the kernel is wrong."""


def require_cuda(program: RankProgram) -> None:
    """Raise RelayrunError without a GPU."""
    if program.device.type != "cuda":
        raise RelayrunError("needs a GPU")


def compiled_kernel(program: RankProgram) -> dict[str, Any]:
    """Call a function that torch.compile fuses, as megatron-core's bias, dropout and activation."""
    require_cuda(program)

    def gated(gate: torch.Tensor, value: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.silu(gate) * value + residual

    parts = [torch.randn(512, 1024, device=program.device) for _ in range(3)]
    started = time.perf_counter()
    found = torch.compile(gated)(*parts)
    wait_for(program.device)
    seconds = time.perf_counter() - started
    torch.testing.assert_close(found, gated(*parts))
    return {"words": f"compiled in {seconds:.1f} s"}


def fused_adam(program: RankProgram) -> dict[str, Any]:
    """Update by AdamW in one kernel; compare with the same on the host."""
    require_cuda(program)
    generator = torch.Generator().manual_seed(28)
    start, gradient = (torch.randn(4096, generator=generator) for _ in range(2))
    found = []
    for device in (program.device, torch.device("cpu")):
        weight = torch.nn.Parameter(start.to(device))
        weight.grad = gradient.to(device)
        adam = torch.optim.AdamW([weight], lr=1e-2, weight_decay=0.1, fused=device.type == "cuda")
        for _ in range(3):
            adam.step()
        found.append(weight.detach().cpu())
    torch.testing.assert_close(*found)
    return {"words": "equal to the host's but for rounding"}


def pinned_copy(program: RankProgram) -> dict[str, Any]:
    """Copy a state into pinned memory as a save does; compare bytes."""
    size = program.setup.sizes.copied_at_most // 4
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=program.device)
    copy = HostCopy(program.device)
    shards = [
        ShardedTensor.from_rank_offsets(f"part{n}", piece) for n, piece in enumerate(torch.split(source, size // 4))
    ]
    started = time.perf_counter()
    copy.reserve(shards)
    reserved = time.perf_counter()
    stream = copy.new_stream()
    copy.fill(shards, stream)
    seconds = time.perf_counter() - reserved
    if not torch.equal(torch.cat([shard.data for shard in shards]), source.cpu()):
        raise ValueError("the copy in host memory has other bytes")
    words = f"{size / 1e9 / seconds:.3g} GB/s, after {reserved - started:.2g} s of pinning {size / 1e9:.3g} GB"
    return {"words": words, "bytes_per_second": size / seconds, "pin_seconds": reserved - started}


def compiled_loss(program: RankProgram) -> dict[str, Any]:
    """Compute loss and gradient of logits in bf16 by the compiled kernels, and by megatron-core's single operations."""
    require_cuda(program)
    join_ranks(Path(program.options.configs))
    sizes = program.setup.sizes
    logits = 4 * torch.randn(sizes.seq_length, 1, sizes.vocabulary, device=program.device)
    labels = torch.randint(0, sizes.vocabulary, (1, sizes.seq_length), device=program.device)
    found: list[torch.Tensor] = []
    for own in (True, False):
        given = logits.bfloat16().requires_grad_()
        if own:
            losses = compiled.language_model_loss(labels, given)
        else:
            losses = vocab_parallel_cross_entropy(given, labels.T.contiguous()).T
        losses.sum().backward()  # type: ignore[no-untyped-call]
        assert given.grad is not None
        found += [losses.detach(), given.grad]
    torch.testing.assert_close(found[0], found[2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[1], found[3], rtol=2e-2, atol=1e-4)
    return {"words": "equal but for rounding"}


ATTENTION_PREFIXES = (
    "aten::_scaled_dot_product_",
    "aten::_flash_attention",
    "aten::_cudnn_attention",
    "aten::_efficient_attention",
    "torch_attn::",
)
"""Operations whose names tell which implementation of attention torch has chosen."""


FORKED = """if True:
    import os
    from relayrun.train import fork_server
    fork_server.import_program()
    pid = os.fork()
    if not pid:
        import torch
        total = float((torch.ones(1000, device="cuda") * 2).sum()) if torch.cuda.is_available() else 2000.0
        os._exit(int(total != 2000.0))
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
"""


def memory_copy(program: RankProgram) -> dict[str, Any]:
    """Copy a state into the node's memory, as for restarts inside a job; compare bytes."""
    size = program.setup.sizes.copied_at_most // 2
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=program.device)
    folder = make_memory_folder()
    try:
        slot = MemorySlot(folder, 0, 0)
        slot.reserve(size)
        seconds = []
        for iteration in (1, 2):
            wait_for(program.device)
            started = time.perf_counter()
            made = write_copy(slot, [source], rank=0, ranks=1, iteration=iteration, size=size, plain=0, layout="")
            seconds.append(time.perf_counter() - started)
        if not torch.equal(torch.from_numpy(made.body), source.cpu()):
            raise ValueError("the copy has other bytes")
    finally:
        shutil.rmtree(folder)
    words = f"{size / 1e9 / seconds[1]:.3g} GB/s with its hash, the first one {size / 1e9 / seconds[0]:.3g} GB/s"
    return {"words": words, "bytes_per_second": size / seconds[1]}


def attention(program: RankProgram, *, packed: bool) -> dict[str, Any]:
    """Call the attention of a training run's local layers, forward and backward; name the kernel that torch picks.
    `packed`: documents in rows (`data.reset_attention_mask`)."""
    given, device = program.setup.sizes.attention, program.device
    sequence, heads, groups, channels = (given[name] for name in ("sequence", "heads", "groups", "channels"))
    config = TransformerConfig(
        num_layers=1,
        hidden_size=heads * channels,
        num_attention_heads=heads,
        num_query_groups=groups,
        attention_dropout=0.0,
        params_dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
    )
    module, parts = CausalAttention(config), given["documents"] if packed else 1
    lengths = [[sequence // parts] * parts] * given["batch"]
    documents = PackedDocuments(lengths=lengths, device=device) if packed else None
    inputs = [
        torch.randn(
            sequence, given["batch"], each, channels, device=device, dtype=config.params_dtype, requires_grad=True
        )
        for each in (heads, groups, groups)
    ]

    gradient = torch.randn_like(module(*inputs, packed_seq_params=documents))

    def call() -> None:
        torch.autograd.grad(module(*inputs, packed_seq_params=documents), inputs, gradient)

    seconds = median_seconds(call, device, repeats=program.setup.sizes.repeats)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    operations = sorted({event.name for event in profile.events() or () if event.name.startswith(ATTENTION_PREFIXES)})
    forward = [name for name in operations if "backward" not in name]
    words = f"{1000 * seconds:.4g} ms: {', '.join(name.partition('::_')[2] for name in forward) or 'unknown'}"
    return {"words": words, "seconds": seconds, "operations": operations}


def ended_fork(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Wait for it. Raises RuntimeError if the fork could not."""
    _, error = process.communicate(timeout=120)
    if process.returncode:
        raise RuntimeError((error.strip() or f"the fork ended with {process.returncode}").splitlines()[-1])
    return {"words": "a fork used the device"}


KERNELS: dict[str, tuple[str, Kernel]] = {
    "compiler": ("a kernel by torch.compile (C compiler, Python.h)", compiled_kernel),
    "adam": ("AdamW in one kernel", fused_adam),
    "loss": ("the compiled loss", compiled_loss),
    "attention_whole": ("attention of whole sequences", partial(attention, packed=False)),
    "attention_packed": ("attention of packed documents", partial(attention, packed=True)),
    "pinned": ("a save's copy to pinned memory", pinned_copy),
    "memory": ("a copy into the memory of the node", memory_copy),
}
"""Description and function by name of the row, in their order."""


def try_every_kernel() -> None:
    """Try the rows that `--skip` does not name, and train the configs in `--configs`; write each result at once."""
    program = RankProgram.begin("skip", "configs")
    cpu_patches.patch_for_cpu()
    skipped, forked = set(program.options.skip.split(",")), None
    rows: dict[str, tuple[str, Kernel]] = {}
    if int(os.environ["WORLD_SIZE"]) == 1:
        rows |= KERNELS
        if "fork" not in skipped:
            environment = os.environ | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
            command, pipe = [sys.executable, "-W", "ignore", "-c", FORKED], subprocess.PIPE
            forked = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=pipe, text=True)
    configs = [path for path in sorted(Path(program.options.configs).glob("*.yaml")) if "-exact." not in path.name]
    rows |= {path.stem: ("", partial(train_config, path=path)) for path in configs}
    if forked is not None:
        rows["fork"] = "CUDA in a fork of the fork server", lambda program: ended_fork(forked)
    found: dict[str, Any] = {}
    for name, (what, kernel) in rows.items():
        if name in skipped:
            continue
        about = {"what": what} if what else {}
        program.write(found | {name: about | {"failed": "it did not end"}})
        started = time.perf_counter()
        try:
            made = kernel(program)
        except RelayrunError as error:  # needs a GPU, or a package that is missing
            made = {"not_measured": error.message}
        except Exception as error:  # torch raises many types; try the others
            lines = str(error).strip().splitlines() or [""]
            made = {"failed": f"{type(error).__name__}: {lines[0]}"[:400]}
        found[name] = about | made | {"row_seconds": time.perf_counter() - started}
        gc.collect()
        program.write(found)
        try:
            wait_for(program.device)
        except RuntimeError:  # no kernel runs in this process any more
            os.kill(os.getpid(), signal.SIGKILL)
    if torch.distributed.is_initialized():
        distributed.stop_process_groups()


if __name__ == "__main__":
    run_measurement(try_every_kernel, export_and_compare)
