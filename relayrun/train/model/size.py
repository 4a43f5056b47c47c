"""Number of parameters and their names, FLOPs per token and GPU memory of a model, by formula; without torch."""

from __future__ import annotations

from dataclasses import dataclass

from relayrun.config.compose.layout_rules import expert_layers
from relayrun.config.compose.schema import ModelSection, RunConfig


@dataclass(frozen=True)
class ParameterCount:
    """Parameters of a part of one layer."""

    products: int
    """Parameters of matrices, with which every token is multiplied."""
    others: int
    """Parameters of norms, biases and activations."""
    idle: int = 0
    """Parameters of experts that a token is not routed to."""

    @property
    def total(self) -> int:
        return self.products + self.others + self.idle

    def __mul__(self, times: int) -> ParameterCount:
        return ParameterCount(self.products * times, self.others * times, self.idle * times)

    def __add__(self, other: ParameterCount) -> ParameterCount:
        return ParameterCount(self.products + other.products, self.others + other.others, self.idle + other.idle)


def count_parameters(model: ModelSection, vocabulary_size: int) -> int:
    """Count the whole model with this padded vocabulary size: layers, embeddings and the last norm."""
    embeddings = 2 if model.untie_embeddings_and_output_weights else 1
    last = model.hidden_size * _of_norm(model)
    return count_layers(model).total + embeddings * vocabulary_size * model.hidden_size + last


def count_layers(model: ModelSection) -> ParameterCount:
    """Count all layers, each with two norms."""
    having = sum(expert_layers(model))
    kinds = [(count_feed_forward(model, model.ffn_hidden_size), model.num_layers - having)]
    if having:
        kinds.append((count_experts(model), having))
    same = count_attention(model) + ParameterCount(0, 2 * model.hidden_size * _of_norm(model))
    return sum(((same + part) * number for part, number in kinds), ParameterCount(0, 0))


def count_attention(model: ModelSection) -> ParameterCount:
    """Count attention's projections to queries, keys, values and, with a gate, output weights, and the last one."""
    transformer, hidden = model.transformer, model.hidden_size
    if transformer.multi_latent_attention:
        return _latent_attention(model)
    queries = model.num_attention_heads * model.head_channels
    into = queries * (2 if transformer.attention_output_gate else 1) + 2 * model.num_query_groups * model.head_channels
    biases = into if transformer.add_bias_linear or transformer.add_qkv_bias else 0
    biases += hidden if transformer.add_bias_linear else 0
    norms = 2 * model.head_channels * _of_norm(model) if transformer.qk_layernorm else 0
    return ParameterCount(hidden * into + queries * hidden, biases + norms)


def _latent_attention(model: ModelSection) -> ParameterCount:
    """Count the projections from the residual stream to two narrow vectors, from these to all heads, and back."""
    transformer, hidden, heads = model.transformer, model.hidden_size, model.num_attention_heads
    shared, narrow, narrow_q = transformer.qk_pos_emb_head_dim, transformer.kv_lora_rank, transformer.q_lora_rank
    query = transformer.qk_head_dim + shared
    products = hidden * heads * query if narrow_q is None else narrow_q * (hidden + heads * query)
    products += hidden * (narrow + shared) + narrow * heads * (transformer.qk_head_dim + transformer.v_head_dim)
    products += heads * transformer.v_head_dim * hidden
    norms = ((narrow_q or 0) + narrow) * _of_norm(model) if transformer.qk_layernorm else 0
    return ParameterCount(products, norms + (hidden if transformer.add_bias_linear else 0))


def count_feed_forward(model: ModelSection, width: int) -> ParameterCount:
    """Count a feed-forward layer of this width: three matrices with a gate, as in SwiGLU, else two."""
    transformer, hidden = model.transformer, model.hidden_size
    into = width * (2 if transformer.gated_linear_unit else 1)
    biases = into + hidden if transformer.add_bias_linear else 0
    return ParameterCount(hidden * into + width * hidden, biases + (2 if transformer.activation_func == "xielu" else 0))


def count_experts(model: ModelSection) -> ParameterCount:
    """Count router and experts of a layer."""
    transformer, hidden = model.transformer, model.hidden_size
    number = transformer.num_moe_experts
    assert number is not None
    one = count_feed_forward(model, expert_width(model))
    chosen = min(transformer.moe_router_topk, number)
    count = ParameterCount(hidden * number, number if transformer.add_bias_linear else 0)  # the router
    count += ParameterCount(chosen * one.products, chosen * one.others, (number - chosen) * one.total)
    if (shared := transformer.moe_shared_expert_intermediate_size) is not None:
        count += count_feed_forward(model, shared) + ParameterCount(
            hidden if transformer.moe_shared_expert_gate else 0, 0
        )
    return count


