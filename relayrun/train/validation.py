"""Validation loss: the same windows every time, dropout off, the state of training unchanged."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from relayrun.config.compose.schema import TrainingSection
from relayrun.tokens.order.batches import check_row
from relayrun.tokens.order.datasets import ValidationSet
from relayrun.tokens.order.sample_rows import RowBatch
from relayrun.train.distributed import LossSum, Ranks
from relayrun.train.model.gpt import MicroBatch, ModelStage


@dataclass(frozen=True, kw_only=True)
class Validation:
    """Validation sets of a run and the samples to evaluate."""

    orders: dict[str, ValidationSet]
    training: TrainingSection
    ranks: Ranks
    vocabulary_size: int

    @property
    def samples(self) -> int:
        """Samples of one evaluation, over all sets."""
        return sum(self._samples(order) for order in self.orders.values())

    def run(self, model: ModelStage) -> dict[str, float]:
        """Return the mean loss in nats per token, by name of the set. All ranks call it together.

        With `training.loss_mean: sample` it is the mean of the samples' means, else the mean over all tokens that
        count.
        """
        model.train_mode(False)
        try:
            with torch.no_grad():
                return {name: self._loss(model, order) for name, order in self.orders.items()}
        finally:
            model.train_mode(True)

    def _loss(self, model: ModelStage, order: ValidationSet) -> float:
        """Evaluate samples 0 .. eval_steps x global batch - 1, each window at most once."""
        wanted = self._samples(order)
        own = range(self.ranks.data_parallel_rank, wanted, self.ranks.data_parallel_size)
        size = self.training.micro_batch_size
        batches = [self._batch(order, own[at : at + size]) for at in range(0, len(own), size)]
        least = 0
        if self.ranks.replicas_share_experts:  # they exchange tokens, so all run as many batches as the first replica
            least = -(-len(range(0, wanted, self.ranks.data_parallel_size)) // size)
        while len(batches) % model.batches_multiple or len(batches) < least:
            copied = batches[-1] if batches else self._batch(order, range(1))
            batches.append(replace(copied, weights=np.zeros(size, dtype=np.float32)))
        return self.ranks.mean_loss(model.run(batches, train=False) if batches else LossSum(total=0.0, count=0.0))

    def _samples(self, order: ValidationSet) -> int:
        return min(self.training.eval_steps * self.training.global_batch_size, len(order))

    def _batch(self, order: ValidationSet, samples: range) -> MicroBatch:
        """Return a full micro-batch, as pipeline stages need fixed shapes: a short one is padded with weight 0."""
        size = self.training.micro_batch_size
        found = [check_row(order.row(k), order, k, self.vocabulary_size) for k in samples]
        weights = np.zeros(size, dtype=np.float32)
        weights[: len(found)] = 1
        rows = RowBatch.stack(found + [found[-1]] * (size - len(found)))
        return MicroBatch(tokens=rows.tokens, weights=weights, lengths=rows.lengths, loss_mask=rows.loss_mask)
