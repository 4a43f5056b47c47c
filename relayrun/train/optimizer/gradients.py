"""The norm of all gradients with one wait for the device, and their clipping with none.

megatron-core 0.16.1 without TransformerEngine and Apex asks the GPU for every parameter's norm by itself
(core/utils.py:1205), which waits for it so many times, and clips through a copy of every gradient. torch's functions
on lists do either in a few kernels; on CPUs they compute the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer

from relayrun.train import megatron_versions


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """Return the norm of the prepared gradients over all ranks, which call it together; the same on each of them.

    `device`: where the gradients lie, also on a rank that holds none.
    """
    squares = []
    for group, gradients in _by_group(optimizer).items():
        square = torch.zeros(1, device=device)
        if gradients:
            # in fp32, whatever the gradients' type is
            norms = torch._foreach_norm(gradients, dtype=torch.float32)
            square += torch.linalg.vector_norm(torch.stack(norms)) ** 2
        dist.all_reduce(square, group=group)
        squares.append(square)
    return float(sum(squares[1:], squares[0]).item() ** 0.5)


@torch.no_grad()
def count_zero_gradients(optimizer: MegatronOptimizer, device: torch.device) -> torch.Tensor:
    """Return how many elements of the prepared gradients are 0, over all ranks, which call it together: float64 [1].

    It stays on the device, which is not waited for.
    """
    found = torch.zeros(1, dtype=torch.int64, device=device)
    for group, gradients in _by_group(optimizer).items():
        of_group = torch.zeros_like(found)
        for gradient in gradients:
            of_group += gradient.numel() - torch.count_nonzero(gradient)
        dist.all_reduce(of_group, group=group)
        found += of_group
    return found.double()


def _by_group(optimizer: MegatronOptimizer) -> dict[dist.ProcessGroup, list[torch.Tensor]]:
    """The gradients of this rank by the ranks over which they are split: experts may have others than the rest."""
    found: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for inner in optimizer.chained_optimizers:
        found.setdefault(inner.get_grad_stats_parallel_group(), []).extend(megatron_versions.gradients_for_norm(inner))
    return found


def prepared_gradient(optimizer: MegatronOptimizer, parameter: torch.Tensor) -> torch.Tensor | None:
    """The gradient that `optimizer` will read for one of its parameters; None: it has none."""
    # a precision-aware optimizer's may have another type than the parameter, which torch forbids for `grad`
    decoupled = optimizer.config.use_precision_aware_optimizer_no_fp8_or_ds_fp8
    gradient: torch.Tensor | None = getattr(parameter, "decoupled_grad" if decoupled else "grad", None)
    return gradient


@torch.no_grad()
def clip_gradients(optimizer: MegatronOptimizer, *, maximum: float, norm: float) -> None:
    """Scale the prepared gradients, whose norm this is, so that it becomes `maximum`, if it is above it."""
    factor = maximum / (norm + 1e-6)
    if factor < 1.0:
        gradients = [
            gradient
            for inner in optimizer.chained_optimizers
            for parameter in inner.get_parameters()
            if (gradient := prepared_gradient(inner, parameter)) is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor)
