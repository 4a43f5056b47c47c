"""The yardstick of the demo: what a model that knows only how frequent each token is could reach at best."""

from __future__ import annotations

import numpy as np

from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir.run import Run
from relayrun.tokens.order.samples import WindowOrder
from relayrun.tokens.shards.manifest import Manifest


def unigram_entropy(config: RunConfig, run: Run, name: str) -> float:
    """Entropy in nats of the distribution of exactly those tokens that an evaluation on set `name` predicts."""
    manifest = Manifest.read(run.manifest)
    order = WindowOrder(
        manifest.validation[name],
        seq_length=config.training.seq_length,
        seed=config.training.seed,
        name=name,
        shuffle=False,
    )
    samples = min(config.training.eval_steps * config.training.global_batch_size, order.windows_per_epoch)
    counts = np.zeros(manifest.vocabulary_size, dtype=np.int64)
    for number in range(samples):
        counts += np.bincount(order.sample(number)[1:], minlength=manifest.vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
