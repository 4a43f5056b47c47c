"""The loss: its mean over tokens that is trained on, the reported mean (`training.loss_mean`), and a user's loss.

Without a mask every micro-batch and every sample has equally many tokens, so all means agree. With a mask
(`data.eod_mask_loss`) they differ; l is a token's loss, m is 1 if the token counts:

    micro_batch  mean over micro-batches of sum(m l) / sum(m): the loss_func of Megatron-LM's pretrain_gpt.py, with the
                 divisions of megatron-core's `forward_step_calc_loss`; depends on the micro-batches
    sample       mean over samples of sum(m l) / sum(m)
    token        sum(m l) / sum(m) over the global batch: Megatron's `--calculate-per-token-loss`, in which the
                 gradients are summed and divided once, by a count that all ranks add up

For `micro_batch` and `token` the report is the mean over all tokens that count, as in Megatron-LM. `training.loss`
names a function of the user that returns the loss of each token.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

from relayrun.config.sections.training import LossMean
from relayrun.errors import ConfigError
from relayrun.train.user_code import import_user_object

LossResult = tuple[torch.Tensor, torch.Tensor] | tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Result for megatron-core's schedules: the loss to differentiate, its number of tokens, and the report."""


def loss_function(
    mean: LossMean, *, mask: torch.Tensor | None, weights: torch.Tensor | None, context_size: int = 1
) -> Callable[[torch.Tensor], LossResult]:
    """Return the function that megatron-core's schedules call with the losses of a micro-batch, [batch, sequence] in
    nats.

    `mask`: 1 if a token counts, [batch, sequence]; None: all count. `weights`: of the samples, in the report only,
    [batch]; None: 1. The report is float64 [2]: total and count of a `distributed.LossSum`.
    """

    def over_context(values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that hold parts of these samples."""
        if context_size > 1:
            torch.distributed.all_reduce(values, group=parallel_state.get_context_parallel_group())
        return values

    def by_sample(losses: torch.Tensor) -> LossResult:
        # this rank's part of each sample's mean
        if mask is None:
            samples = losses.float().mean(dim=1) / context_size
        else:
            samples = (losses.float() * mask).sum(dim=1) / over_context(mask.sum(dim=1)).clamp(min=1)
        total = over_context((samples.sum() if weights is None else (samples * weights).sum()).detach().double())
        count = torch.full_like(total, len(samples)) if weights is None else weights.double().sum()
        # megatron-core multiplies by the context size and takes the mean over micro-batches
        return samples.mean(), torch.stack([total, count])

    def by_token(losses: torch.Tensor) -> LossResult:
        assert mask is not None
        counted = mask if weights is None else mask * weights[:, None]
        report = over_context(torch.stack([(losses.detach().double() * counted).sum(), counted.double().sum()]))
        total, count = (losses.float() * mask).sum(), mask.sum()
        if mean == "micro_batch":  # mean over the tokens of all ranks; megatron-core then takes the mean over ranks
            total, count = total * context_size, over_context(count)
        return total, count.to(torch.int), report

    return by_sample if mask is None or mean == "sample" else by_token


LOSS_ARGUMENTS = ("logits", "losses", "labels", "mask")


class UserLoss:
    """Calls a user's loss with the arguments that it names: `logits` or `losses`, `labels`, `mask`."""

    def __init__(self, path: str) -> None:
        """Import the function. Raises ConfigError if its arguments do not fit."""
        self._path = path
        self._function: Callable[..., torch.Tensor] = import_user_object(path)
        if not callable(self._function):
            raise ConfigError(f"{path} is no function")
        self._names = tuple(inspect.signature(self._function).parameters)
        if set(self._names) - set(LOSS_ARGUMENTS) or ("logits" in self._names) == ("losses" in self._names):
            raise ConfigError(
                f"{path} takes {', '.join(self._names) or 'nothing'}; a loss takes either logits or losses, and labels "
                "and mask, by these names"
            )

    @property
    def wants_logits(self) -> bool:
        return "logits" in self._names

    def __call__(self, output: torch.Tensor, labels: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        """Return the losses of the tokens, [batch, sequence].

        `output`: of the model, logits [batch, sequence, vocabulary / tensor parallel size] or losses [batch, sequence].
        """
        if self.wants_logits:
            output = gather_from_tensor_model_parallel_region(output)
        known = {"logits": output, "losses": output, "labels": labels, "mask": mask}
        found = self._function(**{name: known[name] for name in self._names})
        if not isinstance(found, torch.Tensor) or found.shape != labels.shape:
            what = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError(
                f"{self._path} returned {what}; a loss returns one of each token, {list(labels.shape)}",
                where="training.loss",
                hint="leave the mean to training.loss_mean",
            )
        return found
