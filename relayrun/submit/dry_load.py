"""The dry load: what ranks will compare with the checkpoint that a run begins with, compared before the queue.

The checkpoint's side comes from its `common.pt`, or from the config of the stage that has yet to save it. The rules are
the ranks' own (`train.checkpoint.compatibility`, `tokens.order.sampler`); nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.config.compose.schema import RunConfig
from relayrun.control.trainers.pickle_records import CorruptPickle
from relayrun.control.trainers.torch_files import read_bounded, read_torch_file
from relayrun.errors import ConfigError, FatalTrainingError, InputError
from relayrun.tokens.mixture.build_datasets import order_record, order_settings
from relayrun.tokens.order.sampler import refuse_other_order
from relayrun.tokens.shards.manifest import Manifest
from relayrun.train.checkpoint import compatibility


@dataclass(frozen=True, kw_only=True)
class LoadedState:
    """The parts of a checkpoint that ranks compare with their own run, besides the weights."""

    fixed: Mapping[str, object]
    """See `compatibility.fixed_settings`."""
    order: Mapping[str, Any] | None = None
    """Settings of the data order; None if they are not known, and for a checkpoint of Megatron-LM."""
    records: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What determines the order of each data set, those of earlier stages included."""


def common_values(folder: Path) -> dict[str, Any] | None:
    """Return the plain values of a checkpoint of relayrun; None if they cannot be read, which ranks say better."""
    try:
        common = read_torch_file(read_bounded(folder / "common.pt"))
    except (OSError, InputError, CorruptPickle):
        return None
    return common if isinstance(common, dict) and isinstance(common.get("fixed"), dict) else None


def state_in_checkpoint(folder: Path) -> LoadedState | None:
    """Return the state in a checkpoint of relayrun; None if it cannot be read."""
    common = common_values(folder)
    if common is None:
        return None
    data = common.get("data")
    if not isinstance(data, dict) or not {"settings", "datasets"} <= data.keys():
        return LoadedState(fixed=common["fixed"])
    return LoadedState(fixed=common["fixed"], order=data["settings"], records=data["datasets"])


def state_after(config: RunConfig, manifest: Manifest | None, begun_with: LoadedState | None) -> LoadedState:
    """Return the state in a checkpoint that a run will save. `manifest`: its data, None if they are not known."""
    fixed = compatibility.fixed_settings(config)
    if manifest is None:
        return LoadedState(fixed=fixed)
    anew = begun_with is None or config.checkpoint.finetune or config.checkpoint.no_load_data
    former = {} if begun_with is None or anew else begun_with.records
    return LoadedState(
        fixed=fixed, order=order_settings(config, manifest), records={**former, **_own_records(config, manifest)}
    )


def _own_records(config: RunConfig, manifest: Manifest) -> dict[str, dict[str, Any]]:
    sources = config.data.sources
    return {source.identity(name): order_record(config, manifest, name) for name, source in sources.items()}


def refuse_other_state(
    found: LoadedState, config: RunConfig, manifest: Manifest | None, path: Path, *, own: bool = False
) -> None:
    """Raise ConfigError if the ranks of this run would refuse the state of another run's checkpoint, at `path`.

    `own`: the checkpoint is the run's own; then no setting leaves a part of it out, and a submit compares the data.
    """
    saves = config.checkpoint
    try:
        if own or not (saves.finetune or saves.no_load_optim):
            compatibility.refuse_other_fixed_settings(found.fixed, compatibility.fixed_settings(config), path)
    except FatalTrainingError as error:
        raise ConfigError(error.message, where=str(path), hint=error.hint) from None
    if own or found.order is None or manifest is None or saves.finetune or saves.no_load_data:
        return
    mine = _own_records(config, manifest)
    # a stream's own record, and the number of windows, are known when the data set is opened
    common = {name: {key: was[key] for key in was if key in mine.get(name, was)} for name, was in found.records.items()}
    try:
        refuse_other_order(found.order, common, order_settings(config, manifest), mine)
    except FatalTrainingError as error:
        raise ConfigError(error.message, where="data", hint=compatibility.OTHER_DATA_HINT) from None
