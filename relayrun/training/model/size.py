"""How many parameters a Llama has and what a token costs, by counting; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from relayrun.config.schema import Model, RunConfig


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


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes of the fullest GPU, by what they are for; without CUDA's own, NCCL's buffers and gaps."""

    state: float
    """Weights, gradients, and this rank's part of the optimizer's state."""
    activations: float
    """What is kept for the backward pass."""
    loss: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.loss


def memory_bytes(config: RunConfig, vocabulary_size: int) -> Memory:
    """Estimate the memory of the fullest GPU, by formula: flash attention, SwiGLU in one kernel, sequence parallel.

    Per parameter in bf16: 2 (weights) + 4 (gradients), and 12 (fp32 weights, two moments) over the ranks that divide
    the state of the distributed optimizer; in fp32 4 + 4, and 8. Kept for the backward pass, per token and layer: 8
    hidden (inputs and outputs of two norms, q, k and v as if spread over all heads, attention's output) + 3 ffn, over
    the tensor-parallel ranks; of a recomputed layer its input. A pipeline of p stages in v parts holds
    p (1 + (p - 1) / (p v)) micro-batches (arXiv 2104.04473 and 2205.05198). The loss: logits, twice in fp32, and their
    gradient.
    """
    model, parallel, training = config.model, config.parallel, config.training
    vocabulary_size = padded(vocabulary_size, model.make_vocab_size_divisible_by)
    tensor, pipeline, parts = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, 1
    layers = model.num_layers // pipeline
    if parallel.num_layers_per_virtual_pipeline_stage:
        parts = layers // parallel.num_layers_per_virtual_pipeline_stage
    again = 0
    if training.recompute_granularity == "full":
        again = min(layers, parts * training.recompute_num_layers if training.recompute_num_layers else layers)
    own = parameters(model, vocabulary_size) / tensor / pipeline
    tokens = training.seq_length * training.micro_batch_size / tensor / parallel.context_parallel_size
    bf16 = training.resolved_precision == "bf16"
    width, fixed, divided = (2, 6, 12) if bf16 else (4, 8, 8)
    layer = width * (8 * model.hidden_size + 3 * model.ffn_hidden_size) * tokens
    kept = (layers - again) * layer + again * width * model.hidden_size * tokens + (layer if again else 0)
    in_flight = pipeline * (1 + (pipeline - 1) / (pipeline * parts)) if pipeline > 1 else 1
    return Memory(
        state=own * (fixed + divided / config.optimizer_parts),
        activations=kept * in_flight,
        # with a pipeline the last stage holds fewer micro-batches
        loss=0.0 if pipeline > 1 else (2 * width + 4 + 4) * vocabulary_size * tokens,
    )


PEAKS = {"A100": 312e12, "H100": 989.4e12, "H200": 989.4e12, "GH200": 989.4e12}
"""FLOP/s of dense bf16 products, from the vendor's data sheets (SXM modules), by a part of the device's name."""


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a GPU; None where the device is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device_name), None)
