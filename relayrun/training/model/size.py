"""How many parameters a Llama has and what a token costs, by counting; without torch."""

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


def flops_per_token(model: Model, vocabulary_size: int, seq_length: int) -> float:
    """Model FLOPs of one token, forward and backward: what the mathematics needs, recomputation not counted.

    6 x (parameters in matrix products: all but the embedding lookup and the norms) + 6 x layers x hidden x
    sequence for attention, whose mask is causal, so that half of the scores count (PaLM, arXiv 2204.02311,
    appendix B, counts them all: 12).
    """
    norms = (2 * model.num_layers + 1) * model.hidden_size
    lookup = vocabulary_size * model.hidden_size if model.untie_embeddings_and_output_weights else 0
    products = parameters(model, vocabulary_size) - norms - lookup
    return 6.0 * products + 6.0 * model.num_layers * model.hidden_size * seq_length


PEAKS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12}
"""FLOP/s of dense bf16 products, from the vendor's data sheets (SXM modules), by a part of the device's name."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU; None where the device is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)
