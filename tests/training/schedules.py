"""Run by test_training_schedules.py in a process of its own: the learning rates of every style, as JSON."""

from __future__ import annotations

import json
import warnings
from types import SimpleNamespace
from typing import Any

warnings.simplefilter("ignore")

from relayrun.config.compose import resolve  # noqa: E402
from relayrun.places import CODE_ROOT as ROOT  # noqa: E402
from relayrun.tokens.order.batches import TrainingProgress  # noqa: E402
from relayrun.train.optimizer.megatron_optimizer import learning_rate_schedule  # noqa: E402

RUN = ROOT / "configs" / "runs" / "my-run.yaml"
COMMON = ["optimizer.lr=1.0", "optimizer.min_lr=0.1", "optimizer.lr_warmup_steps=10", "optimizer.lr_decay_steps=110"]
STYLES = {
    "constant": ["optimizer.lr_decay_style=constant"],
    "linear": ["optimizer.lr_decay_style=linear"],
    "cosine": ["optimizer.lr_decay_style=cosine"],
    "inverse-square-root": ["optimizer.lr_decay_style=inverse-square-root"],
    "WSD": ["optimizer.lr_decay_style=WSD", "optimizer.lr_wsd_decay_steps=20"],
}


def rates(overrides: list[str]) -> list[float]:
    optimizer: Any = SimpleNamespace(param_groups=[{}])
    config = resolve.load_run_config(RUN, [*COMMON, *overrides])
    plan = learning_rate_schedule(config, optimizer, TrainingProgress(config.training.batch_sizes))
    found = []
    for _ in range(130):
        found.append(optimizer.param_groups[0]["lr"])
        plan.step(increment=1)
    return found


if __name__ == "__main__":
    print(json.dumps({name: rates(overrides) for name, overrides in STYLES.items()}))
