"""Multi-latent attention (MLA) as megatron-core's MLASelfAttention: with documents, and without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from relayrun.train.model.documents import PackedDocuments


def patch_latent_attention() -> None:
    """Let the layer be built where TransformerEngine is missing; elsewhere do nothing.

    Fault: megatron-core 0.16.1 takes TransformerEngine for installed there (transformer/multi_latent_attention.py:60)
    and asks whether a layer is one of a class that is none: TypeError at line 185.
    """
    if not HAVE_TE:
        multi_latent_attention.HAVE_TE = False


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # megatron-core has no types
    """The attention of a layer. Documents concern its core attention alone, and positions are told from outside.

    megatron-core's own drops the batch's axis where it is 1 and there are documents, as its format `thd` wants it.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        if isinstance(self.linear_kv_down_proj, ColumnParallelLinear) and self.pg_collection.tp.size() > 1:
            self.linear_kv_down_proj.register_forward_hook(self._gathered)

    def _gathered(self, _: torch.nn.Module, __: Any, out: tuple[torch.Tensor, Any]) -> tuple[torch.Tensor, Any]:
        """Gather what the projection to keys and values gives on tensor-parallel ranks, here and not in the base class.

        Fault: the rotary channels of a key are shared by all heads, and a rank has the gradient of its own heads for
        them. megatron-core 0.16.1 gathers the channels (multi_latent_attention.py) by a function whose backward pass
        takes a rank's part of its own gradient, as is right for what a column-parallel layer follows on.
        """
        whole = gather_from_tensor_model_parallel_region(out[0])
        if self.config.sequence_parallel:  # of this rank's tokens; the base class gathers the rotary channels, and sums
            return scatter_to_sequence_parallel_region(whole), out[1]
        compressed, positions = whole.split([self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim], dim=-1)
        summed = _OfAllHeads.apply(positions, self.pg_collection.tp)  # type: ignore[no-untyped-call]
        return torch.cat([compressed, summed], dim=-1), out[1]

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> tuple[torch.Tensor, ...]:
        """As in the base class: query, key and value [sequence, batch, heads, channels], and what they come from."""
        seen = None if isinstance(packed_seq_params, PackedDocuments) else packed_seq_params
        found: tuple[torch.Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, seen, **named
        )
        return found


class _OfAllHeads(torch.autograd.Function):
    """The identity; its gradient is the sum over tensor-parallel ranks.

    megatron-core's `copy_to_tensor_model_parallel_region` sums a copy of a gradient that is a part of a larger tensor,
    and returns what it was (tensor_parallel/mappings.py, `_reduce`).
    """

    @staticmethod
    def forward(context: Any, whole: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        context.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        summed = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed, group=context.group)
        return summed, None
