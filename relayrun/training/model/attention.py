"""Causal attention on torch's scaled_dot_product_attention, in the place of megatron-core's own.

megatron-core's DotProductAttention keeps scores and probabilities of [batch, heads, sequence, sequence] for
every layer. torch picks a flash kernel, on GPUs and on CPUs, which keeps none: memory grows with the
sequence, not with its square. With attention dropout on a CPU torch has no such kernel and computes the
matrix after all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch.backends import cuda
from torch.backends.cuda import SDPAParams


class CausalAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """A `core_attention` for megatron-core's layer specs; the arguments are those it passes."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config=config)
        self._scale = softmax_scale
        self._dropout = config.attention_dropout
        self._forked = config.sequence_parallel

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        visible: torch.Tensor | None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Attend with query [sequence, batch, heads, channels] to key and value [sequence, batch, groups, channels].

        Returns [sequence, batch, heads * channels]. Heads and groups are those of this tensor-parallel rank.

        `visible` [batch, 1, sequence, sequence] is true where a token (row) may see another; None: all before
        it. With it torch has no flash kernel for GPUs and takes a memory-efficient one.
        """
        sequence, batch, heads, channels = query.shape
        dropout = self._dropout if self.training else 0.0
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        # Heads are split over tensor-parallel ranks: each its own masks. With sequence parallel whole layers are within
        # such a fork already; recomputed, they have its state but not its name, and a second fork would draw anew.
        if dropout and not self._forked:
            with get_cuda_rng_tracker().fork():
                out = self._attend(query, key, value, visible, dropout)
        else:
            out = self._attend(query, key, value, visible, dropout)
        return out.permute(2, 0, 1, 3).reshape(sequence, batch, heads * channels)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, dropout: float
    ) -> torch.Tensor:
        repeat = query.shape[1] // key.shape[1]
        shared = repeat > 1 and _kernel_takes_groups(query, key, value, visible, dropout)
        if repeat > 1 and not shared:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=visible,
            dropout_p=dropout,
            is_causal=visible is None,
            scale=self._scale,
            enable_gqa=shared,
        )


def _kernel_takes_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, visible: torch.Tensor | None, dropout: float
) -> bool:
    """Whether torch reads keys and values of groups as they are, all [batch, heads or groups, sequence, channels].

    The flash kernel of CPUs does. Of those for GPUs flash does, which takes neither masks nor fp32, and the
    memory-efficient one only in some versions of torch. Where none does, torch would fall back to the whole matrix.
    """
    if key.device.type == "cpu":
        return True
    asked = SDPAParams(query, key, value, visible, dropout, visible is None, True)
    return cuda.can_use_flash_attention(asked) or cuda.can_use_efficient_attention(asked)
