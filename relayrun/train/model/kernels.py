"""Kernels of the model that may be missing on a machine: fused kernels, gradient accumulation, fp8.

Each is used if it is installed, or refused with a reason if the config requires it.

`parallel.defer_embedding_wgrad_compute` keeps the inputs of the output layer's gradient and computes it at the end of
an iteration, when the last pipeline stage would wait for the others. megatron-core does it only with Apex's kernels,
which add a matrix product to a buffer.
"""

from __future__ import annotations

import copy
import importlib.util
import inspect
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import fp8_utils
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_attr_wrapped_model

from relayrun.config.compose.schema import RunConfig
from relayrun.config.sections.model import TransformerSection
from relayrun.errors import FatalTrainingError
from relayrun.train.distributed import Ranks
from relayrun.train.model import compiled

log = logging.getLogger(__name__)


def choose_fused_kernels(config: RunConfig, device: torch.device) -> dict[str, bool]:
    """Return the fields of a TransformerConfig that turn the kernels on or off. On GPUs rank 0 logs them. Raises
    FatalTrainingError if a kernel is set and cannot be used."""
    why_not = {
        "apply_rope_fusion": _why_no_rope(config, device),
        "gradient_accumulation_fusion": _why_no_gradient_accumulation(device),
    }
    used = {name: _is_used(name, getattr(config.training, name), reason) for name, reason in why_not.items()}
    # else TransformerEngine's kernel rotates queries and keys
    rotates = config.training.apply_rope_fusion is None and _why_no_rope(config, device) is not None
    compiles = compiles_loss(config, device), device.type == "cuda" and rotates
    if compiles[1]:
        compiled.compile_rotary_positions()
    if device.type == "cuda" and dist.get_rank() == 0:
        states = [f"{name} on" if used[name] else f"{name} off ({why_not[name] or 'as it is set'})" for name in used]
        names = [name for name, on in zip(("loss", "rotary positions"), compiles, strict=True) if on]
        states += [f"compiled by torch: {' and '.join(names)}"] if names else []
        log.info("kernels that join several steps: %s", "; ".join(states))
    return used


def compiles_loss(config: RunConfig, device: torch.device) -> bool:
    """True if torch compiles the loss. A reduction may add in another order in each process, as a compiled one is tuned
    where it runs: not with training.deterministic."""
    return (
        device.type == "cuda"
        and config.training.cross_entropy_loss_fusion is None
        and not config.training.deterministic
    )


def _is_used(setting: str, wanted: bool | None, why_not: str | None) -> bool:
    if wanted and why_not is not None:
        raise FatalTrainingError(
            f"training.{setting} is set and cannot be had: {why_not}",
            hint=f"leave out training.{setting}: then it is used where it can be",
        )
    return why_not is None if wanted is None else wanted


