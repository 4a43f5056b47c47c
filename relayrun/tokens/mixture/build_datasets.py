"""Makes the data sets of a run, and the order in which it reads them, from a config and a manifest.

`order: window` is a `WindowOrder`, `document-window` a `DocumentWindowOrder`; other orders are callables that get a
`DatasetSpec`, a user's own by import path. Text that is tokenized while training is a `TextStream`. Only ranks and the
audit make data sets; a submit does not.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from relayrun.config.compose.schema import MOCK_ORDER, RunConfig
from relayrun.errors import ConfigError
from relayrun.tokens.order.datasets import Dataset, DatasetSpec, ValidationSet, WindowOrder
from relayrun.tokens.order.document_packing import DocumentWindowOrder
from relayrun.tokens.order.remote_shards import open_block_cache
from relayrun.tokens.order.sampler import MixturePart, MixtureSampler, Stream
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest

VALIDATION_SEED = 0
"""Fixed, so runs with other seeds are evaluated on the same windows."""
_MOCK_DATASET = "relayrun.tokens.order.datasets:MockDataset"


def training_order(
    config: RunConfig, manifest: Manifest, *, opening: str | None = None, cache: Path | None = None
) -> MixtureSampler:
    """Return the samples of a run from its beginning. `opening`: see `DatasetSpec`. Raises ConfigError. `cache`: folder
    for counts of rows if data.data_cache_dir is not set."""
    parts = {}
    for name, source in config.data.sources.items():
        identity = source.identity(name)
        dataset = make_dataset(config, manifest, name, opening=opening, cache=cache)
        stream = dataset.record() if isinstance(dataset, Stream) else {}
        record = {**order_record(config, manifest, name), **stream}
        parts[identity] = MixturePart(dataset=dataset, weight=source.weight, record=record)
    return MixtureSampler(parts, order_settings(config, manifest))


def order_settings(config: RunConfig, manifest: Manifest) -> dict[str, Any]:
    """Return the settings on which the order of all data sets depends, as a checkpoint records them."""
    return {
        "seed": config.training.seed,
        "seq_length": config.training.seq_length,
        "split": config.data.split,
        "vocabulary_size": manifest.vocabulary_size,
        "eod": manifest.eod,
        "tokenizer": manifest.tokenizer_fingerprint,
    }


def order_record(config: RunConfig, manifest: Manifest, name: str) -> dict[str, Any]:
    """Return the values that determine the order of a data set, as far as they are known without opening it."""
    order, options = config.data.order_of(name)
    fingerprint = manifest.datasets[config.data.sources[name].identity(name)].fingerprint
    return {"fingerprint": fingerprint, "order": order, "options": options, **config.data.stream_of(name)}


def validation_sets(
    config: RunConfig, manifest: Manifest, *, opening: str | None = None, cache: Path | None = None
) -> dict[str, ValidationSet]:
    """Return the held-out sets: those given by path, and the share of each data set that `data.split` holds out.
    `opening`, `cache`: see `training_order`. Raises ConfigError."""
    length, split = config.training.seq_length, config.data.split
    orders = {
        name: validation_set(config, manifest, name, opening=opening, cache=cache) for name in manifest.validation
    }
    for name, source in config.data.sources.items() if split else ():
        shards = manifest.datasets[source.identity(name)]
        blocks, seed = open_block_cache(config.data, shards), VALIDATION_SEED
        share = WindowOrder(shards, seq_length=length, name=name, seed=seed, split=split, held_out=True, blocks=blocks)
        orders[name] = ValidationSet(name=name, dataset=share)
    return orders


def validation_set(
    config: RunConfig, manifest: Manifest, name: str, *, opening: str | None = None, cache: Path | None = None
) -> ValidationSet:
    """Return the validation set `name`, given by path. Raises ConfigError."""
    shards, length = manifest.validation[name], config.training.seq_length
    dataset: Dataset
    if config.data.validation_cut is None:
        dataset = WindowOrder(shards, seq_length=length, seed=VALIDATION_SEED, name=name)
    else:
        kept = _index_folder(config, cache)
        dataset = document_order(config, manifest, name, shards, held_out=True, cache=kept, opening=opening)
    return ValidationSet(name=name, dataset=dataset)


def make_dataset(
    config: RunConfig, manifest: Manifest, name: str, *, opening: str | None = None, cache: Path | None = None
) -> Dataset | Stream:
    """Return the data set `name` of the config. `opening`, `cache`: see `training_order`. Raises ConfigError."""
    training, data = config.training, config.data
    source = data.sources[name]
    identity, order = source.identity(name), source.order or data.order
    shards = manifest.datasets[identity]
    if source.is_stream:
        return text_stream(config, manifest, name, shards)
    if order == "window":
        return WindowOrder(
            shards,
            seq_length=training.seq_length,
            seed=training.seed,
            name=identity,
            split=data.split,
            blocks=open_block_cache(data, shards),
        )
    if name in data.cut_by_document:
        return document_order(config, manifest, name, shards, cache=_index_folder(config, cache), opening=opening)
    make = dataset_factory(order, f"data set {identity!r}")
    dataset = make(
        DatasetSpec(
            name=identity,
            seed=training.seed,
            seq_length=training.seq_length,
            manifest=shards,
            split=data.split,
            cache_dir=data.data_cache_dir,
            opening=opening,
            options=source.options,
        )
    )
    if len(dataset) < 1:
        raise ConfigError(f"{order} gives no window", where=f"data set {identity!r}")
    return dataset


def text_stream(config: RunConfig, manifest: Manifest, name: str, files: DatasetManifest) -> Stream:
    """Return the text data set `name` of the config over `files`. Raises ConfigError."""
    # imports pyarrow and tokenizers, which token shards do not need
    from relayrun.tokens.streams.samples import SampleShape, StreamEncoder
    from relayrun.tokens.streams.text_stream import TextStream

    data, identity, settings = config.data, config.data.sources[name].identity(name), config.data.streams[name]
    shape = SampleShape.from_settings(
        data.cut_by_document.get(name),
        seq_length=config.training.seq_length,
        eod=manifest.eod,
        vocabulary_size=manifest.vocabulary_size,
        where=f"data set {identity!r}",
    )
    return TextStream(
        files.files,
        settings,
        shape,
        StreamEncoder(data.tokenizer, manifest, files.files, settings.column),
        name=identity,
        seed=config.training.seed,
        lanes=data.lanes,
    )


def document_order(
    config: RunConfig,
    manifest: Manifest,
    name: str,
    shards: DatasetManifest,
    *,
    held_out: bool = False,
    cache: Path | None = None,
    opening: str | None = None,
) -> DocumentWindowOrder:
    """Return the data set `name` of the config, with `order: document-window`, over `shards`; `held_out`: a validation
    set. Raises ConfigError. `cache`: folder for the counts of rows; None: rows are counted here."""
    data, cut, identity, seed = config.data, config.data.validation_cut, name, VALIDATION_SEED
    if not held_out:
        cut, identity, seed = data.cut_by_document[name], data.sources[name].identity(name), config.training.seed
    assert cut is not None
    return DocumentWindowOrder(
        shards,
        cut,
        seq_length=config.training.seq_length,
        seed=seed,
        name=identity,
        eod=manifest.eod,
        padding=manifest.eod or 0,
        vocabulary_size=manifest.vocabulary_size,
        cache=cache,
        opening=opening,
        blocks=open_block_cache(data, shards),
    )


def _index_folder(config: RunConfig, cache: Path | None) -> Path | None:
    return Path(config.data.data_cache_dir) if config.data.data_cache_dir else cache


def dataset_factory(order: str, where: str) -> Callable[[DatasetSpec], Dataset]:
    """Return what makes data sets of this order. Raises ConfigError."""
    try:
        found = pkgutil.resolve_name(_MOCK_DATASET if order == MOCK_ORDER else order)
    except (ImportError, AttributeError) as error:
        hint = "write module:callable, and put its folder on PYTHONPATH"
        raise ConfigError(f"order {order!r} cannot be imported: {error}", where=where, hint=hint) from None
    if not callable(found):
        raise ConfigError(f"order {order!r} is no callable", where=where)
    return cast(Callable[[DatasetSpec], Dataset], found)
