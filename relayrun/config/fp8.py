"""Settings of training in 8 bits, a part of `model.transformer`; names as in megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import Literal

from relayrun.config.section import NonNegative, Positive, Section


class Fp8Fields(Section):
    """Matrix products in 8 bits, by TransformerEngine, which alone has them: training.transformer_impl says so."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Format of the numbers: e4m3 everywhere, or e5m2 for gradients (hybrid). None: products in training.precision."""
    fp8_recipe: Literal["tensorwise", "delayed", "mxfp8", "blockwise"] = "delayed"
    """What numbers share a scale, and whether it comes from this step or (delayed) from those before."""
    fp8_margin: NonNegative = 0
    """Powers of two left free above the largest number."""
    fp8_amax_history_len: Positive = 1
    """Steps that a delayed scale looks back on."""
    fp8_amax_compute_algo: Literal["most_recent", "max"] = "most_recent"
    """Which of those steps' largest numbers makes the scale."""
    fp8_wgrad: bool = True
    """Compute the weights' gradients in 8 bits too."""
    fp8_dot_product_attention: bool = False
    """Attend in 8 bits too."""
    fp8_multi_head_attention: bool = False
    """Keep 8 bits between attention and the products around it."""
    tp_only_amax_red: bool = False
    """Agree on scales over tensor-parallel ranks alone."""
    first_last_layers_bf16: bool = False
    """Leave the first and the last layers in bf16."""
    num_layers_at_start_in_bf16: NonNegative = 1
    """How many of the first."""
    num_layers_at_end_in_bf16: NonNegative = 1
    """How many of the last."""
