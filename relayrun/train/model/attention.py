"""Causal attention on torch's scaled_dot_product_attention, in the place of megatron-core's own.

megatron-core's DotProductAttention keeps scores and probabilities of [batch, heads, sequence, sequence] for
every layer. torch picks a flash kernel, on GPUs and on CPUs, which keeps none: memory grows with the
sequence, not with its square. With attention dropout on a CPU torch has no such kernel and computes the
matrix after all.

Documents (`data.reset_attention_mask`) are attended to one by one, without a mask: on GPUs in one call of torch's
kernel for sequences of any length, elsewhere one after the other. The time falls with their lengths.

A sliding window (`model.transformer.window_size`) is an option of that kernel, with documents or without; elsewhere a
sequence is attended to in blocks, each with the tokens that its window reaches. Time grows with sequence x window.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch.backends import cuda
from torch.backends.cuda import SDPAParams

from relayrun.train.model import heads, varlen
from relayrun.train.model.documents import PackedDocuments, whole_rows

SHORTEST_BLOCK = 128
"""Tokens of a block of a sequence with a window, where the window has not as many."""


class CausalAttention(MegatronModule):  # type: ignore[misc]  # megatron-core has no types
    """A `core_attention` for megatron-core's layer specs; the arguments are those it passes."""

    def __init__(
        self, config: TransformerConfig, *, layer_number: int = 1, softmax_scale: float | None = None, **_: Any
    ) -> None:
        """`layer_number` counts from 1: a pattern says which layers have the window."""
        super().__init__(config=config)
        pattern = config.window_attn_skip_freq
        windowed = is_layer_window_attention(config.window_size, pattern, layer_number)
        self._window: int | None = config.window_size[0] if windowed else None
        self._scale = softmax_scale
        self._dropout = config.attention_dropout
        self._forked = config.sequence_parallel
        self._context_size = config.context_parallel_size

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *_: Any,
        packed_seq_params: PackedDocuments | None = None,
        **__: Any,
    ) -> torch.Tensor:
        """Attend with query [sequence, batch, heads, channels] to key and value [sequence, batch, groups, channels].

        Returns [sequence, batch, heads * channels]; channels of value, which may be others than those of query and key.
        Heads and groups are those of this tensor-parallel rank, the sequence is this context-parallel rank's part of
        it. A token sees those before it in its row, or in its document with `packed_seq_params`, which speak of whole
        rows. There is no mask.
        """
        assert attention_mask is None
        channels = value.shape[-1]
        query, key, value = _of_one_width(query, key, value)
        if self._context_size > 1:
            query, key, value = heads.gather_sequence(query, key, value)
        dropout = self._dropout if self.training else 0.0
        # Heads are split over tensor-parallel ranks: each its own masks. With sequence parallel whole layers are within
        # such a fork already; recomputed, they have its state but not its name, and a second fork would draw anew.
        if dropout and not self._forked:
            with get_cuda_rng_tracker().fork():
                out = self._attend(query, key, value, packed_seq_params, dropout)
        else:
            out = self._attend(query, key, value, packed_seq_params, dropout)
        if self._context_size > 1:
            out = heads.scatter_sequence(out)
        return out[..., :channels].flatten(2)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        documents: PackedDocuments | None,
        dropout: float,
    ) -> torch.Tensor:
        """All as in `forward`, over whole rows; returns [sequence, batch, heads, channels]."""
        packed = documents is not None or self._window is not None
        if packed and not dropout and varlen.varlen_usable(query, window=self._window):
            rows = documents or whole_rows(query.shape[1], query.shape[0], query.device)
            return varlen.attend_varlen(query, key, value, rows, scale=self._scale, window=self._window)
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        if documents is None:
            return self._sequence(query, key, value, dropout).permute(2, 0, 1, 3)
        outs = []
        for row, lengths in enumerate(documents.lengths):
            queries, keys, values = (
                torch.split(part[row : row + 1], list(lengths), dim=2) for part in (query, key, value)
            )
            each = zip(queries, keys, values, strict=True)
            outs.append(torch.cat([self._sequence(q, k, v, dropout) for q, k, v in each], dim=2))
        return torch.cat(outs).permute(2, 0, 1, 3)

    def _sequence(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
        """Attend within one sequence, all [batch, heads or groups, sequence, channels]."""
        length, window = query.shape[2], self._window
        if window is None or length <= window + 1:
            return self._call(query, key, value, dropout)
        block, outs, masks = max(window + 1, SHORTEST_BLOCK), [], {}
        for begin in range(0, length, block):
            end, first = min(begin + block, length), max(0, begin - window)
            shape = begin - first, end - begin
            if shape not in masks:
                masks[shape] = _within(window, *shape, device=query.device)
            own, keys, values = query[:, :, begin:end], key[:, :, first:end], value[:, :, first:end]
            outs.append(self._call(own, keys, values, dropout, masks[shape]))
        return torch.cat(outs, dim=2)

    def _call(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dropout: float,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """One call of torch's kernel for [batch, heads or groups, sequence, channels]: causal, or by a mask."""
        repeat = query.shape[1] // key.shape[1]
        shared = repeat > 1 and _kernel_takes_groups(query, key, value, dropout, mask)
        if repeat > 1 and not shared:
            key, value = key.repeat_interleave(repeat, dim=1), value.repeat_interleave(repeat, dim=1)
        return functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=self._scale,
            enable_gqa=shared,
        )


def _within(window: int, before: int, length: int, *, device: torch.device) -> torch.Tensor:
    """Which of the tokens `before` a block and in it, of this length, each token of the block sees: bool, by rows."""
    own = torch.arange(before, before + length, device=device)[:, None]
    other = torch.arange(before + length, device=device)
    return (other <= own) & (other >= own - window)


def _of_one_width(*parts: torch.Tensor) -> list[torch.Tensor]:
    """Fill up the channels of query, key and value with zeros, which change nothing, to the widest of the three.

    torch's flash kernels want as many in a value as in a query; without one it would keep the whole matrix of scores.
    """
    width = max(part.shape[-1] for part in parts)
    return [part if part.shape[-1] == width else functional.pad(part, (0, width - part.shape[-1])) for part in parts]


def _kernel_takes_groups(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, mask: torch.Tensor | None
) -> bool:
    """Whether torch reads keys and values of groups as they are, all [batch, heads or groups, sequence, channels].

    The flash kernel of CPUs does. Of those for GPUs flash does, which does not take fp32, and the memory-efficient one
    only in some versions of torch. Where none does, torch would fall back to the whole matrix.
    """
    if key.device.type == "cpu":
        return True
    asked = SDPAParams(query, key, value, mask, dropout, mask is None, True)
    return cuda.can_use_flash_attention(asked) or cuda.can_use_efficient_attention(asked)
