"""The config of a native run: all its sections, and the rules between them.

Settings are declared in `relayrun.config.sections`, those of all trainers in `trainers`. A field name is Megatron's or
Slurm's, if they have one. Unknown names are errors; `relayrun.config.compose.resolve` reports them with file, line and
the nearest valid name. Other modules import the sections from here, too: these are the names imported `as` themselves.
"""

from collections.abc import Callable
from typing import Self

from pydantic import model_validator

from relayrun.config.compose import layout_rules
from relayrun.config.compose.trainers import CommandConfig as CommandConfig
from relayrun.config.compose.trainers import CommonConfig as CommonConfig
from relayrun.config.compose.trainers import MegatronConfig as MegatronConfig
from relayrun.config.compose.trainers import check_multiple
from relayrun.config.sections.checkpoint import CheckpointSection as CheckpointSection
from relayrun.config.sections.data import MOCK_ORDER as MOCK_ORDER
from relayrun.config.sections.data import DataSection as DataSection
from relayrun.config.sections.data import DataSource as DataSource
from relayrun.config.sections.job import ClusterSection as ClusterSection
from relayrun.config.sections.job import DebugSection as DebugSection
from relayrun.config.sections.job import EvaluationSection as EvaluationSection
from relayrun.config.sections.job import JobSection as JobSection
from relayrun.config.sections.model import NEEDS_TRANSFORMER_ENGINE
from relayrun.config.sections.model import ModelSection as ModelSection
from relayrun.config.sections.optimizer import OptimizerSection as OptimizerSection
from relayrun.config.sections.parallel import ParallelSection as ParallelSection
from relayrun.config.sections.training import TrainingSection as TrainingSection


