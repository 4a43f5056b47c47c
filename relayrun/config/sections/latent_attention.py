"""Settings of multi-latent attention (MLA), a part of `model.transformer`, as in MLATransformerConfig."""

from __future__ import annotations

from typing import Literal

from relayrun.config.sections.base import Positive, Section


class LatentAttentionFields(Section):
    """Multi-latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values come from one narrow vector a token."""

    multi_latent_attention: bool = False
    """Use it; the settings of `model.transformer` from q_lora_rank to mscale_all_dim belong to it."""
    q_lora_rank: Positive | None = 512
    """Width of the vector that queries come from; None: they come from the residual stream."""
    kv_lora_rank: Positive = 512
    """Width of the vector that keys and values come from."""
    qk_head_dim: Positive = 128
    """Channels of a query's and a key's head without positions."""
    qk_pos_emb_head_dim: Positive = 64
    """Channels of a query's and a key's head with rotary positions."""
    v_head_dim: Positive = 128
    """Channels of a value's head."""
    rope_type: Literal["rope", "yarn"] = "yarn"
    """Rotary positions as they are, or stretched to a longer context (YaRN, arXiv 2309.00071)."""
    rotary_scaling_factor: float = 40
    """YaRN: how many times the original context is stretched."""
    original_max_position_embeddings: Positive = 4096
    """YaRN: the original context, in tokens."""
    beta_fast: float = 32
    """YaRN: frequencies that turn more often than this in the original context stay as they are."""
    beta_slow: float = 1
    """YaRN: frequencies that turn less often than this are stretched fully."""
    mscale: float = 1.0
    """YaRN: factor in the scale of attention."""
    mscale_all_dim: float = 0.0
    """YaRN: the same, for all channels."""
