"""What a user may name by import path: optimizers, losses, layers, models."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from relayrun.train.model.attention import CausalAttention
from relayrun.train.model.layers import Norm, NormWithExtraState


class Signs(torch.optim.Optimizer):
    """Steps by the sign of a mean of gradients, and keeps all kinds of state for that."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "beta": beta, "calls": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["calls"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state["mean"] = torch.zeros_like(parameter)
                    state["half"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["steps"], state["count"] = 0, torch.zeros(())
                state["steps"] += 1
                state["count"] += 1
                assert state["steps"] == group["calls"] == state["count"].item()
                state["mean"].lerp_(parameter.grad, 1 - group["beta"])
                state["half"].add_(parameter.grad.bfloat16())
                step = (state["mean"] + 0.1 * state["half"].float()).sign() / (1 + 0.01 * state["steps"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])


class Rows(torch.optim.Optimizer):
    """Divides by the norm of each row over time: a tensor of another shape than the parameter's."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad.reshape(len(parameter), -1)
                if not state:
                    state["rows"] = torch.zeros(len(parameter), 1)
                state["rows"].lerp_(gradient.pow(2).mean(dim=1, keepdim=True), 0.1)
                step = (gradient / (state["rows"].sqrt() + 1e-8)).view_as(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(step, alpha=-group["lr"])


class NoDecay(torch.optim.SGD):
    """Takes no weight decay."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")


def z_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits, labels) + 1e-2 * logits.logsumexp(dim=-1) ** 2


def doubled(losses: torch.Tensor) -> torch.Tensor:
    return 2 * losses


def of_nothing(labels: torch.Tensor) -> torch.Tensor:
    return labels.float()


def mean_of_all(losses: torch.Tensor) -> torch.Tensor:
    return losses.mean()


def relative_to_the_mean(losses: torch.Tensor) -> torch.Tensor:
    """Depends on which tokens a rank has."""
    return losses / losses.detach().mean()


def same_layers(config: TransformerConfig) -> ModuleSpec:
    """relayrun's own layers."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    return layer


def same_block(config: TransformerConfig, vp_stage: int | None) -> TransformerBlockSubmodules:
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return TransformerBlockSubmodules(layer_specs=[same_layers(config)] * count, layer_norm=NormWithExtraState)


def own_model(
    config: TransformerConfig,
    vocab_size: int,
    max_sequence_length: int,
    pre_process: bool,
    post_process: bool,
    mtp_block_spec: ModuleSpec | None = None,
) -> GPTModel:
    return GPTModel(
        config,
        same_block(config, None),
        vocab_size,
        max_sequence_length,
        pre_process=pre_process,
        post_process=post_process,
        position_embedding_type="rope",
        rotary_base=500_000,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp_block_spec,
    )


def multi_token_model(
    config: TransformerConfig, vocab_size: int, max_sequence_length: int, pre_process: bool, post_process: bool
) -> GPTModel:
    """Predicts a second token with megatron-core's module, whose loss is added inside the model."""
    config.mtp_num_layers = 1
    block = get_gpt_mtp_block_spec(config, same_block(config, None), use_transformer_engine=False)
    return own_model(config, vocab_size, max_sequence_length, pre_process, post_process, mtp_block_spec=block)


def no_model(config: TransformerConfig) -> str:
    return "a model"
