"""Rehearses at a submit, in one process of the ranks' Python, what ranks do when they start.

    python -m relayrun.train.rehearsal < request > answer

The request and the answer are JSON, see `rehearse`. A user's code is imported, and nothing of it trains.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from relayrun.config.compose.schema import RunConfig
from relayrun.errors import ConfigError, RelayrunError
from relayrun.tokens.mixture.build_datasets import dataset_factory
from relayrun.tokens.order.batches import TrainingProgress
from relayrun.train.hook_list import import_hook_class
from relayrun.train.model.loss import UserLoss
from relayrun.train.optimizer.megatron_optimizer import learning_rate_schedule
from relayrun.train.optimizer.user_optimizer import import_optimizer_class
from relayrun.train.user_code import answer_request, import_user_object


def rehearse(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return `faults`, pairs of a setting and words, and `rates`, the learning rate of each next step.

    `request`: `configs`, whose code is imported, and `steps`, pairs of a config and the state of its progress.
    """
    configs = [RunConfig.model_validate(each) for each in request["configs"]]
    faults = dict.fromkeys(fault for config in configs for fault in user_code_faults(config))
    return {"faults": list(faults), "rates": [_next_rate(*step) for step in request["steps"]]}


def user_code_faults(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the setting and the reason for each object of a user's own that the ranks would refuse."""
    for setting, use in _uses(config):
        try:
            use()
        except RelayrunError as error:
            yield setting, error.message


def _uses(config: RunConfig) -> Iterator[tuple[str, Callable[[], object]]]:
    for entry in config.training.hooks:
        yield "training.hooks", partial(import_hook_class, entry)
    if config.training.loss is not None:
        yield "training.loss", partial(UserLoss, config.training.loss)
    if config.model.spec is not None:
        yield "model.spec", partial(import_user_object, config.model.spec)
    if config.optimizer.class_path is not None:
        # made of one small weight, with the arguments that ranks give it
        groups = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))]}]
        yield "optimizer.class", lambda: import_optimizer_class(config.optimizer)(groups)
    for name, source in config.data.sources.items():
        if ":" in (order := source.order or config.data.order):
            yield "data.order", partial(dataset_factory, order, f"data set {name!r}")
    for name, stream in config.data.streams.items():
        if stream.map is not None:
            yield f"data.mixture.{name}.stream.map", partial(import_user_object, stream.map)


def _next_rate(values: Mapping[str, Any], progress: Mapping[str, Any]) -> float | None:
    """Return the learning rate of the step behind this progress; None if the schedule cannot be made."""
    config = RunConfig.model_validate(values)
    try:
        position = TrainingProgress.resume(progress, config.training.batch_sizes)
        schedule = learning_rate_schedule(config, SimpleNamespace(param_groups=[]), position)
    except (ConfigError, RelayrunError):
        return None
    schedule.step(increment=position.iteration)
    return float(schedule.get_lr({}))


if __name__ == "__main__":
    answer_request(rehearse)
