"""Settings of mixtures of experts (MoE), a part of `model.transformer`; as in megatron-core's TransformerConfig."""

from __future__ import annotations

from typing import Literal

from relayrun.config.sections.base import NonEmptyList, NonNegativeFloat, Positive, Section

Balancing = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"]


class ExpertFields(Section):
    """Mixture of experts: several feed-forward layers, of which a router picks some for each token."""

    num_moe_experts: Positive | None = None
    """Experts of a layer, over all ranks; None: one feed-forward layer, no router."""
    moe_layer_freq: Positive | NonEmptyList[Literal[0, 1]] = 1
    """N: the first layer and every N-th after it has experts, the others one feed-forward layer. A list of 0 and 1, one
    for each layer: 1 has experts."""
    moe_ffn_hidden_size: Positive | None = None
    """Width of an expert; None: model.ffn_hidden_size."""
    moe_shared_expert_intermediate_size: Positive | None = None
    """Width of the experts that every token goes through, all of them together; None: there are none."""
    moe_shared_expert_gate: bool = False
    """Weigh the output of the shared experts by a gate with weights of its own."""
    moe_shared_expert_overlap: bool = False
    """Compute the shared experts while tokens travel; with moe_token_dispatcher_type alltoall, on GPUs."""
    moe_router_load_balancing_type: Balancing | NonEmptyList[Balancing] = "aux_loss"
    """How the router is led to use all experts alike: by a loss over micro-batch, sequence or global batch, by
    assignment (sinkhorn), or not at all. A list: several losses, with as many moe_aux_loss_coeff."""
    moe_router_topk: Positive = 2
    """Experts that a token goes to."""
    moe_router_num_groups: Positive | None = None
    """Groups of experts, of which the router picks moe_router_group_topk first; None: one."""
    moe_router_group_topk: Positive | None = None
    """Groups that a token's experts come from."""
    moe_router_pre_softmax: bool = False
    """Make probabilities of all experts before the best are picked, not of the picked ones."""
    moe_router_topk_scaling_factor: float | None = None
    """Factor of the picked experts' probabilities, with moe_router_pre_softmax; None: 1."""
    moe_router_score_function: Literal["softmax", "sigmoid"] = "softmax"
    """What makes a probability of a score."""
    moe_router_dtype: Literal["fp32", "fp64"] | None = None
    """Type in which the router computes and experts are weighed; None: that of the weights."""
    moe_router_enable_expert_bias: bool = False
    """Balance by a bias of each expert that is moved after every step (arXiv 2408.15664); with sigmoid."""
    moe_router_bias_update_rate: NonNegativeFloat = 1e-3
    """How far an expert's bias moves in a step."""
    moe_aux_loss_coeff: NonNegativeFloat | NonEmptyList[NonNegativeFloat] = 0.0
    """Factor of the balancing loss in the loss that is trained on; 0.01 is usual. A list: one for each loss."""
    moe_z_loss_coeff: NonNegativeFloat | None = None
    """Factor of the loss that keeps the router's scores small; 0.001 is usual, None: no such loss."""
    moe_input_jitter_eps: NonNegativeFloat | None = None
    """Noise on the router's input: factors between 1 - eps and 1 + eps; None: none."""
    moe_expert_capacity_factor: NonNegativeFloat | None = None
    """Tokens that an expert takes at most, as a multiple of an equal share; None: all that come."""
    moe_pad_expert_input_to_capacity: bool = False
    """Fill every expert's input up to its capacity, so that all shapes stay the same."""
    moe_token_drop_policy: Literal["probs", "position"] = "probs"
    """Which tokens an expert leaves out beyond its capacity: the least probable, or the last ones."""
    moe_token_dispatcher_type: Literal["allgather", "alltoall"] = "allgather"
    """How tokens travel to their experts: every rank gets all and takes its own, or each token is sent where it goes.
    Megatron's flex needs DeepEP, which relayrun does not know."""
    moe_grouped_gemm: bool = False
    """Compute a rank's experts in one product of many matrices; needs TransformerEngine."""
    moe_permute_fusion: bool = False
    """Sort tokens by their experts in one kernel; needs TransformerEngine."""
    moe_router_fusion: bool = False
    """The router's choice in one kernel; needs TransformerEngine."""
    moe_apply_probs_on_input: bool = False
    """Weigh what goes into an expert, not what comes out; with moe_router_topk 1."""
