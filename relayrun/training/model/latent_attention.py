"""Multi-latent attention (MLA) as megatron-core's MLASelfAttention: with documents, and without TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import HAVE_TE
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from relayrun.training.model.documents import Documents


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

    def get_query_key_value_tensors(
        self,
        hidden_states: torch.Tensor,
        key_value_states: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        packed_seq_params: Any = None,
        **named: Any,
    ) -> tuple[torch.Tensor, ...]:
        """As in the base class: query, key and value [sequence, batch, heads, channels], and what they come from."""
        seen = None if isinstance(packed_seq_params, Documents) else packed_seq_params
        found: tuple[torch.Tensor, ...] = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, seen, **named
        )
        return found
