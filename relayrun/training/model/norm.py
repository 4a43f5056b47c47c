"""RMSNorm on torch's fused function, in the place of megatron-core's wrapper, which refuses sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """A norm for megatron-core's layer specs; the arguments are those it passes."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # each tensor-parallel rank sees a part of the sequence: megatron-core then sums their gradients
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self._eps = eps

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] → the same shape."""
        return functional.rms_norm(hidden, self.weight.shape, self.weight, self._eps)


class FinalNorm(RMSNorm):
    """The norm behind the last layer, with the empty extra state that TransformerEngine's norm has there.

    So a checkpoint of local layers has every key that a program with TransformerEngine asks for.
    """

    def get_extra_state(self) -> None:
        return None

    def set_extra_state(self, state: object) -> None:
        """Take no notice: it is TransformerEngine's, for fp8."""
