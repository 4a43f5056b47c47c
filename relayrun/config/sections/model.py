"""The section `model` of a run config."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from relayrun.config.sections.base import Fraction, ImportPath, Positive, Section
from relayrun.config.sections.transformer import TransformerSection


class ModelSection(Section):
    """A Llama: RMSNorm, SwiGLU, rotary positions, grouped-query attention (arXiv 2407.21783); and what `transformer`
    makes of it."""

    num_layers: Positive
    """Transformer layers."""
    hidden_size: Positive
    """Width of the residual stream."""
    ffn_hidden_size: Positive
    """Width of the feed-forward layers (SwiGLU has three matrices of it)."""
    num_attention_heads: Positive
    """Query heads; a head has hidden_size / num_attention_heads channels, or transformer.kv_channels."""
    num_query_groups: Positive
    """Key-value heads; equal to num_attention_heads for plain multi-head attention."""
    rotary_base: Positive = 500_000
    """Base of the rotary frequencies."""
    rope_scaling_factor: Annotated[float, Field(ge=1)] | None = None
    """Llama 3.1's stretching of the low rotary frequencies, over an original context of 8,192; None: none."""
    rotary_percent: Annotated[float, Field(gt=0, le=1)] = 1.0
    """The part of a head's channels that is rotated, the first ones; 1: all."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_method_std: float = 0.02
    """Standard deviation of fresh weights."""
    hidden_dropout: Fraction = 0.0
    """Probability of dropout behind attention and feed-forward layers."""
    attention_dropout: Fraction = 0.0
    """Probability of dropout of attention's weights."""
    untie_embeddings_and_output_weights: bool = True
    """The output layer has weights of its own, not those of the embedding."""
    make_vocab_size_divisible_by: Positive = 128
    """The vocabulary is padded to a multiple of this, however the model is split: a checkpoint fits every layout."""
    mapping: ImportPath | None = None
    """Import path of a mapping of your own, `package.module:name`: which class of transformers the model is, and what
    its weights are called there, for exports and evaluations (docs/export.md). None: the built-in one that fits."""
    transformer: TransformerSection = TransformerSection()
    spec: ImportPath | None = None
    """`module:function`, a function of your own that gets megatron-core's TransformerConfig and returns the layers
    (ModuleSpec), the block (TransformerBlockSubmodules) or the whole model (a module), see docs/own-code.md."""

    @property
    def head_channels(self) -> int:
        """Channels of a head."""
        return self.transformer.kv_channels or self.hidden_size // self.num_attention_heads

    @model_validator(mode="after")
    def _divisible(self) -> Self:
        own_heads = self.transformer.kv_channels or self.transformer.multi_latent_attention
        if self.hidden_size % self.num_attention_heads and not own_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is no multiple of num_attention_heads {self.num_attention_heads}; "
                "or set transformer.kv_channels"
            )
        self.transformer.check_layers(self.num_layers)
        if self.num_attention_heads % self.num_query_groups:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_query_groups {self.num_query_groups}"
            )
        return self