def expert_width(model: ModelSection) -> int:
    return model.transformer.moe_ffn_hidden_size or model.ffn_hidden_size


def routed_parameters(model: ModelSection) -> int:
    """Count the parameters of all routed experts, which expert parallelism splits over ranks."""
    number = model.transformer.num_moe_experts or 0
    return sum(expert_layers(model)) * number * count_feed_forward(model, expert_width(model)).total


def _of_norm(model: ModelSection) -> int:
    return 2 if model.transformer.normalization == "LayerNorm" else 1


def flops_per_token(model: ModelSection, vocabulary_size: int, seq_length: int) -> float:
    """Return the model FLOPs of one token, forward and backward, without recomputation.

    6 x (parameters in matrix products: no embedding lookup, norms, biases, or idle experts) + 12 x channels of all
    heads x the mean number of tokens that a token attends to, summed over layers: half of the sequence, since half of
    the scores are masked (PaLM, arXiv 2204.02311, appendix B, counts them all), or those in a sliding window.
    """
    products = count_layers(model).products + vocabulary_size * model.hidden_size
    return 6.0 * products + 12.0 * _scored(model) * sum(
        _seen(model, layer, seq_length) for layer in range(model.num_layers)
    )


def _scored(model: ModelSection) -> float:
    """Return the channels of all heads: the mean of query channels and value channels."""
    transformer = model.transformer
    if not transformer.multi_latent_attention:
        return model.num_attention_heads * model.head_channels
    channels = transformer.qk_head_dim + transformer.qk_pos_emb_head_dim + transformer.v_head_dim
    return model.num_attention_heads * channels / 2


def _seen(model: ModelSection, layer: int, seq_length: int) -> float:
    """Return the mean number of tokens that a token attends to in a layer, counted from 0."""
    window = model.transformer.window_of(layer)
    if window is None or window + 1 >= seq_length:
        return seq_length / 2
    return (window + 1) * (1 - window / (2 * seq_length))


def pad_to_multiple(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class GpuMemoryEstimate:
    """Bytes of the fullest GPU by purpose; without CUDA's own, NCCL's buffers and fragmentation."""

    state: float
    """Weights, gradients, and this rank's part of the optimizer's state."""
    activations: float
    """Activations kept for the backward pass."""
    loss: float

    @property
    def total(self) -> float:
        return self.state + self.activations + self.loss


def memory_bytes(config: RunConfig, vocabulary_size: int) -> GpuMemoryEstimate:
    """Estimate the memory of the fullest GPU, by formula: flash attention, fused SwiGLU, sequence parallelism.

    State per parameter in bf16: 2 (weights) + 4 (gradients; 2 in bf16), and 12 (fp32 weights, two moments; less in
    smaller types) over the ranks that share the distributed optimizer's state; in fp32 4 + 4, and 8. Gradients in bf16
    are widened, 4 more of the shared part, unless the optimizer is precision-aware.

    Activations per token and layer: 4 hidden (inputs and outputs of two norms) + 4 x channels of all heads (q, k and v
    as if spread over them, attention's output) + 3 ffn (2 without a gate), over the tensor-parallel ranks; of a
    recomputed layer its input. Experts are split over their ranks, and each gets equally many tokens. The first stage
    of p in v parts holds p (1 + (p - 1) / (p v)) micro-batches (arXiv 2104.04473 and 2205.05198), the last one ((v - 1)
    p + 1) / v and the loss: logits, twice in fp32, and their gradient. With deferred gradients of the output layer, it
    keeps the logits' gradient and the output layer's input of those micro-batches.
    """
    model, parallel, training = config.model, config.parallel, config.training
    vocabulary_size = pad_to_multiple(vocabulary_size, model.make_vocab_size_divisible_by)
    tensor, pipeline, parts = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size, 1
    layers = model.num_layers // pipeline
    if parallel.num_layers_per_virtual_pipeline_stage:
        parts = layers // parallel.num_layers_per_virtual_pipeline_stage
    again = 0
    if training.recompute_granularity == "full":
        again = min(layers, parts * training.recompute_num_layers if training.recompute_num_layers else layers)
    split = routed_parameters(model) / parallel.expert_model_parallel_size / parallel.expert_tensor_size / pipeline
    own = (count_parameters(model, vocabulary_size) - routed_parameters(model)) / tensor / pipeline
    tokens = training.seq_length * training.micro_batch_size / tensor / parallel.context_parallel_size
    width, fixed, divided = _bytes_a_parameter(config)
    layer = width * (4 * model.hidden_size + 4 * _scored(model) + _kept_of_feed_forward(model)) * tokens
    kept = (layers - again) * layer + again * width * model.hidden_size * tokens + (layer if again else 0)
    state = own * (fixed + divided / config.optimizer_parts) + split * (fixed + divided / config.expert_optimizer_parts)
    loss = (2 * width + 4 + 4) * vocabulary_size * tokens
    if parallel.defer_embedding_wgrad_compute:
        batches = training.global_batch_size // (training.micro_batch_size * config.data_parallel_size)
        inputs = model.hidden_size * (1 if parallel.sequence_parallel else tensor)
        loss += min(parallel.wgrad_deferral_limit or batches, batches) * width * (vocabulary_size + inputs) * tokens
    last = GpuMemoryEstimate(state=state, activations=kept * ((parts - 1) * pipeline + 1) / parts, loss=loss)
    if pipeline == 1:
        return last
    first = GpuMemoryEstimate(
        state=state, activations=kept * pipeline * (1 + (pipeline - 1) / (pipeline * parts)), loss=0.0
    )
    return max(first, last, key=lambda stage: stage.total)


_WIDTHS = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}


