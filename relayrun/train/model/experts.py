"""Mixtures of experts (MoE) as megatron-core's MoELayer, and the auxiliary losses of their routers.

Without TransformerEngine each expert is a feed-forward layer, and the experts of a rank run one after the other. Fresh
weights do not depend on the layout. megatron-core sums auxiliary losses in every layer, rank and micro-batch, without
their factors, under Megatron's names.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import BaseMoELayer
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
from megatron.core.transformer.moe.router import Router

from relayrun.config.sections.model import TransformerSection
from relayrun.train import megatron_versions
from relayrun.train.distributed import Ranks

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Name in megatron-core of the loss of each `moe_router_load_balancing_type`."""


class AuxiliaryLosses:
    """Collects the losses over layers and ranks, once per iteration."""

    def __init__(self, settings: TransformerSection, *, layers: int, ranks: Ranks) -> None:
        """`layers`: number of layers with experts in the whole model; a stage without experts contributes nothing."""
        self._names = [LOSS_NAMES.get(kind, kind) for kind in settings.router_losses]
        self._layers = layers
        self._ranks = ranks

    def __bool__(self) -> bool:
        return bool(self._names)

    def take(self, micro_batches: int) -> dict[str, float]:
        """Return the mean of each loss over layers, micro-batches and replicas, equal on every rank, and reset. One
        small all-reduce; none if the model has no such losses."""
        if not self._names:
            return {}
        tracker = get_moe_layer_wise_logging_tracker()
        sums = torch.zeros(len(self._names), dtype=torch.float64, device=self._ranks.device)
        for at, name in enumerate(self._names):
            if name in tracker:
                sums[at] = tracker[name]["values"].double().sum() / self._measured_by(name)
        clear_aux_losses_tracker()
        dist.all_reduce(sums)
        means = sums / (self._layers * micro_batches)
        return dict(zip(self._names, means.tolist(), strict=True))

    def _measured_by(self, name: str) -> int:
        """Return how many ranks measured a loss of the same layer, and not a part of it."""
        replicas, parts = self._ranks.data_parallel_size, self._ranks.tensor_size * self._ranks.context_size
        # each rank has a part of the global loss, and the z_loss of its own tokens
        return {"global_load_balancing_loss": 1, "z_loss": replicas * parts}.get(name, replicas)


class LocalExperts(SequentialMLP):  # type: ignore[misc]  # megatron-core has no types
    """Experts of a rank, run one after the other; names in a checkpoint equal TransformerEngine's.

    megatron-core 0.16.1 draws fresh weights on a CPU for the experts of each rank from one generator state: with expert
    parallelism the first experts of all ranks start as twins, which the router can hardly tell apart, and later draws
    depend on the number of experts per rank. Here an expert's weights follow from its global number.

    It also sums the output of an expert on one rank alone in place, in a view of its input, and adds the bias in place
    (transformer/mlp.py), which autograd refuses for views.
    """

    def __init__(
        self,
        num_local_experts: int,
        config: TransformerConfig,
        submodules: MLPSubmodules,
        pg_collection: Any = None,
        **_: Any,  # a name, in later versions
    ) -> None:
        super().__init__(0, config, submodules, pg_collection)
        self.num_local_experts = num_local_experts
        drawn = int(torch.randint(1 << 62, ()))  # the same on all ranks of a stage
        first = self.ep_group.rank() * num_local_experts
        for number in range(first, first + num_local_experts):
            with _generator_at(drawn + number), warnings.catch_warnings():
                # a whole expert warns that it does not use the sequence parallelism around it
                warnings.filterwarnings("ignore", message="`sequence_parallel` is set to `True`")
                expert = MLP(
                    self.config,
                    submodules,
                    ffn_hidden_size=self.config.moe_ffn_hidden_size,
                    is_expert=True,
                    tp_group=self.tp_group,
                )
            expert.linear_fc2.explicit_expert_comm = True  # the dispatcher sums, as with more ranks
            self.local_experts.append(expert)


@contextlib.contextmanager
def _generator_at(seed: int) -> Iterator[None]:
    """Draw on the CPU from this seed, and restore the generator; on a GPU megatron-core draws from its own states."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def reduce_over_own_replicas(model: torch.nn.Module) -> None:
    """Sum the gradients of experts over the ranks that hold the same experts.

    Fault: megatron-core 0.16.1 uses expert_model_parallel_size alone to decide if these ranks differ from those of the
    rest of the model (tensor_parallel/layers.py). If every rank has all experts, but in other parts than the rest,
    gradients would be summed over data-parallel ranks only: replicas of an expert diverge without an error.
    """
    for layer in model.modules():
        if isinstance(layer, BaseMoELayer):
            for parameter in layer.experts.parameters():
                parameter.allreduce = False  # megatron-core's word for it


class RouterLosses:
    """Factors of the routers' losses, with corrections of megatron-core.

    Fault: if gradients are divided by the counted tokens (`calculate_per_token_loss`), megatron-core 0.16.1 multiplies
    a router's losses by the tokens that this rank routes (transformer/moe/router.py). With tensor and context
    parallelism these are a part, with `seq_aux_loss` those of one sequence, and with a mask more than count. 0.19
    corrects the first two. Here the factor cancels the division, for every version.

    Fault: `global_aux_loss` is the part of a replica in the loss over all replicas, and gradients are the mean over
    replicas: megatron-core (0.16.1 to 0.19.2) divides it by their number once too often.
    """

    def __init__(
        self, chunks: Iterable[torch.nn.Module], settings: TransformerSection, ranks: Ranks, *, by_token: bool
    ) -> None:
        self.factors = settings.router_losses
        """Factors of the losses; the next step reads them."""
        self._kinds = settings.moe_router_load_balancing_type
        self._replicas = ranks.data_parallel_size
        self._routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, Router)]
        for router in self._routers:
            if by_token:
                router.calculate_per_token_loss = False
            for buffer in router.buffers(recurse=False):  # in bf16 a sum of tokens stops growing
                buffer.data = buffer.data.float()

    def scale(self, factor: float) -> None:
        """Multiply the losses of the next step; reported losses do not change."""
        found = {kind: own * factor for kind, own in self.factors.items()}
        found["global_aux_loss"] = found.get("global_aux_loss", 0.0) * self._replicas
        for router in self._routers:
            aux = [found.get(kind, 0.0) for kind in ([self._kinds] if isinstance(self._kinds, str) else self._kinds)]
            router.config.moe_aux_loss_coeff = aux[0] if isinstance(self._kinds, str) else aux
            router.config.moe_z_loss_coeff = found.get("z_loss")


def local_experts(config: TransformerConfig) -> Any:
    """Return the feed-forward part of a layer with experts, made of local modules."""
    # megatron-core 0.16.1 checks if `te_general_gemm` is None (transformer/moe/moe_utils.py), and without
    # TransformerEngine that name is undefined
    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None
    part = get_mlp_module_spec(use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False)
    return megatron_versions.with_experts(part, LocalExperts)
