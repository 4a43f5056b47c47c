"""Which mean of the tokens' losses is trained on, and which one is reported: `training.loss_mean`.

Without a mask every micro-batch and every sample has as many tokens, so that all means are one. With a mask
(`data.eod_mask_loss`) they differ; l is a token's loss, m is 1 where it counts:

    micro_batch  mean over micro-batches of sum(m l) / sum(m): the loss_func of Megatron-LM's pretrain_gpt.py, with the
                 divisions of megatron-core's `forward_step_calc_loss`; depends on the micro-batches
    sample       mean over samples of sum(m l) / sum(m)
    token        sum(m l) / sum(m) over the global batch: Megatron's `--calculate-per-token-loss`, in which the
                 gradients are summed and divided once, by a count that all ranks add up

The report of `micro_batch` and `token` is the mean over all tokens that count, as Megatron-LM prints it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from megatron.core import parallel_state

from relayrun.config.sections.training import LossMean

LossResult = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What megatron-core's schedules take: the loss to differentiate, the number of tokens that it is still to be divided
by where it is a sum, and the report."""


@dataclass(frozen=True, kw_only=True)
class LossSum:
    """The reported loss before its last division, which follows the sum over the data-parallel ranks."""

    total: float
    """Sum of losses in nats, over samples (each a mean over its tokens) or over tokens."""
    count: float
    """How many of these it is the sum of, weights included."""


def loss_function(
    mean: LossMean, *, mask: torch.Tensor | None, weights: torch.Tensor | None, context_size: int = 1
) -> Callable[[torch.Tensor], LossResult]:
    """Return the function of one micro-batch's losses, [batch, sequence] in nats, that megatron-core's schedules call.

    `mask`: 1 where a token counts, [batch, sequence]; None: everywhere. `weights`: of the samples in the report, which
    alone has them, [batch]; None: each counts once. The report is float64 [2]: total and count of a `LossSum`.
    """

    def over_context(values: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks that share these samples, each with its part of their tokens."""
        if context_size > 1:
            torch.distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    def by_sample(losses: torch.Tensor) -> LossResult:
        # the part that this rank has in each sample's mean
        if mask is None:
            samples = losses.float().mean(dim=1) / context_size
        else:
            samples = (losses.float() * mask).sum(dim=1) / over_context(mask.sum(dim=1)).clamp(min=1)
        total = over_context((samples.sum() if weights is None else (samples * weights).sum()).detach().double())
        count = total.new_tensor(float(len(samples))) if weights is None else weights.double().sum()
        # megatron-core multiplies by the size of the context, and takes the mean over micro-batches
        return samples.mean(), torch.stack([total, count])

    def by_token(losses: torch.Tensor) -> LossResult:
        assert mask is not None
        counted = mask if weights is None else mask * weights[:, None]
        report = over_context(torch.stack([(losses.detach().double() * counted).sum(), counted.double().sum()]))
        total, count = (losses.float() * mask).sum(), mask.sum()
        if mean == "micro_batch":  # the mean over all ranks' tokens, of which megatron-core takes the mean over ranks
            total, count = total * context_size, over_context(count)
        return total, count.to(torch.int), report

    return by_sample if mask is None or mean == "sample" else by_token
