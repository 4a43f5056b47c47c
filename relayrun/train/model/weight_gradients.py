"""The gradients of weights that are added to their buffer where they are computed, and those of the output layer later.

`parallel.defer_embedding_wgrad_compute` keeps what the gradient of the output layer needs, and computes it at the end
of an iteration, when the last pipeline stage would wait for the others. megatron-core does it with the kernels of Apex
alone, which add a product of matrices to a buffer.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, finalize_model_grads
from megatron.core.tensor_parallel import layers
from megatron.core.utils import get_attr_wrapped_model

log = logging.getLogger(__name__)

APEX_KERNELS = "fused_weight_gradient_mlp_cuda"
"""The module of Apex. megatron-core imports it by this name, once in layers.py and once where it computes the rest."""


def install_gradient_kernels(*, say: bool) -> None:
    """Put functions of torch in the place of Apex's kernels where these are not installed.

    They compute what happens without fusion: the product in the type of the activations, then the sum. So the bits are
    those of a run without it, at its speed and with its memory. `say`: whether this rank has a line about it.
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


def defer_output_layer_alone(model: Any) -> None:
    """Let the other linear layers of a GPTModel compute their gradients at once.

    megatron-core's local ones ask the config that all share, and have nowhere to keep what they would defer.
    """
    config: Any = model.config
    at_once = copy.copy(config)
    at_once.defer_embedding_wgrad_compute = False
    for name, module in model.named_modules():
        if isinstance(module, layers.ColumnParallelLinear) and name != "output_layer":
            module.config = at_once


@torch.no_grad()
def add_weight_gradient(inputs: torch.Tensor, gradient: torch.Tensor, total: torch.Tensor) -> None:
    """Add to the gradient of a weight, [out, in]: of inputs [tokens, in] and the outputs' gradient [tokens, out]."""
    total.add_(gradient.t().matmul(inputs))


def reduce_output_layer_last(chunk: DistributedDataParallel) -> Callable[..., None]:
    """Return what finalizes gradients where those of the output layer, which is in this part, come last.

    With overlap_grad_reduce megatron-core 0.16.1 reduces a bucket as soon as the last micro-batch has passed it, and
    computes what was deferred after that: from the second iteration on, those gradients would be added to what is
    already being summed (its issue 1012). So the bucket of the output layer is held back until they are there.
    """
    weight = get_attr_wrapped_model(chunk, "output_layer").weight
    held = chunk.param_to_bucket_group[weight]
    held.register_grad_ready = lambda *_, **__: None

    def finalize(*arguments: Any, **named: Any) -> None:
        held.start_grad_sync(force_all_reduce=named.get("force_all_reduce", False))
        finalize_model_grads(*arguments, **named)

    return finalize