def _why_no_rope(config: RunConfig, device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it is a kernel for GPUs"
    if rope_utils.fused_apply_rotary_pos_emb is None:
        return "TransformerEngine is not installed where the ranks run"
    if config.model.transformer.multi_latent_attention:
        return "megatron-core's kernel for multi_latent_attention is experimental, and for YaRN alone"
    if config.data.reset_position_ids:
        return "data.reset_position_ids gives each row positions of its own, and the kernel takes the same for all rows"
    return None


def _why_no_gradient_accumulation(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "it is a kernel for GPUs"
    if not layers._grad_accum_fusion_available:
        return "Apex's fused_weight_gradient_mlp_cuda is not installed where the ranks run"
    return None


def check_compiler(config: RunConfig, ranks: Ranks) -> None:
    """On GPUs, let all ranks run uncompiled what megatron-core compiles on first use (fused bias, dropout, activation,
    parts of experts), if a rank lacks a compiler. Raises FatalTrainingError if a setting asks for a compiled kernel."""
    missing = ranks.gather(_missing_compiler()) if ranks.device.type == "cuda" else []
    found = [f"rank {rank} finds {words}" for rank, words in enumerate(missing) if words]
    if not found:
        return
    if config.training.cross_entropy_loss_fusion or config.model.transformer.moe_permute_fusion:
        raise FatalTrainingError(
            f"training.cross_entropy_loss_fusion or moe_permute_fusion is set and cannot be had: {found[0]}",
            hint="install gcc and Python's header files on the nodes or in the container, or leave the setting out",
        )
    torch.compiler.set_stance("force_eager")
    if ranks.rank == 0:
        log.warning("torch.compile is off, and steps are slower: %s", found[0])


def _missing_compiler() -> str | None:
    """Return what a compiled kernel needs and is not here: triton, or what triton looks for, in the same places."""
    if importlib.util.find_spec("triton") is None:
        return "no triton"
    given, scheme = os.environ.get("CC"), sysconfig.get_default_scheme()
    if not (shutil.which(given) if given is not None else shutil.which("gcc") or shutil.which("clang")):
        return "no C compiler (CC, gcc or clang)"
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    return None if Path(folder, "Python.h").is_file() else f"no Python.h in {folder}"


def log_gpu_state(ranks: Ranks) -> None:
    """On rank 0, log how GPU memory is allocated and how communicators are made."""
    if ranks.device.type == "cuda" and ranks.rank == 0:
        expandable = any(segment.get("is_expandable") for segment in torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
        groups = sum(dist.get_backend(group) == "nccl" for group in dist.distributed_c10d._world.pg_map)
        eager = getattr(dist.group.WORLD, "bound_device_id", None) is not None
        words = ("expandable" if expandable else "fixed", groups, "at the start" if eager else "at first use")
        log.info("GPU memory is in %s segments; this rank has %s NCCL groups, whose communicators are made %s", *words)


FP8_AVAILABLE = {
    "delayed": "is_fp8_available",
    "tensorwise": "is_fp8_available",
    "blockwise": "is_fp8_block_scaling_available",
    "mxfp8": "is_mxfp8_available",
}
"""TransformerEngine's test of the GPU by recipe; older versions lack some recipes."""


def check_fp8(settings: TransformerSection, transformer: TransformerConfig) -> None:
    """Check fp8 before the model is built; megatron-core and TransformerEngine check it in the first step. Raises
    FatalTrainingError if the installed version lacks the recipe, or this GPU does not support it."""
    manager: Any = getattr(fp8_utils, "FP8GlobalStateManager", None)
    if settings.fp8 is None or manager is None:  # without TransformerEngine `layers` reports it
        return
    version = fp8_utils.get_te_version()
    try:
        fp8_utils.get_fp8_recipe(transformer)
    except (AssertionError, AttributeError, ValueError) as error:
        raise _fp8_refused(settings, f"TransformerEngine {version} does not know it ({error})") from error
    ask: Any = getattr(manager, FP8_AVAILABLE[settings.fp8_recipe], None)
    can, why = ask() if ask is not None else (False, f"TransformerEngine {version} does not know it")
    if not can:
        raise _fp8_refused(settings, why)


def _fp8_refused(settings: TransformerSection, why: str) -> FatalTrainingError:
    return FatalTrainingError(
        f"model.transformer.fp8 {settings.fp8} with fp8_recipe {settings.fp8_recipe} cannot be had here: {why}",
        hint="set another model.transformer.fp8_recipe, or leave out model.transformer.fp8",
    )


def init_tp_overlap_buffers(config: RunConfig, transformer: TransformerConfig) -> None:
    """Let TransformerEngine set up the buffers of parallel.tp_comm_overlap; all ranks together, before the model."""
    from transformer_engine.pytorch.module import base  # type: ignore[import-not-found,unused-ignore]

    training, parallel = config.training, config.parallel
    tokens = training.seq_length * training.micro_batch_size // parallel.context_parallel_size
    fp8 = transformer.fp8 is not None
    if "quantization_modes" in inspect.signature(base.initialize_ub).parameters:  # since 2.7
        modes = base.UserBufferQuantizationMode
        precision: dict[str, object] = {"quantization_modes": [modes.FP8 if fp8 else modes.NONE]}
    else:
        precision = {"use_fp8": fp8}
    base.initialize_ub(
        shape=[tokens, config.model.hidden_size],
        tp_size=parallel.tensor_model_parallel_size,
        bootstrap_backend="nccl",
        **precision,
    )


APEX_KERNELS = "fused_weight_gradient_mlp_cuda"
"""Apex's module, which megatron-core imports by this name in layers.py and for the deferred gradients."""


def install_gradient_kernels(*, say: bool) -> None:
    """Replace missing kernels of Apex by functions of torch.

    They compute as without fusion: the product in the type of the activations, then the sum. So bits, speed and memory
    are those of a run without fusion. `say`: this rank logs it.
    """
    if importlib.util.find_spec(APEX_KERNELS) is not None:
        return
    if say:
        log.info("Apex's %s is not installed: gradients of weights are added up by torch", APEX_KERNELS)
    module = ModuleType(APEX_KERNELS)
    module.wgrad_gemm_accum_fp32 = module.wgrad_gemm_accum_fp16 = add_weight_gradient  # type: ignore[attr-defined]
    module.__spec__ = importlib.util.spec_from_loader(APEX_KERNELS, loader=None)
    sys.modules[APEX_KERNELS] = module
    layers.fused_weight_gradient_mlp_cuda = module
    layers._grad_accum_fusion_available = True


@torch.no_grad()
def add_weight_gradient(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    """Add the gradient of a weight, [out, in], of inputs [tokens, in] and the outputs' gradient [tokens, out]."""
    total.add_(gradient.t().matmul(inputs))


def defer_output_layer_alone(model: Any) -> None:
    """Let the other linear layers of a GPTModel compute their gradients at once. megatron-core's local layers read the
    shared config, and cannot keep deferred inputs."""
    config: Any = model.config
    at_once = copy.copy(config)
    at_once.defer_embedding_wgrad_compute = False
    for name, module in model.named_modules():
        if isinstance(module, layers.ColumnParallelLinear) and name != "output_layer":
            module.config = at_once


def reduce_output_layer_last(chunk: DistributedDataParallel) -> Callable[..., None]:
    """Return a function that finalizes gradients after the deferred gradients of the output layer in this chunk.

    With overlap_grad_reduce megatron-core 0.16.1 reduces a bucket when the last micro-batch has passed it, and computes
    deferred gradients later: from the second iteration on they would be added to a buffer that is being reduced (its
    issue 1012). So the bucket of the output layer is held back.
    """
    held = chunk.param_to_bucket_group[get_attr_wrapped_model(chunk, "output_layer").weight]
    held.register_grad_ready = lambda *_, **__: None

    def finalize(*arguments: Any, **named: Any) -> None:
        held.start_grad_sync(force_all_reduce=named.get("force_all_reduce", False))
        finalize_model_grads(*arguments, **named)

    return finalize