def _bytes_a_parameter(config: RunConfig) -> tuple[int, int, int]:
    """Return the bytes of a weight; of weight and gradient on every rank; of the shared optimizer state."""
    if config.training.resolved_precision != "bf16":
        return 4, 8, 8
    optimizer = config.optimizer
    types = (optimizer.main_params_dtype, optimizer.exp_avg_dtype, optimizer.exp_avg_sq_dtype)
    gradient = _WIDTHS[optimizer.main_grads_dtype]
    widened = 4 if gradient < 4 and not optimizer.use_precision_aware_optimizer else 0
    return 2, 2 + gradient, sum(_WIDTHS[each] for each in types) + widened


def _kept_of_feed_forward(model: ModelSection) -> float:
    """Return the kept channels per token of feed-forward layers, on average over layers. Each expert of a token gets a
    copy of it and returns another."""
    transformer = model.transformer
    matrices = 3 if transformer.gated_linear_unit else 2
    each = matrices * expert_width(model) + 2 * model.hidden_size
    with_experts = transformer.moe_router_topk * each + matrices * (
        transformer.moe_shared_expert_intermediate_size or 0
    )
    share = sum(expert_layers(model)) / model.num_layers
    return (1 - share) * matrices * model.ffn_hidden_size + share * with_experts


PEAK_FLOPS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835.5e12,
    "H100": 989.4e12,
    "H200 NVL": 835.5e12,
    "H200": 989.4e12,  # the GPU of a GH200 too
    "GB200": 2500e12,
    "B200": 2250e12,
    "MI250X": 191.5e12,  # torch's device is one of the module's two dies
    "MI300X": 1307.4e12,
    "MI325X": 1307.4e12,
}
"""FLOP/s of dense bf16 products by part of the device name, of which the first counts. From NVIDIA's and AMD's data
sheets; where NVIDIA's has the figure with sparsity alone, half of it."""


def peak_flops(device_name: str) -> float | None:
    """Return dense bf16 FLOP/s of a GPU; None if the device is unknown."""
    return next((peak for name, peak in PEAK_FLOPS.items() if name in device_name), None)


def possible_names(model: ModelSection) -> list[str]:
    """Return all names that parameters of a model without `model.spec` may have, by any implementation of layers."""
    latent, experts = model.transformer.multi_latent_attention, range(model.transformer.num_moe_experts or 0)
    attention = ("q_proj", "q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj") if latent else ("qkv",)
    modules = ["input_layernorm", "pre_mlp_layernorm", "mlp.linear_fc1", "mlp.linear_fc2", "mlp.activation_func"]
    modules += [f"self_attention.linear_{name}" for name in ("proj", *attention)]
    modules += [f"self_attention.{name}_layernorm" for name in ("q", "kv" if latent else "k")]
    if experts:
        modules += [f"mlp.{name}" for name in ("router", "experts", "shared_experts")]
        each = ["shared_experts", *(f"experts.local_experts.{n}" for n in experts)]
        modules += [f"mlp.{name}.linear_fc{k}" for name in each for k in (1, 2)]
    kinds = ("weight", "bias", "layer_norm_weight", "layer_norm_bias", "alpha_p", "alpha_n", "gate_weight", "weight1")
    names = [f"{module}.{kind}" for module in modules for kind in (*kinds, "weight2")]
    names += [f"mlp.experts.linear_fc{k}.{kind}{n}" for n in experts for k in (1, 2) for kind in kinds[:2]]
    once = ["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "decoder.final_layernorm.bias"]
    once += ["output_layer.weight"] if model.untie_embeddings_and_output_weights else []
    return once + [f"decoder.layers.{layer}.{name}" for layer in range(model.num_layers) for name in names]
