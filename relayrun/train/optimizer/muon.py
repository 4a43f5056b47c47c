"""Muon for matrices, AdamW for all other parameters, on the parts that tensor parallelism gives a rank.

Muon (K. Jordan, 2024; arXiv 2502.16982): the update is the momentum, orthogonalized by a Newton-Schulz iteration with
the coefficients of torch.optim.Muon, times a factor of the matrix's size. It depends on the whole matrix: a rank with a
part gathers the whole, computes the same as every rank of the group, and takes its part. Tensor parallelism may reorder
rows (SwiGLU's two halves); the iteration returns the same rows in that order. It runs in fp32, torch.optim.Muon in
bf16: so a change of layout changes only the rounding.

megatron-core's own needs a package that this Python cannot install, and by default treats the parts as separate
matrices, so the mathematics changes with the layout.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from relayrun.config.sections.optimizer import OptimizerSection

A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of the iteration x → A x + (B g + C g²) x with g = x xᵀ."""
SMALLEST = 1e-7
"""Least norm by which a matrix is divided."""


class Muon(torch.optim.AdamW):
    """Updates groups with `muon: qkv` or `muon: matrix` by Muon, all others by AdamW."""

    def __init__(self, params: Iterable[Any], *, settings: OptimizerSection, qkv: tuple[int, int, int]) -> None:
        """`qkv`: rows of queries, keys and values per query group in a matrix of all three."""
        self._settings = settings
        self._qkv = qkv
        betas = (settings.adam_beta1, settings.adam_beta2)
        super().__init__(params, lr=settings.lr, betas=betas, eps=settings.adam_eps, weight_decay=settings.weight_decay)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        done = []
        with _matmul_precision(self._settings.muon_fp32_matmul_prec):
            for group in self.param_groups:
                for parameter in group["params"] if group.get("muon") else ():
                    if parameter.grad is not None:
                        self._update(parameter, group)
                        done.append((parameter, parameter.grad))
        for parameter, _ in done:
            parameter.grad = None  # AdamW skips parameters without a gradient
        super().step()
        for parameter, gradient in done:
            parameter.grad = gradient

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        settings, state, gradient = self._settings, self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - settings.muon_momentum)
        update = gradient.lerp(momentum, settings.muon_momentum) if settings.muon_use_nesterov else momentum
        update = self._orthogonal(update, parameter, group)
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(update, alpha=-group["lr"])

    def _orthogonal(self, part: torch.Tensor, parameter: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        ranks = (
            parallel_state.get_expert_tensor_parallel_group()
            if group["is_expert_parallel"]
            else parallel_state.get_tensor_model_parallel_group()
        )
        axis = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        if axis < 0 or ranks.size() == 1:
            return self._whole(part, group)
        parts = [torch.empty_like(part) for _ in range(ranks.size())]
        dist.all_gather(parts, part.contiguous(), group=ranks)
        whole = self._whole(torch.cat(parts, dim=axis), group)
        return whole.narrow(axis, ranks.rank() * part.shape[axis], part.shape[axis])

    def _whole(self, matrix: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        rows, settings = sum(self._qkv), self._settings
        if group["muon"] == "qkv" and settings.muon_split_qkv and matrix.shape[0] % rows == 0:
            by_group = matrix.view(-1, rows, matrix.shape[1])
            parts = [
                self._scaled(part.reshape(-1, matrix.shape[1])).view(part.shape)
                for part in torch.split(by_group, list(self._qkv), dim=1)
            ]
            return torch.cat(parts, dim=1).view(matrix.shape)
        return self._scaled(matrix)

    def _scaled(self, matrix: torch.Tensor) -> torch.Tensor:
        factor = muon_scale(self._settings.muon_scale_mode, *matrix.shape) * self._settings.muon_extra_scale_factor
        return orthogonalize(matrix, self._settings.muon_num_ns_steps).mul_(factor)


def orthogonalize(matrix: torch.Tensor, steps: int) -> torch.Tensor:
    """Bring the singular values of a matrix near 1, by `steps` steps of the Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=SMALLEST)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.T.contiguous() if tall else x


def muon_scale(mode: str, rows: int, columns: int) -> float:
    """Return the factor of the update of a matrix of this size, see `optimizer.muon_scale_mode`."""
    if mode == "spectral":
        return math.sqrt(max(rows, columns))
    ratio = math.sqrt(rows / columns)
    return max(1.0, ratio) if mode == "shape_scaling" else ratio


@contextlib.contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
