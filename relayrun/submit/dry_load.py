"""The dry load: what ranks will compare with the checkpoint that a run begins with, compared before the queue.

The checkpoint's side comes from its `common.pt`, or from the config of the stage that has yet to save it. The rules are
the ranks' own (`train.checkpoint.compatibility`, `tokens.order.sampler`); nothing here needs torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relayrun.config.compose.schema import RunConfig
from relayrun.control.trainers.pickle_records import CorruptPickle
from relayrun.control.trainers.torch_files import read_bounded, read_torch_file, tensor_shapes
from relayrun.errors import ConfigError, FatalTrainingError, InputError
from relayrun.tokens.mixture.build_datasets import order_record, order_settings
from relayrun.tokens.order.sampler import refuse_other_order
from relayrun.tokens.shards.manifest import Manifest
from relayrun.train.checkpoint import compatibility
from relayrun.train.model.size import pad_to_multiple

CommonValues = Mapping[str, Any]
"""Plain values of a checkpoint; `fixed`, and of `data` the `settings` and `datasets`, are compared."""


def common_values(folder: Path) -> CommonValues | None:
    """Return the plain values of a checkpoint of relayrun; None if they cannot be read, which ranks say better."""
    try:
        common = read_torch_file(read_bounded(folder / "common.pt"))
    except (OSError, InputError, CorruptPickle):
        return None
    return common if isinstance(common, dict) and isinstance(common.get("fixed"), dict) else None


def refuse_other_shapes(folder: Path, config: RunConfig, manifest: Manifest | None) -> None:
    """Raise ConfigError if weights of a checkpoint that says nothing else of its model have other shapes than here."""
    model, rows = config.model, (config.model.num_layers, config.model.hidden_size)
    here = {
        "decoder.final_layernorm.weight": rows[1:],
        "decoder.layers.self_attention.linear_proj.weight": rows,
        "decoder.layers.mlp.linear_fc2.weight": (*rows, model.ffn_hidden_size),
    }
    if manifest is not None:
        vocabulary = pad_to_multiple(manifest.vocabulary_size, model.make_vocab_size_divisible_by)
        here["embedding.word_embeddings.weight"] = (vocabulary, *rows[1:])
    there = tensor_shapes(folder) if model.spec is None else {}
    for name, shape in here.items():
        if (found := there.get(name, shape)[: len(shape)]) != shape:
            words = f"{folder} is of another model: {name} is {[*found]} there and {[*shape]} here"
            raise ConfigError(words, where="checkpoint.load", hint="take the model section of the run that made it")


def values_after(config: RunConfig, manifest: Manifest | None, begun_with: CommonValues | None) -> CommonValues:
    """Return what a checkpoint that a run will save has of them. `manifest`: its data, None if they are not known."""
    fixed = compatibility.fixed_settings(config)
    if manifest is None:
        return {"fixed": fixed}
    goes_on = begun_with and not (config.checkpoint.finetune or config.checkpoint.no_load_data)
    former = begun_with["data"]["datasets"] if begun_with and goes_on and "data" in begun_with else {}
    datasets = {**former, **_own_records(config, manifest)}
    return {"fixed": fixed, "data": {"settings": order_settings(config, manifest), "datasets": datasets}}


def _own_records(config: RunConfig, manifest: Manifest) -> dict[str, dict[str, Any]]:
    sources = config.data.sources
    return {source.identity(name): order_record(config, manifest, name) for name, source in sources.items()}


def refuse_other_values(
    found: CommonValues, config: RunConfig, manifest: Manifest | None, path: Path, *, own: bool = False
) -> None:
    """Raise ConfigError if the ranks of this run would refuse a checkpoint with these values, at `path`.

    `own`: the checkpoint is the run's own; then no setting leaves a part of it out, and a submit compares the data.
    """
    saves, data = config.checkpoint, found.get("data")
    try:
        if own or not (saves.finetune or saves.no_load_optim):
            compatibility.refuse_other_fixed_settings(found["fixed"], compatibility.fixed_settings(config), path)
    except FatalTrainingError as error:
        raise ConfigError(error.message, where=str(path), hint=error.hint) from None
    if own or manifest is None or saves.finetune or saves.no_load_data or not isinstance(data, dict):
        return
    mine = _own_records(config, manifest)
    # a stream's own record, and the number of windows, are known when the data set is opened
    records = {
        name: {key: was[key] for key in was if key in mine.get(name, was)} for name, was in data["datasets"].items()
    }
    try:
        refuse_other_order(data["settings"], records, order_settings(config, manifest), mine)
    except FatalTrainingError as error:
        raise ConfigError(error.message, where="data", hint=compatibility.OTHER_DATA_HINT) from None