class RunConfig(layout_rules.LayoutConfig):
    """All settings of a run of the native trainer.

    Raises pydantic's ValidationError for an invalid setting and for settings that contradict each other.
    """

    @property
    def optimizer_parts(self) -> int:
        """Ranks that divide the optimizer's state of a part of the model."""
        if not self.parallel.use_distributed_optimizer:
            return 1
        replicas = self.data_parallel_size * self.parallel.context_parallel_size
        return replicas // self.parallel.num_distributed_optimizer_instances

    @property
    def expert_optimizer_parts(self) -> int:
        """Ranks that divide the optimizer's state of a part of the experts."""
        if not self.parallel.use_distributed_optimizer:
            return 1
        return self.expert_replicas // self.parallel.num_distributed_optimizer_instances

    @property
    def expert_replicas(self) -> int:
        """Ranks that hold equal parts of equal experts."""
        parallel = self.parallel
        ranks = parallel.tensor_model_parallel_size * self.data_parallel_size * parallel.context_parallel_size
        return ranks // (parallel.expert_model_parallel_size * parallel.expert_tensor_size)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        """Check the rules between sections. The first broken rule is the error."""
        self._check_memory_copies()
        self._check_profile()
        self._check_layout()
        self._check_fusion()
        self._check_precision()
        layout_rules.check_expert_layout(self)
        self._check_transformer_engine()
        layout_rules.check_fp8_layout(self)
        self._check_whole_parameters()
        self._check_document_windows()
        self._check_lanes()
        self._check_schedule()
        return self

    def _check_memory_copies(self) -> None:
        if self.checkpoint.memory_interval and self.chain.recovery != "node":
            raise ValueError(
                "checkpoint.memory_interval: copies in memory are for ranks that are started again inside the job; "
                "set chain.recovery=node, or leave it out"
            )
        if self.checkpoint.memory_interval and self.optimizer.kind != "adam":
            raise ValueError(
                f"checkpoint.memory_interval: the state of the optimizer {self.optimizer.kind} is not copied to memory "
                "yet; leave it out: ranks that are started again go on from the disk"
            )

    def _check_profile(self) -> None:
        beyond = [rank for rank in self.debug.profile_ranks if rank >= self.world_size]
        if self.debug.profile is not None and beyond:
            raise ValueError(
                f"debug.profile_ranks: there is no rank {beyond[0]}; the ranks are 0 to {self.world_size - 1}"
            )

    def _check_layout(self) -> None:
        tensor, pipeline = self.parallel.tensor_model_parallel_size, self.parallel.pipeline_model_parallel_size
        context = self.parallel.context_parallel_size
        if self.world_size % self.model_parallel_size:
            raise ValueError(
                f"{self.world_size} ranks (job.nodes x job.ntasks_per_node) are no multiple of "
                f"tensor x pipeline x context parallel size {tensor} x {pipeline} x {context}"
            )
        self._check_attention()
        of_tensor = "parallel.tensor_model_parallel_size", tensor
        check_multiple("model.num_layers", self.model.num_layers, "parallel.pipeline_model_parallel_size", pipeline)
        for name in ("num_query_groups", "ffn_hidden_size", "make_vocab_size_divisible_by"):
            check_multiple(f"model.{name}", getattr(self.model, name), *of_tensor)
        if self.parallel.sequence_parallel:
            length = self.training.seq_length
            check_multiple("training.seq_length", length, *of_tensor, ", as sequence_parallel needs")
        self._check_batches()
        if (layers := self.parallel.num_layers_per_virtual_pipeline_stage) is not None:
            stage = self.model.num_layers // pipeline
            if stage % layers or stage == layers:
                raise ValueError(
                    f"the {stage} layers of a pipeline stage cannot be split into several parts of "
                    f"parallel.num_layers_per_virtual_pipeline_stage {layers}"
                )

    def _check_batches(self) -> None:
        parallel, micro = self.parallel, self.training.micro_batch_size
        stages = self.training.batch_sizes.stages
        for number, part in enumerate(stages, start=1):
            what = f"training.global_batch_size {part.size}"
            if number < len(stages):
                what = f"training.rampup_batch_size, stage {number} of {len(stages)}: {part}"
            count, rest = divmod(part.size, micro * self.data_parallel_size)
            if rest:
                raise ValueError(
                    f"{what} is no multiple of micro_batch_size x data-parallel size = {micro} x "
                    f"{self.data_parallel_size}"
                )
            if parallel.virtual_stages and count % parallel.pipeline_model_parallel_size:
                raise ValueError(
                    f"{what}: {count} micro-batches per iteration and rank are no multiple of "
                    f"parallel.pipeline_model_parallel_size {parallel.pipeline_model_parallel_size}, as virtual stages "
                    "need"
                )
            if parallel.defer_embedding_wgrad_compute and count == 1:
                raise ValueError(
                    f"{what} is one micro-batch per iteration and rank: "
                    "parallel.defer_embedding_wgrad_compute needs two"
                )

    def _check_fusion(self) -> None:
        """Check fused kernels and the groups of the distributed optimizer."""
        if self.training.apply_rope_fusion and self.data.reset_position_ids:
            raise ValueError(
                "training.apply_rope_fusion turns all rows by the same angles, and data.reset_position_ids gives each "
                "row positions of its own; leave out training.apply_rope_fusion"
            )
        if self.parallel.tp_comm_overlap and self.training.transformer_impl != "transformer_engine":
            raise ValueError(
                "parallel.tp_comm_overlap is done by TransformerEngine's layers; set "
                "training.transformer_impl=transformer_engine"
            )
        instances = self.parallel.num_distributed_optimizer_instances
        replicas = self.data_parallel_size * self.parallel.context_parallel_size
        if replicas % instances or self.expert_replicas % instances:
            experts = f", {self.expert_replicas} for experts" if self.parallel.separates_experts else ""
            raise ValueError(
                f"the {replicas} ranks that share a part of the model (data x context parallel{experts}) are no "
                f"multiple of parallel.num_distributed_optimizer_instances {instances}"
            )
        if self.parallel.defer_embedding_wgrad_compute and self.training.gradient_accumulation_fusion is False:
            raise ValueError(
                "parallel.defer_embedding_wgrad_compute adds gradients of weights to their sum where they are "
                "computed; leave out training.gradient_accumulation_fusion"
            )

    def _check_precision(self) -> None:
        """Check settings that need bf16 weights or the distributed optimizer."""
        if self.training.resolved_precision != "bf16":
            for name, asked in (
                ("optimizer.main_grads_dtype=bf16", self.optimizer.main_grads_dtype == "bf16"),
                ("optimizer.use_precision_aware_optimizer", self.optimizer.use_precision_aware_optimizer),
                ("training.cross_entropy_loss_fusion", self.training.cross_entropy_loss_fusion),
            ):
                if asked:
                    raise ValueError(f"{name} needs training.precision bf16")
        if self.optimizer.use_precision_aware_optimizer and not self.parallel.use_distributed_optimizer:
            raise ValueError("optimizer.use_precision_aware_optimizer needs parallel.use_distributed_optimizer")
        if self.training.deterministic and self.training.cross_entropy_loss_fusion:
            raise ValueError(
                "training.deterministic: Megatron-LM refuses cross_entropy_loss_fusion with it, whose compiled kernels "
                "may add in another order; set training.cross_entropy_loss_fusion=false"
            )

    def _check_attention(self) -> None:
        """Check the limits of both implementations of attention. Raises ValueError."""
        context, tensor = self.parallel.context_parallel_size, self.parallel.tensor_model_parallel_size
        if context == 1:
            return
        documents = self.data.attends_documents
        if self.training.transformer_impl == "transformer_engine" and documents:
            raise ValueError(
                "data.reset_attention_mask, or packed rows, with parallel.context_parallel_size above 1 needs the "
                "local attention; set training.transformer_impl=local"
            )
        if self.training.transformer_impl == "transformer_engine" and self.window_over_ranks:
            raise ValueError(
                "model.transformer.window_size with parallel.context_parallel_size above 1 needs the local attention; "
                "set training.transformer_impl=local"
            )
        heads = self.model.num_attention_heads
        local = documents or self.window_over_ranks or self.training.transformer_impl == "local"
        if heads % (tensor * context) and local:
            raise ValueError(
                f"model.num_attention_heads {heads} is no multiple of tensor x context parallel size "
                f"{tensor} x {context}: the local attention gives each of these ranks a part of the heads"
            )
        parts = 2 * context * (tensor if self.parallel.sequence_parallel else 1)
        if self.training.seq_length % parts:
            raise ValueError(
                f"training.seq_length {self.training.seq_length} is no multiple of {parts}: each of the "
                f"{context} context-parallel ranks takes two parts of it"
                + (", which sequence_parallel splits again" if parts > 2 * context else "")
            )

    @property
    def window_over_ranks(self) -> bool:
        """True if sequences with a sliding window are split over ranks, which TransformerEngine does not support."""
        return self.model.transformer.window_size is not None and self.parallel.context_parallel_size > 1

    def _check_transformer_engine(self) -> None:
        needs = sorted(NEEDS_TRANSFORMER_ENGINE & set(self.model.transformer.model_dump()))
        if needs and self.training.transformer_impl != "transformer_engine":
            raise ValueError(
                f"model.transformer.{needs[0]} needs layers of TransformerEngine; set "
                "training.transformer_impl=transformer_engine, or leave it out"
            )

    def _check_whole_parameters(self) -> None:
        optimizer = self.optimizer
        if self.parallel.use_distributed_optimizer and optimizer.kind != "adam":
            what = "optimizer.class" if optimizer.class_path else f"optimizer.name {optimizer.name}"
            raise ValueError(
                f"{what} needs whole parameters, of which parallel.use_distributed_optimizer gives each rank a piece; "
                "set parallel.use_distributed_optimizer=false and overlap_param_gather=false"
            )

    def _check_document_windows(self) -> None:
        length = self.training.seq_length
        cuts = dict(self.data.cut_by_document)
        if self.data.validation_cut is not None:
            cuts |= dict.fromkeys(self.data.validation, self.data.validation_cut)
        for name, cut in cuts.items():
            cut.check(cut.window or length)
            if (cut.window or 0) > length and cut.packing != "split":
                raise ValueError(
                    f"data set {name!r}: document_window.window {cut.window} does not fit a row of "
                    f"training.seq_length {length}; set a shorter window, or document_window.packing=split"
                )

    def _check_lanes(self) -> None:
        if self.data.streams:
            check_multiple(
                "data.lanes",
                self.data.lanes,
                "the data-parallel size",
                self.data_parallel_size,
                ": each replica reads as many lanes of a stream; a run that begins may set another data.lanes, one "
                "that has begun needs another number of ranks",
            )

    def lr_steps(self, reaches: Callable[[int], int]) -> tuple[int, int]:
        """Return the iterations of the warm-up, and of the decay of the learning rate. `reaches(samples)` is the
        iteration that consumes the last of so many samples; a length in tokens ends with it."""
        optimizer, length = self.optimizer, self.training.seq_length
        warmup, decay = optimizer.lr_warmup_steps, optimizer.lr_decay_steps or self.training.steps
        if optimizer.lr_warmup_tokens is not None:
            warmup = reaches(-(-optimizer.lr_warmup_tokens // length))
        if optimizer.lr_decay_tokens is not None:
            decay = reaches(-(-optimizer.lr_decay_tokens // length))
        return warmup, decay

    def _check_schedule(self) -> None:
        optimizer = self.optimizer
        warmup, decay = self.lr_steps(self.training.batch_sizes.reaches)
        if optimizer.lr_warmup_tokens is not None and optimizer.lr_warmup_steps:
            raise ValueError("optimizer.lr_warmup_steps and lr_warmup_tokens say the same; set one of them")
        if optimizer.lr_decay_tokens is not None and optimizer.lr_decay_steps is not None:
            raise ValueError("optimizer.lr_decay_steps and lr_decay_tokens say the same; set one of them")
        if warmup >= decay:
            first = "lr_warmup_steps" if optimizer.lr_warmup_tokens is None else "lr_warmup_tokens, in steps"
            last = "training.steps"
            if optimizer.lr_decay_tokens is not None:
                last = "optimizer.lr_decay_tokens, in steps"
            elif optimizer.lr_decay_steps is not None:
                last = "optimizer.lr_decay_steps"
            raise ValueError(
                f"optimizer.{first} {warmup} must be below {last} {decay}; "
                f"set optimizer.lr_warmup_steps={decay // 10}, or train longer"
            )
        if (optimizer.lr_decay_style == "WSD") != (optimizer.lr_wsd_decay_steps is not None):
            raise ValueError("optimizer.lr_wsd_decay_steps belongs to lr_decay_style WSD, which needs it")
        if (optimizer.lr_wsd_decay_steps or 0) > decay - warmup:
            raise ValueError(
                f"optimizer.lr_wsd_decay_steps {optimizer.lr_wsd_decay_steps} must fit between "
                f"the warm-up of {warmup} steps and the end of the decay at {decay}"
            )
        if optimizer.min_lr > optimizer.lr:
            raise ValueError(f"optimizer.min_lr {optimizer.min_lr} is above optimizer.lr {optimizer.lr}")


CONFIG_CLASSES: dict[str, type[CommonConfig]] = {
    "native": RunConfig,
    "megatron-lm": MegatronConfig,
    "command": CommandConfig,
}
"""The config class of each trainer."""


def trainers_with(section: str) -> list[str]:
    """Return the trainers whose runs have this section, or this setting outside of sections."""
    return [trainer for trainer, kind in CONFIG_CLASSES.items() if section in kind.model_fields]
