"""Kernels that join several steps of the model, where they are installed: which are used, and why others are not."""

from __future__ import annotations

import inspect
import logging
from dataclasses import dataclass

import torch
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.tensor_parallel import layers
from megatron.core.transformer import TransformerConfig

from relayrun.config.compose.schema import RunConfig
from relayrun.errors import FatalTrainingError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class FusedKernel:
    """One of these kernels, in this attempt."""

    setting: str
    used: bool
    why_not: str | None
    """Why it cannot be used here; None: it can."""


def choose_fused_kernels(config: RunConfig, device: torch.device) -> dict[str, bool]:
    """Return the fields of a TransformerConfig that turn the kernels on or off.

    On GPUs rank 0 logs which they are. Raises FatalTrainingError for one that is asked for and cannot be used.
    """
    found = [
        _fused_kernel("apply_rope_fusion", config.training.apply_rope_fusion, _why_no_rope(config, device)),
        _fused_kernel(
            "gradient_accumulation_fusion",
            config.training.gradient_accumulation_fusion,
            _why_no_gradient_accumulation(device),
        ),
    ]
    if device.type == "cuda" and torch.distributed.get_rank() == 0:
        log.info("kernels that join several steps: %s", "; ".join(map(_kernel_text, found)))
    return {fusion.setting: fusion.used for fusion in found}


def _fused_kernel(setting: str, wanted: bool | None, why_not: str | None) -> FusedKernel:
    if wanted and why_not is not None:
        raise FatalTrainingError(
            f"training.{setting} is set and cannot be had: {why_not}",
            hint=f"leave out training.{setting}: then it is used where it can be",
        )
    return FusedKernel(setting=setting, used=why_not is None if wanted is None else wanted, why_not=why_not)


def _kernel_text(fusion: FusedKernel) -> str:
    if fusion.used:
        return f"{fusion.setting} on"
    return f"{fusion.setting} off ({fusion.why_not or 'as it is set'})"


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


def start_communication_overlap(config: RunConfig, transformer: TransformerConfig) -> None:
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
