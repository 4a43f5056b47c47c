"""The losses that a router of experts is trained on beside the tokens' loss, as reported.

megatron-core adds them up in every layer, rank and micro-batch, without their factors. Names are Megatron's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

from relayrun.config.sections.transformer import TransformerSection
from relayrun.train.parallel import Ranks

AUXILIARY_LOSSES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""What megatron-core calls the loss of each `moe_router_load_balancing_type`."""


def auxiliary_loss_names(transformer: TransformerSection) -> list[str]:
    """Return the losses of a model, in one order on all ranks; a stage without experts has none to add to them."""
    if transformer.num_moe_experts is None:
        return []
    kinds, factors = transformer.moe_router_load_balancing_type, transformer.moe_aux_loss_coeff
    pairs: Iterable[tuple[str, float]] = (
        zip(kinds, factors, strict=True)
        if isinstance(kinds, list) and isinstance(factors, list)
        else [(str(kinds), float(factors))]  # type: ignore[arg-type]
    )
    found = [AUXILIARY_LOSSES[kind] for kind, factor in pairs if kind in AUXILIARY_LOSSES and factor]
    return found + (["z_loss"] if transformer.moe_z_loss_coeff else [])


class AuxiliaryLosses:
    """Collects them over layers and ranks, once an iteration."""

    def __init__(self, wanted: list[str], *, layers: int, ranks: Ranks) -> None:
        """`layers`: how many of the whole model have experts."""
        self._names = wanted
        self._layers = layers
        self._ranks = ranks

    def __bool__(self) -> bool:
        """Whether the model has any."""
        return bool(self._names)

    def take(self, micro_batches: int) -> dict[str, float]:
        """Return the mean of each over layers, micro-batches and replicas, the same on every rank, and begin anew.

        One small all-reduce; nothing where the model has no such losses.
        """
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
        """How many ranks have measured a loss of the same layer, and not a part of it."""
        replicas = self._ranks.data_parallel_size
        if name == "global_load_balancing_loss":  # each rank has a part of the mean over all replicas
            return 1
        if name == "z_loss":  # each rank's own tokens
            return replicas * self._ranks.tensor_size * self._ranks.context_size
        return replicas
