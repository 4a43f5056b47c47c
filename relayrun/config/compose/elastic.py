"""With how many nodes a run may go on when it has lost some: `training.elastic`."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol, Self

from pydantic import ValidationError

from relayrun.config.sections.job import ChainSection, JobSection
from relayrun.config.sections.training import TrainingSection


class ElasticConfig(Protocol):
    """What is looked at of a run's config; `schema`, which has all of it, imports this module."""

    chain: ChainSection
    job: JobSection
    training: TrainingSection

    @property
    def model_parallel_size(self) -> int:
        """Ranks that share one replica of the model and one sequence."""

    def model_dump(self) -> dict[str, Any]:
        """Return the values of the config."""

    @classmethod
    def model_validate(cls, obj: Any) -> Self:
        """Raise ValidationError where the values make no config."""


def elastic_nodes(config: ElasticConfig) -> list[int]:
    """Numbers of nodes below `job.nodes` with which the run may go on, largest first; none without `elastic`.

    They are those with which the same config is accepted: the same parts of the model, whole micro-batches for every
    replica. The replicas divide the global batch, so there are few to try.
    """
    training, found = config.training, []
    for nodes in range(config.job.nodes - 1, 0, -1) if training.elastic else ():
        replicas, rest = divmod(nodes * config.job.ntasks_per_node, config.model_parallel_size)
        if not rest and not training.global_batch_size % (replicas * training.micro_batch_size):
            with contextlib.suppress(ValidationError):
                _on_nodes(config, nodes)
                found.append(nodes)
    return found


def _on_nodes(config: ElasticConfig, nodes: int) -> None:
    values = config.model_dump()
    values["job"] |= {"nodes": nodes}
    values["training"] |= {"elastic": False}  # or each number would try all below it
    type(config).model_validate(values)


def check_elastic(config: ElasticConfig) -> None:
    """Raise ValueError where a run cannot go on with fewer nodes as `training.elastic` asks."""
    if not config.training.elastic:
        return
    if config.chain.recovery != "node":
        raise ValueError(
            "training.elastic: the ranks of the nodes that are left go on inside the job; "
            "set chain.recovery=node, or leave it out"
        )
    if not elastic_nodes(config):
        raise ValueError(
            f"training.elastic: on fewer nodes than job.nodes {config.job.nodes} this config is refused; set "
            "training.global_batch_size to a multiple of micro_batch_size x data-parallel size for some smaller number "
            "of nodes as well, or leave it out"
        )
