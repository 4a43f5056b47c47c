"""What can be known to be wrong before anything is submitted."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from relayrun.config import determinism
from relayrun.config.schema import RunConfig
from relayrun.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raise a RelayrunError for the first thing that would make a job fail.

    The schema has judged the numbers already; here are the things that lie outside the config.
    """
    if config.parallel.context_parallel_size > 1 or config.training.transformer_impl == "transformer_engine":
        _check_transformer_engine(config)
    run_dir = Path(config.run_dir or "")
    for place in config.cluster.read_only_paths:
        protected = Path(os.path.realpath(place))
        if Path(os.path.realpath(run_dir)).is_relative_to(protected):
            raise ConfigError(
                f"cluster {config.cluster.name!r} allows no writing below {place}",
                where=run_dir,
                hint="set run_dir to another file system",
            )
    if config.job.gpus_per_node:
        config.training.require_precision()
    if config.training.deterministic:
        cluster = config.cluster
        determinism.check_environment(cluster.environment, where=f"cluster.environment of {cluster.name!r}")
    _check_evaluation(config)


def _check_evaluation(config: RunConfig) -> None:
    settings = config.evaluation
    if settings is None:
        return
    if not settings.tasks and not config.data.validation and not config.data.split:
        raise ConfigError(
            "there is nothing to evaluate on: neither tasks nor a validation set",
            where="evaluation",
            hint="name tasks of lm-evaluation-harness, or set data.validation",
        )
    # another Python's packages are not known here
    if settings.tasks and config.cluster.python is None and importlib.util.find_spec("lm_eval") is None:
        raise ConfigError(
            "lm-evaluation-harness is not installed",
            where="evaluation.tasks",
            hint="pip install 'relayrun[evaluation]', or name no tasks",
        )
    if settings.include_path is not None and not Path(settings.include_path).is_dir():
        raise ConfigError("there is no such folder", where=f"evaluation.include_path: {settings.include_path}")


def _check_transformer_engine(config: RunConfig) -> None:
    cluster = config.cluster
    here = cluster.python is None and importlib.util.find_spec("transformer_engine") is not None
    if not (cluster.transformer_engine or here):
        what = "parallel.context_parallel_size above 1"
        if config.training.transformer_impl == "transformer_engine":
            what = "training.transformer_impl=transformer_engine"
        raise ConfigError(
            f"{what} needs TransformerEngine, which this Python does not have and cluster {cluster.name!r} does not "
            "declare",
            where=f"configs/clusters/{cluster.name}.yaml",
            hint="set transformer_engine: true there if the ranks' container has it",
        )
