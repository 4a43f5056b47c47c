"""Norms on torch's fused functions, in the place of megatron-core's wrapper, which refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer import TransformerConfig


class Norm(torch.nn.Module):
    """A norm for megatron-core's layer specs, of the kind that `config.normalization` says.

    The arguments are those that megatron-core passes. RMSNorm has a weight for each channel, LayerNorm a bias too.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        # kept as the distance from 1, or as it is
        self._offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self._eps = eps
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1 - self._offset, dtype=config.params_dtype))
        self.bias: torch.nn.Parameter | None = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=config.params_dtype))
        # each tensor-parallel rank sees a part of the sequence: megatron-core then sums their gradients
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] → the same shape."""
        weight = self.weight + self._offset if self._offset else self.weight
        if self.bias is None:
            return functional.rms_norm(hidden, weight.shape, weight, self._eps)
        return functional.layer_norm(hidden, weight.shape, weight, self.bias, self._eps)


class NormWithState(Norm):
    """A norm with the empty extra state that TransformerEngine's norm has in its place.

    So a checkpoint of local layers has every key that a program with TransformerEngine asks for: of the norm behind the
    last layer, and of those of queries and keys. The others are parts of linear layers there.
    """

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        """Take no notice: it is TransformerEngine's, for fp8."""
