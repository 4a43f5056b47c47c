"""The section `parallel` of a run config."""

from typing import Self

from pydantic import model_validator

from relayrun.config.sections.base import Section
from relayrun.config.sections.dataclass_section import NonNegative, Positive


class ParallelSection(Section):
    """Split of the model over ranks; the remaining factor is data-parallel."""

    tensor_model_parallel_size: Positive = 1
    """Ranks over which every layer is split."""
    pipeline_model_parallel_size: Positive = 1
    """Stages into which the layers are split, one after the other."""
    num_layers_per_virtual_pipeline_stage: Positive | None = None
    """Layers of one of several parts of a pipeline stage, for a smaller pipeline bubble; None: one part."""
    sequence_parallel: bool = False
    """Split norms and dropout over the tensor-parallel ranks by sequence."""
    context_parallel_size: Positive = 1
    """Split every sequence over this many ranks. Without TransformerEngine, and with data.reset_attention_mask,
    attention splits heads instead: their number is a multiple of tensor x context parallel size."""
    expert_model_parallel_size: Positive = 1
    """Split the experts of every layer (model.transformer.num_moe_experts) over this many of the ranks that are data-
    or context-parallel otherwise; or tensor-parallel, with a smaller expert_tensor_parallel_size."""
    expert_tensor_parallel_size: Positive | None = None
    """Ranks over which every expert is split; None: tensor_model_parallel_size. With 1 every expert is whole, and
    tensor-parallel ranks hold different ones, or replicas of them."""
    use_distributed_optimizer: bool = False
    """Split Adam's state over the data-parallel ranks: 6 + 12 / ranks bytes a parameter instead of 18, in bf16."""
    num_distributed_optimizer_instances: Positive = 1
    """Groups of data-parallel replicas that each hold the whole optimizer state, divided among the group. Gradients are
    reduced within a group and then between groups, weights are gathered within a group: less traffic on the slow links
    between many nodes, for more memory."""
    tp_comm_overlap: bool = False
    """Overlap tensor-parallel communication with matrix products. Needs TransformerEngine's layers and
    sequence_parallel."""
    overlap_grad_reduce: bool = False
    """Overlap the reduction of gradients with the backward pass."""
    overlap_param_gather: bool = False
    """Overlap the gathering of updated weights with the forward pass."""
    defer_embedding_wgrad_compute: bool = False
    """The last pipeline stage computes the gradients of the output layer's weights while it would wait for the others
    at the end of an iteration."""
    wgrad_deferral_limit: NonNegative = 0
    """Maximum micro-batches deferred by defer_embedding_wgrad_compute, whose logits' gradients are kept until then; 0:
    all."""
    overlap_p2p_communication_warmup_flush: bool = False
    """With virtual stages: overlap sends and receives of pipeline stages with computation also in the first and the
    last micro-batches of an iteration."""

    @property
    def virtual_stages(self) -> bool:
        return self.num_layers_per_virtual_pipeline_stage is not None

    @property
    def expert_tensor_size(self) -> int:
        """Ranks over which every expert is split."""
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def separates_experts(self) -> bool:
        """True if the ranks that share experts differ from those that share the other weights."""
        return self.expert_model_parallel_size > 1 or self.expert_tensor_size != self.tensor_model_parallel_size

    @model_validator(mode="after")
    def _rules(self) -> Self:
        if self.sequence_parallel and self.tensor_model_parallel_size == 1:
            raise ValueError(
                "sequence_parallel splits over tensor-parallel ranks: it needs tensor_model_parallel_size above 1"
            )
        if self.virtual_stages and self.pipeline_model_parallel_size == 1:
            raise ValueError("num_layers_per_virtual_pipeline_stage needs pipeline_model_parallel_size above 1")
        if self.num_distributed_optimizer_instances > 1 and not self.use_distributed_optimizer:
            raise ValueError("num_distributed_optimizer_instances above 1 needs use_distributed_optimizer")
        if self.tp_comm_overlap and not self.sequence_parallel:
            raise ValueError("tp_comm_overlap needs sequence_parallel")
        if self.defer_embedding_wgrad_compute and self.pipeline_model_parallel_size == 1:
            raise ValueError(
                "defer_embedding_wgrad_compute fills the wait of a pipeline: it needs pipeline_model_parallel_size "
                "above 1"
            )
        if self.wgrad_deferral_limit and not self.defer_embedding_wgrad_compute:
            raise ValueError("wgrad_deferral_limit needs defer_embedding_wgrad_compute")
        if self.wgrad_deferral_limit == 1:
            raise ValueError(
                "wgrad_deferral_limit 1: megatron-core cannot compute the rest of a single micro-batch; set 2 or more, "
                "or 0 for all"
            )
        if self.overlap_p2p_communication_warmup_flush and not self.virtual_stages:
            raise ValueError("overlap_p2p_communication_warmup_flush needs num_layers_per_virtual_pipeline_stage")
        if self.overlap_param_gather and not (self.use_distributed_optimizer and self.overlap_grad_reduce):
            raise ValueError("overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce")
        return self
