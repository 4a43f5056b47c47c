"""TransformerEngine's attention for the documents of a micro-batch."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType

from relayrun.train.model.documents import PackedDocuments


@cache
def document_attention(attention: type) -> type:
    """Return megatron-core's `TEDotProductAttention`, given as `attention`, as a class that also takes Documents.

    It gets them in its own format for them, `thd`: rows behind each other, with the places where documents begin.
    """

    class DocumentAttention(attention):  # type: ignore[misc]
        """As its base; with Documents, for [sequence, batch, heads, channels] too."""

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
                qkv_format="thd",
                cu_seqlens_q=bounds,
                cu_seqlens_kv=bounds,
                max_seqlen_q=longest,
                max_seqlen_kv=longest,
            )
            out = super().forward(
                *flat, None, attn_mask_type=AttnMaskType.padding_causal, packed_seq_params=packed, **named
            )
            return out.reshape(batch, sequence, -1).transpose(0, 1)

    return DocumentAttention
