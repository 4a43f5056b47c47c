"""Documents of a micro-batch: their tokens, their positions, and TransformerEngine's attention for them.

megatron-core's layers pass `packed_seq_params` on to the core attention. With the format `sbhd` tensors keep the shape
[sequence, batch, ...] for any documents, and so do the messages between pipeline stages. (With its format `thd` the
rotary embedding reads the lengths from the GPU, twice a layer.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from typing import Any

import torch
from megatron.core.models.common.embeddings import YarnRotaryEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from relayrun.train.distributed import to_device


@dataclass
class PackedDocuments(PackedSeqParams):  # type: ignore[misc]  # megatron-core has no types
    """Documents of a micro-batch: a token sees the tokens of its document up to itself."""

    lengths: Sequence[Sequence[int]] = field(kw_only=True)
    """Tokens of each document, row by row; each row adds up to the sequence length."""
    device: torch.device = field(kw_only=True)
    qkv_format: str = "sbhd"

    def __post_init__(self) -> None:
        # the number of positions of the rotary embedding: of a row, in which documents continue to count
        self.max_seqlen_q = self.max_seqlen_kv = sum(self.lengths[0])

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return max(max(row) for row in self.lengths)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """Starts of the documents, and the end of the last, in concatenated rows; int32 [documents + 1]."""
        flat = torch.tensor([0, *(length for row in self.lengths for length in row)], dtype=torch.int32)
        return to_device(flat.cumsum(0, dtype=torch.int32), self.device)


@lru_cache(maxsize=8)
def whole_rows(batch: int, sequence: int, device: torch.device) -> PackedDocuments:
    """Return rows that are one document each, for a kernel that needs documents."""
    return PackedDocuments(lengths=[[sequence]] * batch, device=device)


class RowwiseRotaryEmbedding(torch.nn.Module):
    """Rotary embedding for positions that differ between rows, in place of megatron-core's.

    megatron-core's gives position i to the i-th token of every row and ignores `position_ids`.
    """

    def __init__(self, rotary: torch.nn.Module) -> None:
        super().__init__()
        self._rotary = rotary
        self.ids: torch.Tensor | None = None
        """Positions of the next forward pass, int64 [batch, sequence] of this context-parallel rank."""

    def get_rotary_seq_len(self, *arguments: Any, **named: Any) -> int:
        """Return the length of the wrapped embedding; it is not used."""
        length: int = self._rotary.get_rotary_seq_len(*arguments, **named)  # type: ignore[operator]
        return length

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return the angles of the positions, [sequence, batch, 1, channels]."""
        assert self.ids is not None
        frequencies: torch.Tensor = self._rotary.inv_freq  # type: ignore[assignment]
        frequencies = frequencies.to(self.ids.device)
        angles = self.ids.T.to(frequencies.dtype)[:, :, None] * frequencies
        pairs = (
            angles.repeat_interleave(2, dim=-1) if self._rotary.rotary_interleaved else torch.cat((angles, angles), -1)
        )
        return pairs[:, :, None, :]


class RowwiseYarnEmbedding(RowwiseRotaryEmbedding):
    """`RowwiseRotaryEmbedding` for YaRN, in a layer with latent attention."""

    def __init__(self, rotary: torch.nn.Module, length: int) -> None:
        """`length`: of a whole sequence."""
        super().__init__(rotary)
        self._length = length

    def forward(self, *_: Any, **__: Any) -> tuple[torch.Tensor, float]:  # type: ignore[override]
        """Return the angles of the positions, [sequence, batch, 1, channels], and the factor of their sines."""
        assert self.ids is not None
        # packed: angles of the whole sequence, also with context parallelism
        angles, factor = self._rotary(self._length, packed_seq=True)
        return angles[self.ids.T, 0], factor


def positions_for(rotary: torch.nn.Module, length: int) -> RowwiseRotaryEmbedding:
    """Return the replacement of a rotary embedding for sequences of this length."""
    yarn = isinstance(rotary, YarnRotaryEmbedding)
    return RowwiseYarnEmbedding(rotary, length) if yarn else RowwiseRotaryEmbedding(rotary)


@cache
def document_attention(attention: type) -> type:
    """Return megatron-core's `TEDotProductAttention`, given as `attention`, as a class that also takes PackedDocuments.
    The base class gets them in its own format, `thd`: concatenated rows, with the starts of the documents."""

    class DocumentAttention(attention):  # type: ignore[misc]
        """`attention`; with PackedDocuments, for [sequence, batch, heads, channels] too."""

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: torch.Tensor | None,
            attn_mask_type: AttnMaskType,
            packed_seq_params: PackedSeqParams | None = None,
            **named: Any,
        ) -> torch.Tensor:
            if not isinstance(packed_seq_params, PackedDocuments):
                named["packed_seq_params"] = packed_seq_params
                out: torch.Tensor = super().forward(
                    query, key, value, attention_mask, attn_mask_type=attn_mask_type, **named
                )
                return out
            sequence, batch = query.shape[:2]
            flat = (part.transpose(0, 1).reshape(batch * sequence, *part.shape[2:]) for part in (query, key, value))
            bounds, longest = packed_seq_params.bounds, packed_seq_params.longest
            packed = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=longest, max_seqlen_kv=longest
            )
            out = super().forward(
                *flat, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed, **named
            )
            return out.reshape(batch, sequence, -1).transpose(0, 1)

    return DocumentAttention
