"""GPTModel of megatron-core from a config: its TransformerConfig, this rank's stage, and the pass of micro-batches.

RMSNorm, SwiGLU, rotary positions and grouped-query attention (arXiv 2407.21783), or what `model.transformer` sets, in
fp32 or bf16. `model.layers` has the modules of the layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from relayrun.config.compose.layout_rules import expert_layers
from relayrun.config.compose.schema import ModelSection, RunConfig
from relayrun.config.sections.model import LLAMA_DEFAULTS, LatentAttentionFields
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.order import sample_rows
from relayrun.train import distributed, megatron_versions, user_code
from relayrun.train.distributed import LossSum, Ranks, to_device
from relayrun.train.model import compiled, experts, kernels, layers
from relayrun.train.model.experts import AuxiliaryLosses, RouterLosses
from relayrun.train.model.layers import ACTIVATION_FUNCTIONS
from relayrun.train.model.loss import LossResult, UserLoss, loss_function
from relayrun.train.model.packed_documents import PackedDocuments, RowwiseRotaryEmbedding, positions_for
from relayrun.train.model.size import flops_per_token, pad_to_multiple
from relayrun.train.timers import Timers


def transformer_arguments(model: ModelSection, *, on_gpu: bool) -> dict[str, Any]:
    """Return the settings of `model.transformer` as fields of a TransformerConfig. Raises FatalTrainingError if the
    installed megatron-core lacks a field that is set."""
    settings = model.transformer
    given = settings.model_dump() | {name: getattr(settings, name) for name in LLAMA_DEFAULTS}
    if settings.multi_latent_attention:
        given |= {name: getattr(settings, name) for name in LatentAttentionFields.model_fields}
        given |= {"rotary_base": model.rotary_base, "rotary_percent": model.rotary_percent}
    kind = MLATransformerConfig if settings.multi_latent_attention else TransformerConfig
    known = {field.name for field in dataclasses.fields(kind)}
    if missing := sorted(set(given) - known):
        raise FatalTrainingError(
            f"megatron-core {version('megatron-core')}, which the ranks have, knows no {', '.join(missing)}",
            hint="leave it out of model.transformer, or install a version that has it",
        )
    function = ACTIVATION_FUNCTIONS[settings.activation_func]
    # only this kernel computes all settings: the others ignore an offset or a bound
    plain = settings.glu_linear_offset == 0 and settings.activation_func_clamp_value is None
    fused = on_gpu and function is functional.silu and settings.gated_linear_unit and plain
    given |= {"activation_func": function, "bias_activation_fusion": fused}
    if settings.window_size is not None:
        given["window_size"] = tuple(settings.window_size)
    return given


megatron_versions.quiet_megatron()


@dataclass(frozen=True, kw_only=True)
class MicroBatch(sample_rows.RowBatch):
    """Input of one forward pass of a rank."""

    weights: npt.NDArray[np.float32] | None = None
    """Weights of the samples in the reported loss, of shape [micro_batch_size]; None: 1."""


class StepBuffers:
    """Buffers of the model during a step, for example the biases that balance experts.

    The forward pass and `finalize_model_grads` change them before the update is decided, and while a save may still
    read them. So each step changes copies.
    """

    def __init__(self, chunks: Sequence[torch.nn.Module]) -> None:
        self._modules = [module for chunk in chunks for module in chunk.modules()]
        self._kept: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor]] = []

    def begin_step(self) -> None:
        """Let the next step change copies; discard the changes of an unfinished step."""
        self.end_step(moved=False)
        found = [(module._buffers, name, each) for module in self._modules for name, each in module._buffers.items()]
        self._kept = [(buffers, name, buffer) for buffers, name, buffer in found if buffer is not None]
        copies = {id(buffer): buffer.clone() for _, _, buffer in self._kept}  # modules may share a buffer
        for buffers, name, buffer in self._kept:
            buffers[name] = copies[id(buffer)]

    @torch.no_grad()
    def end_step(self, *, moved: bool) -> None:
        """Put the buffers back, with or without the changes of the step."""
        for buffers, name, buffer in self._kept:
            copy = buffers[name]
            if not moved:
                buffers[name] = buffer
            elif copy is not None and (copy.shape, copy.dtype) == (buffer.shape, buffer.dtype):
                buffers[name] = buffer.copy_(copy)
        self._kept = []


class ModelStage:
    """Model chunks of this rank's pipeline stage, with megatron-core's gradient buffers."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        vocabulary_size: int,
        *,
        eod: int | None = None,
        counted: npt.NDArray[np.int64] | None = None,
        progress: Callable[[], None] = lambda: None,
    ) -> None:
        """Build the stage and initialize it from the run's seed; then seed the generators for training.

        `counted`: target tokens that count (`data.mask_tokens_except`); None: all count. `progress` is called before
        every micro-batch.
        """
        self.padded_vocabulary_size = pad_to_multiple(vocabulary_size, config.model.make_vocab_size_divisible_by)
        self.seq_length = config.training.seq_length
        self.device = ranks.device
        self.ranks = ranks
        self._config = config.model
        self._loss_mean = config.training.resolved_loss_mean
        self._own_loss = _user_loss(config.training.loss, ranks)
        self.with_token_loss = True
        """False leaves the gradients of the other losses alone."""
        size = self.padded_vocabulary_size
        self._masks = sample_rows.RowMasks(config.data, eod=eod, counted=counted, vocabulary_size=size)
        self._progress = progress
        self.dtype = torch.bfloat16 if config.training.resolved_precision == "bf16" else torch.float32
        self.batches_multiple = ranks.pipeline_size if ranks.virtual_stages > 1 else 1
        """`run` takes a multiple of this number of micro-batches."""
        self._overlap_param_gather = config.parallel.overlap_param_gather
        self.timers = Timers(config.tracking.timing_log_level, ranks.device)
        self.transformer = transformer = _transformer_config(config, ranks, self.dtype)
        """TransformerConfig of all modules."""
        transformer.timers = self.timers if self.timers.level else None
        self._warmup_flush = config.parallel.overlap_p2p_communication_warmup_flush
        self._layers = layers.layer_implementation(config)  # reports a missing TransformerEngine first
        kernels.check_fp8(config.model.transformer, transformer)
        if transformer.tp_comm_overlap:
            kernels.init_tp_overlap_buffers(config, transformer)
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=config.optimizer.main_grads_dtype == "fp32",
            use_distributed_optimizer=config.parallel.use_distributed_optimizer,
            overlap_grad_reduce=config.parallel.overlap_grad_reduce,
            overlap_param_gather=config.parallel.overlap_param_gather,
            num_distributed_optimizer_instances=config.parallel.num_distributed_optimizer_instances,
        )
        self._restarted: list[RowwiseRotaryEmbedding] = []
        """Rotary embeddings that take the positions of each micro-batch; empty if positions do not restart."""
        seed = config.training.seed
        distributed.seed_generators(seed, 0, ranks.pipeline_rank)  # the weights of all data-parallel replicas are equal
        parts = [self._build(config, transformer, stage) for stage in range(ranks.virtual_stages)]
        distributed.seed_generators(seed, 1 + ranks.data_parallel_rank, ranks.pipeline_rank)
        self.chunks = [
            DistributedDataParallel(
                config=transformer, ddp_config=ddp_config, module=part, disable_bucketing=number > 0
            )
            for number, part in enumerate(parts)
        ]
        """Parts of the model on this rank, one per virtual stage."""
        if config.parallel.overlap_grad_reduce:  # gradients are reduced with the last micro-batch alone
            hooks = [chunk.no_sync for chunk in self.chunks]
            transformer.no_sync_func = hooks if len(hooks) > 1 else hooks[0]
            if config.parallel.defer_embedding_wgrad_compute and ranks.is_last_stage:
                transformer.finalize_model_grads_func = kernels.reduce_output_layer_last(self.chunks[-1])
        kernels.log_gpu_state(ranks)
        self._positions = torch.arange(self.seq_length, device=ranks.device)
        self._by_token = transformer.calculate_per_token_loss
        self.router_losses = RouterLosses(self.chunks, config.model.transformer, ranks, by_token=self._by_token)
        self.step_buffers = StepBuffers(self.chunks)
        layers_with_experts = sum(expert_layers(config.model))
        self.auxiliary_losses = AuxiliaryLosses(config.model.transformer, layers=layers_with_experts, ranks=ranks)
        """Reported losses of expert routers."""

    def _build(self, config: RunConfig, transformer: TransformerConfig, stage: int) -> torch.nn.Module:
        virtual = {"ignore_virtual": False, "vp_stage": stage}
        arguments: dict[str, Any] = {
            "vocab_size": self.padded_vocabulary_size,
            "max_sequence_length": self.seq_length,
            "pre_process": parallel_state.is_pipeline_first_stage(**virtual),
            "post_process": parallel_state.is_pipeline_last_stage(**virtual),
            "vp_stage": stage if self.ranks.virtual_stages > 1 else None,
        }
        spec = self._spec(config, transformer, stage, arguments)
        if isinstance(spec, torch.nn.Module):
            return self._finished(config, transformer, spec)
        gpt = GPTModel(
            config=transformer,
            transformer_layer_spec=spec,
            share_embeddings_and_output_weights=not config.model.untie_embeddings_and_output_weights,
            position_embedding_type="rope",
            rotary_percent=config.model.rotary_percent,
            rotary_base=config.model.rotary_base,
            rope_scaling=config.model.rope_scaling_factor is not None,
            rope_scaling_factor=config.model.rope_scaling_factor or 1.0,
            **arguments,
        )
        return self._finished(config, transformer, gpt)

    def _spec(
        self, config: RunConfig, transformer: TransformerConfig, stage: int, arguments: dict[str, Any]
    ) -> ModuleSpec | TransformerBlockSubmodules | torch.nn.Module:
        """Return the spec of the layers of a virtual stage, or the whole model if `model.spec` returns one."""
        block = layers.block_spec(self._layers, transformer, stage)
        if config.model.spec is None:
            return block
        found = layers.build_user_model(config.model.spec, transformer, **arguments)
        if isinstance(found, ModuleSpec):  # megatron-core would add a last norm without sequence parallelism
            return replace(block, layer_specs=[found] * len(block.layer_specs))
        return found

    def _finished(self, config: RunConfig, transformer: TransformerConfig, gpt: torch.nn.Module) -> torch.nn.Module:
        if config.data.restarts_positions:
            self._restart_positions(gpt)
        if config.parallel.separates_experts:
            experts.reduce_over_own_replicas(gpt)
        gpt.model_type = ModelType.encoder_or_decoder  # the schedules ask for it
        if config.parallel.defer_embedding_wgrad_compute:
            kernels.defer_output_layer_alone(gpt)
        if kernels.compiles_loss(config, self.ranks.device):
            gpt.compute_language_model_loss = compiled.language_model_loss  # type: ignore[assignment]
        gpt.to(self.ranks.device)
        return Float16Module(transformer, gpt) if self.dtype is torch.bfloat16 else gpt

    def _restart_positions(self, gpt: Any) -> None:
        """Let rotary positions follow `position_ids`: the model has one embedding, or each layer has its own."""
        latent = self._config.transformer.multi_latent_attention
        for owner in [layer.self_attention for layer in gpt.decoder.layers] if latent else [gpt]:
            if not hasattr(owner, "rotary_pos_emb"):
                raise ConfigError(
                    f"{self._config.spec} returned a model without rotary_pos_emb, which would restart positions",
                    where="model.spec",
                    hint="set data.reset_position_ids=false (with document-window packing=none), or give the model a "
                    "rotary_pos_emb",
                )
            owner.rotary_pos_emb = positions_for(owner.rotary_pos_emb, self.seq_length)
            self._restarted.append(owner.rotary_pos_emb)

    def train_mode(self, mode: bool) -> None:
        for chunk in self.chunks:
            chunk.train(mode)

    def sharded_state_dict(self, metadata: dict[str, Any]) -> dict[str, Any]:
        """Return the state by chunk; names in a checkpoint do not depend on the chunks."""
        if self._overlap_param_gather:  # else the weights before the last update would be saved
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return {
            str(number): chunk.module.sharded_state_dict(metadata=metadata) for number, chunk in enumerate(self.chunks)
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load the result of a load into `sharded_state_dict`."""
        self.step_buffers.end_step(moved=False)
        for number, chunk in enumerate(self.chunks):
            chunk.module.load_state_dict(state[str(number)], strict=True)

    def parameters(self) -> int:
        """Return the parameters of the whole model over its stages and tensor-parallel parts, padding included. A tied
        output layer on another stage than the embeddings is counted once."""
        own = 0
        whole = parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        experts = parallel_state.get_expert_data_parallel_rank() == 0
        for parameter in (parameter for chunk in self.chunks for parameter in chunk.parameters()):
            # experts that are split over ranks have other replicas than the rest of the model
            first = whole if getattr(parameter, "allreduce", True) else experts
            split = getattr(parameter, "tensor_model_parallel", False)
            if first and (split or self.ranks.tensor_rank == 0) and not getattr(parameter, "shared", False):
                own += parameter.numel()
        return sum(self.ranks.gather(own))

    def flops_per_token(self) -> float:
        """Forward and backward, see `size.flops_per_token`."""
        return flops_per_token(self._config, self.padded_vocabulary_size, self.seq_length)

    def zero_grad(self) -> None:
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def run(self, batches: Sequence[MicroBatch], *, train: bool) -> LossSum:
        """Run the micro-batches; return the sum of their losses, 0 of 0 except on the last pipeline stage.

        With `train`, gradients of the loss over the global batch (its mean: `training.loss_mean`) are accumulated,
        reduced over the data-parallel ranks, and left in the gradient buffers.
        """
        if train:
            self.step_buffers.begin_step()
            if self.auxiliary_losses:  # gradients are divided by the counted tokens, or by the micro-batches
                every = len(batches) * self.ranks.data_parallel_size
                counts = [self._masks.loss(batch) for batch in batches] if self._by_token else []
                tokens = sum(float(each.sum()) for each in counts if each is not None)
                (counted,) = self.ranks.sum_over_samples([tokens]) if self._by_token else (every,)
                self.router_losses.scale(max(counted, 1.0) / every)
        # forward passes never wait for their last message, which gloo then does not send (megatron-core 0.16.1)
        self.transformer.overlap_p2p_comm_warmup_flush = self._warmup_flush and train
        iterators = [iter(batches) for _ in self.chunks]
        losses: list[torch.Tensor] = get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=self.seq_length,
            micro_batch_size=len(batches[0].tokens),
            forward_only=not train,
        )
        reports: list[tuple[float, float]] = torch.stack(losses).tolist() if losses else []
        return LossSum(total=sum(total for total, _ in reports), count=sum(count for _, count in reports))

    def _forward(
        self, batches: Iterator[MicroBatch], ddp: torch.nn.Module
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], LossResult]]:
        self._progress()
        batch = next(batches)
        device = self.ranks.device
        tokens = to_device(torch.from_numpy(batch.tokens), device).long()
        weights = None if batch.weights is None else to_device(torch.from_numpy(batch.weights), device)
        parts: dict[str, Any] = {
            "input_ids": tokens[:, :-1].contiguous(),
            "position_ids": self._position_ids(batch),
            "labels": tokens[:, 1:].contiguous(),
        }
        if (counts := self._masks.loss(batch)) is not None:
            parts["loss_mask"] = to_device(torch.from_numpy(counts), device)
        if self.ranks.context_size > 1:  # two parts of the sequence per rank balance the work of attention
            parts = megatron_versions.batch_of_context_rank(parts)
        mask = parts.pop("loss_mask", None)
        for positions in self._restarted:
            positions.ids = parts["position_ids"]
        labels, own = parts["labels"], self._own_loss
        if own is not None and own.wants_logits:
            parts["labels"] = None
        output = ddp(**parts, attention_mask=None, packed_seq_params=self._documents(batch))
        context = self.ranks.context_size
        mean = loss_function(self._loss_mean, mask=mask, weights=weights, context_size=context)
        loss = mean if own is None else lambda output: mean(own(output, labels, mask))
        return output, loss if self.with_token_loss else lambda output: loss(0.0 * output)

    def _position_ids(self, batch: MicroBatch) -> torch.Tensor:
        found = self._masks.positions(batch)
        if found is None:
            return self._positions.expand(len(batch.tokens), -1)
        return to_device(torch.from_numpy(found), self.ranks.device)

    def _documents(self, batch: MicroBatch) -> PackedDocuments | None:
        """Return the documents that attention is restricted to; None for plain causal attention."""
        found = self._masks.documents(batch)
        return None if found is None else PackedDocuments(lengths=found, device=self.ranks.device)


def _user_loss(path: str | None, ranks: Ranks) -> UserLoss | None:
    if path is None:
        return None
    hint = "write module:function, where the ranks' Python finds its module; see `relayrun help own-code`"
    return user_code.agree_on_user_code(lambda: UserLoss(path), ranks, setting="training.loss", hint=hint)


def _transformer_config(config: RunConfig, ranks: Ranks, dtype: torch.dtype) -> TransformerConfig:
    model, defers = config.model, config.parallel.defer_embedding_wgrad_compute
    fused = kernels.choose_fused_kernels(config, ranks.device)
    if defers:
        kernels.install_gradient_kernels(say=ranks.rank == 0)
    on_gpu = ranks.device.type == "cuda"
    kernels.check_compiler(config, ranks)
    recompute, some_layers = config.training.recompute_granularity, config.training.recompute_num_layers
    kind = MLATransformerConfig if model.transformer.multi_latent_attention else TransformerConfig
    return kind(
        **transformer_arguments(model, on_gpu=on_gpu),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        layernorm_epsilon=model.norm_epsilon,
        init_method_std=model.init_method_std,
        hidden_dropout=model.hidden_dropout,
        attention_dropout=model.attention_dropout,
        tensor_model_parallel_size=ranks.tensor_size,
        context_parallel_size=ranks.context_size,
        expert_model_parallel_size=ranks.expert_size,
        expert_tensor_parallel_size=ranks.expert_tensor_size,
        pipeline_model_parallel_size=ranks.pipeline_size,
        virtual_pipeline_model_parallel_size=ranks.virtual_stages if ranks.virtual_stages > 1 else None,
        # two stages with several chunks would exchange several messages in one batch
        overlap_p2p_comm=ranks.virtual_stages > 1,
        batch_p2p_comm=ranks.virtual_stages == 1,
        sequence_parallel=config.parallel.sequence_parallel,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        recompute_granularity=recompute,
        recompute_modules=config.training.recompute_modules,
        recompute_method=("block" if some_layers else "uniform") if recompute == "full" else None,
        recompute_num_layers=(some_layers or 1) if recompute == "full" else None,
        use_cpu_initialization=not on_gpu,
        # torch compiles it on first use, which on a CPU takes longer than the runs there
        bias_dropout_fusion=on_gpu,
        apply_rope_fusion=fused["apply_rope_fusion"],
        tp_comm_overlap=config.parallel.tp_comm_overlap,
        finalize_model_grads_func=finalize_model_grads,
        cross_entropy_loss_fusion=bool(config.training.cross_entropy_loss_fusion),
        cross_entropy_fusion_impl=config.training.cross_entropy_fusion_impl,
        # deferred weight gradients are added to the buffer where they are computed
        gradient_accumulation_fusion=defers or fused["gradient_accumulation_fusion"],
        defer_embedding_wgrad_compute=defers,
        wgrad_deferral_limit=config.parallel.wgrad_deferral_limit,
        overlap_p2p_comm_warmup_flush=config.parallel.overlap_p2p_communication_warmup_flush,
        # sums of gradients, divided once by the counted tokens of the global batch
        calculate_per_token_loss=config.data.masks_loss and config.training.resolved_loss_mean == "token",
        deterministic_mode=config.training.deterministic,
        # a stage frees what it has sent, of which the graph needs no data; with virtual stages
        # megatron-core would free it before the send has finished, and garbage would be sent
        deallocate_pipeline_outputs=ranks.virtual_stages == 1,
    )
