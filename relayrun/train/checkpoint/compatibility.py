"""What a checkpoint and the run that loads it must have in common. Without torch: submit compares before the queue.

The ranks compare when they load a checkpoint (`checkpointer`), submit when a run begins with a checkpoint or behind a
stage (`submit.dry_load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from relayrun.config.compose.schema import RunConfig
from relayrun.errors import FatalTrainingError

OTHER_DATA_HINT = (
    "set checkpoint.no_load_data=true to begin anew with these data, or give them a name in data.mixture that the "
    "checkpoint does not have: a new data set begins behind its samples"
)


def fixed_settings(config: RunConfig) -> dict[str, object]:
    """Return the settings, by name, without which a run cannot read the optimizer's state of its checkpoint."""
    return {
        "parallel.use_distributed_optimizer": config.parallel.use_distributed_optimizer,
        "training.precision": config.training.resolved_precision,
        "optimizer": config.optimizer.kind,
    }


def refuse_other_fixed_settings(found: Mapping[str, object], wanted: Mapping[str, object], path: Path) -> None:
    """Raise FatalTrainingError if a setting differs from `found`, those of the checkpoint."""
    for name, value in wanted.items():
        if (before := found.get(name, "adam")) != value:  # checkpoints of Megatron-LM do not record the optimizer
            raise FatalTrainingError(
                f"{name} was {before} when this checkpoint was saved, and is {value}; "
                "one kind of optimizer cannot read the state of the other",
                where=path,
                hint=f"set {name} back, or start a new run with --load and checkpoint.no_load_optim=true",
            )
