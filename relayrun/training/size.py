"""How many parameters a Llama has, by counting; without torch."""

from __future__ import annotations

from relayrun.config.schema import Model


def parameters(model: Model, vocabulary_size: int) -> int:
    """Parameters of the whole model with a vocabulary of this (padded) size.

    Per layer: query, key, value and output projections, the three matrices of SwiGLU, two norms.
    """
    hidden = model.hidden_size
    key_values = hidden * model.num_query_groups // model.num_attention_heads
    layer = 2 * hidden * hidden + 2 * hidden * key_values + 3 * hidden * model.ffn_hidden_size + 2 * hidden
    embeddings = 2 if model.untie_embeddings_and_output_weights else 1
    return model.num_layers * layer + embeddings * vocabulary_size * hidden + hidden


def padded(size: int, multiple: int) -> int:
    """`size` rounded up to a multiple."""
    return -(-size // multiple) * multiple
