"""The norm of all gradients with one wait for the device, and their clipping with none.

megatron-core 0.16.1 without TransformerEngine and Apex asks the GPU for every parameter's norm by itself
(core/utils.py:1205), which waits for it so many times, and clips through a copy of every gradient. torch's functions
on lists do either in a few kernels; on CPUs they compute the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer


@torch.no_grad()
def total_norm(optimizer: MegatronOptimizer, device: torch.device) -> float:
    """Return the norm of the prepared gradients over all ranks, which call it together; the same on each of them.

    `device`: where the gradients lie, also on a rank that holds none.
    """
    by_group: dict[dist.ProcessGroup, list[torch.Tensor]] = {}
    for inner in optimizer.chained_optimizers:  # experts may be split over other ranks than the rest
        by_group.setdefault(inner.get_grad_stats_parallel_group(), []).extend(inner.get_main_grads_for_grad_norm())
    squares = []
    for group, gradients in by_group.items():
        square = torch.zeros(1, device=device)
        if gradients:
            square += torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) ** 2
        dist.all_reduce(square, group=group)
        squares.append(square)
    return float(sum(squares[1:], squares[0]).item() ** 0.5)


@torch.no_grad()
def clip(optimizer: MegatronOptimizer, *, maximum: float, norm: float) -> None:
    """Scale the prepared gradients, whose norm this is, so that it becomes `maximum`, if it is above it."""
    factor = maximum / (norm + 1e-6)
    if factor < 1.0:
        gradients = [
            parameter.grad
            for inner in optimizer.chained_optimizers
            for parameter in inner.get_parameters()
            if parameter.grad is not None
        ]
        if gradients:
            torch._foreach_mul_(gradients, factor)
