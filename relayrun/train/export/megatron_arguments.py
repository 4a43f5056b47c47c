"""A run's settings under the names of Megatron-LM's arguments, as its checkpoints keep them."""

from __future__ import annotations

from typing import Any

import torch

from relayrun.config.compose.schema import RunConfig
from relayrun.tokens.order.progress import TrainingProgress


def checkpoint_position(common: dict[str, Any], config: RunConfig, iteration: int) -> TrainingProgress:
    """Return where in its data a checkpoint stands. `common`: its common part; an imported one has no progress."""
    sizes = config.training.batch_sizes
    return (
        TrainingProgress.resume(common["progress"], sizes)
        if "progress" in common
        else TrainingProgress(sizes, iteration=iteration)
    )


def megatron_arguments(
    config: RunConfig, vocabulary: int, dtype: torch.dtype, position: TrainingProgress
) -> dict[str, Any]:
    """Return what Megatron's programs and tools read of a checkpoint's arguments.

    `vocabulary`: padded. `dtype`: that of the weights.
    """
    model, training, optimizer = config.model, config.training, config.optimizer
    parallel = config.parallel
    warmup, decay = config.lr_steps(position.reaches)
    return {
        "num_layers": model.num_layers,
        "hidden_size": model.hidden_size,
        "ffn_hidden_size": model.ffn_hidden_size,
        "num_attention_heads": model.num_attention_heads,
        "group_query_attention": model.num_query_groups != model.num_attention_heads,
        "num_query_groups": model.num_query_groups,
        "kv_channels": model.hidden_size // model.num_attention_heads,
        "seq_length": training.seq_length,
        "max_position_embeddings": training.seq_length,
        "position_embedding_type": "rope",
        "use_rotary_position_embeddings": True,
        "add_position_embedding": True,
        "rotary_base": model.rotary_base,
        "rotary_percent": 1.0,
        "rotary_interleaved": False,
        "use_rope_scaling": model.rope_scaling_factor is not None,
        "rope_scaling_factor": model.rope_scaling_factor or 8.0,
        "normalization": "RMSNorm",
        "norm_epsilon": model.norm_epsilon,
        "init_method_std": model.init_method_std,
        "hidden_dropout": model.hidden_dropout,
        "attention_dropout": model.attention_dropout,
        "swiglu": True,
        "add_bias_linear": False,
        "add_qkv_bias": False,
        "qk_layernorm": False,
        "untie_embeddings_and_output_weights": model.untie_embeddings_and_output_weights,
        "make_vocab_size_divisible_by": model.make_vocab_size_divisible_by,
        "padded_vocab_size": vocabulary,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "params_dtype": dtype,
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "iteration": position.iteration,
        "consumed_train_samples": position.consumed_samples,
        "skipped_train_samples": 0,
        "consumed_valid_samples": 0,
        "train_iters": training.steps,
        "micro_batch_size": training.micro_batch_size,
        "global_batch_size": training.global_batch_size,
        "rampup_batch_size": training.rampup_batch_size,
        "seed": training.seed,
        "save_interval": config.checkpoint.interval,
        "optimizer": "adam",
        "lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_iters": decay,
        "lr_warmup_iters": warmup,
        "lr_warmup_fraction": None,
        "lr_wsd_decay_iters": optimizer.lr_wsd_decay_steps,
        "lr_wsd_decay_style": optimizer.lr_wsd_decay_style,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.adam_beta1,
        "adam_beta2": optimizer.adam_beta2,
        "adam_eps": optimizer.adam_eps,
        "clip_grad": optimizer.clip_grad,
        "reset_position_ids": config.data.reset_position_ids,
        "reset_attention_mask": config.data.reset_attention_mask,
        "eod_mask_loss": config.data.eod_mask_loss,
        "ckpt_format": "torch_dist",
        "use_distributed_optimizer": False,
        "ckpt_fully_parallel_save": True,
        "no_save_optim": False,
        "no_save_rng": False,
        "sequence_parallel": parallel.sequence_parallel,
    }


def layout_arguments(config: RunConfig) -> dict[str, Any]:
    """Return the arguments that say how the model was split over ranks."""
    parallel = config.parallel
    return {
        "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
        "pipeline_model_parallel_size": parallel.pipeline_model_parallel_size,
        "context_parallel_size": parallel.context_parallel_size,
        "world_size": config.world_size,
        "data_parallel_size": config.data_parallel_size,
    }


def scheduler_state(config: RunConfig, position: TrainingProgress) -> dict[str, Any]:
    """Return the state of Megatron's scheduler, which counts samples where a run counts iterations."""
    optimizer, size = config.optimizer, config.training.global_batch_size
    warmup, decay = config.lr_steps(position.reaches)
    return {
        "max_lr": optimizer.lr,
        "min_lr": optimizer.min_lr,
        "lr_warmup_steps": warmup * size,
        "num_steps": position.iteration * size,
        "lr_decay_style": optimizer.lr_decay_style,
        "lr_decay_steps": decay * size,
        "start_wd": optimizer.weight_decay,
        "end_wd": optimizer.weight_decay,
        "wd_incr_style": "constant",
        "wd_incr_steps": config.training.steps * size,
    }
