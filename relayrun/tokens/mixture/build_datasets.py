"""From a config and a manifest to the order in which a run reads: the one place where data sets are made.

`order: window` is `WindowOrder`, `document-window` is `DocumentWindowOrder`; the others are callables that get one
`DatasetSpec`, a user's own by import path. Text that is tokenized as it is read is a `TextStream`.
They are imported by the ranks and by the audit only, never by a submit.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path

from relayrun.config.compose.schema import MOCK_ORDER, RunConfig
from relayrun.config.sections.data import DocumentWindowSection
from relayrun.errors import ConfigError
from relayrun.tokens.order.datasets import Dataset, DatasetSpec, ValidationSet, WindowOrder
from relayrun.tokens.order.document_packing import DocumentWindowOrder
from relayrun.tokens.order.remote_shards import open_block_cache
from relayrun.tokens.order.sampler import MixturePart, MixtureSampler, Stream
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest

VALIDATION_SEED = 0
"""Fixed, so that runs with other seeds are evaluated on the same windows."""


def training_order(
    config: RunConfig, manifest: Manifest, *, opening: str | None = None, cache: Path | None = None
) -> MixtureSampler:
    """The samples of a run that begins. `opening`: see `DatasetSpec`. Raises ConfigError.

    `cache`: the folder in which rows are counted once, where the config's data.data_cache_dir names none.
    """
    data, training = config.data, config.training
    parts = {}
    for name, source in data.sources.items():
        identity = source.identity(name)
        fingerprint = manifest.datasets[identity].fingerprint
        order, options = data.order_of(name)
        dataset = make_dataset(config, manifest, name, opening=opening, cache=cache)
        stream = {**data.stream_of(name), **dataset.record()} if isinstance(dataset, Stream) else {}
        parts[identity] = MixturePart(
            dataset=dataset,
            weight=source.weight,
            record={"fingerprint": fingerprint, "order": order, "options": options, **stream},
        )
    settings = {
        "seed": training.seed,
        "seq_length": training.seq_length,
        "split": data.split,
        "vocabulary_size": manifest.vocabulary_size,
        "eod": manifest.eod,
        "tokenizer": manifest.tokenizer_fingerprint,
    }
    return MixtureSampler(parts, settings)


def validation_sets(
    config: RunConfig, manifest: Manifest, *, opening: str | None = None, cache: Path | None = None
) -> dict[str, ValidationSet]:
    """The held-out sets: those given by path, and the share of each data set that `data.split` holds out.

    `opening`, `cache`: as for `training_order`. Raises ConfigError.
    """
    length, split = config.training.seq_length, config.data.split
    orders = {
        name: validation_set(config, manifest, name, opening=opening, cache=cache) for name in manifest.validation
    }
    if split:
        for name, source in config.data.sources.items():
            share = WindowOrder(
                manifest.datasets[source.identity(name)],
                seq_length=length,
                name=name,
                seed=VALIDATION_SEED,
                split=split,
                held_out=True,
                blocks=open_block_cache(config.data, manifest.datasets[source.identity(name)]),
            )
            orders[name] = ValidationSet(name=name, dataset=share)
    return orders


def validation_set(
    config: RunConfig, manifest: Manifest, name: str, *, opening: str | None = None, cache: Path | None = None
) -> ValidationSet:
    """The validation set called `name`, which is given by path. Raises ConfigError."""
    shards, length = manifest.validation[name], config.training.seq_length
    cut = config.data.validation_cut
    dataset: Dataset
    if cut is None:
        dataset = WindowOrder(shards, seq_length=length, seed=VALIDATION_SEED, name=name)
    else:
        kept = _index_folder(config, cache)
        dataset = _document_window_order(
            config, manifest, shards, cut, name=name, seed=VALIDATION_SEED, cache=kept, opening=opening
        )
    return ValidationSet(name=name, dataset=dataset)


def mixture_datasets(config: RunConfig) -> list[str]:
    """Identities of the data sets that a config's mixture reads."""
    return [source.identity(name) for name, source in config.data.sources.items()]


def make_dataset(
    config: RunConfig, manifest: Manifest, name: str, *, opening: str | None = None, cache: Path | None = None
) -> Dataset | Stream:
    """The data set that the config calls `name`. `opening`, `cache`: see `training_order`."""
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
    make = _dataset_factory(order, f"data set {identity!r}")
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
    """The data set that the config calls `name`, which is text, over `files`. Raises ConfigError."""
    # pyarrow and tokenizers: ranks that read token shards may do without
    from relayrun.tokens.streams.samples import SampleShape, StreamEncoder
    from relayrun.tokens.streams.text_stream import TextStream

    data, identity, settings = config.data, config.data.sources[name].identity(name), config.data.streams[name]
    shape = SampleShape.of(
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
    cache: Path | None = None,
    opening: str | None = None,
) -> DocumentWindowOrder:
    """The data set that the config calls `name`, of `order: document-window`, over `shards`. Raises ConfigError.

    `cache`: the folder in which its rows are counted once; None: they are counted here.
    """
    cut, identity = config.data.cut_by_document[name], config.data.sources[name].identity(name)
    seed = config.training.seed
    return _document_window_order(config, manifest, shards, cut, name=identity, seed=seed, cache=cache, opening=opening)


def _document_window_order(
    config: RunConfig,
    manifest: Manifest,
    shards: DatasetManifest,
    cut: DocumentWindowSection,
    *,
    name: str,
    seed: int,
    cache: Path | None,
    opening: str | None,
) -> DocumentWindowOrder:
    return DocumentWindowOrder(
        shards,
        cut,
        seq_length=config.training.seq_length,
        seed=seed,
        name=name,
        eod=manifest.eod,
        padding=manifest.eod or 0,
        vocabulary_size=manifest.vocabulary_size,
        cache=cache,
        opening=opening,
        blocks=open_block_cache(config.data, shards),
    )


def _index_folder(config: RunConfig, cache: Path | None) -> Path | None:
    return Path(config.data.data_cache_dir) if config.data.data_cache_dir else cache


def _dataset_factory(order: str, where: str) -> Callable[[DatasetSpec], Dataset]:
    """What makes the data sets of an order that is imported. Each is imported where it is asked for."""
    if order == "megatron":
        from relayrun.tokens.order.megatron import MegatronOrder

        return MegatronOrder
    if order == MOCK_ORDER:
        from relayrun.tokens.order.datasets import MockDataset

        return MockDataset
    return _imported_factory(order, where)


def _imported_factory(path: str, where: str) -> Callable[[DatasetSpec], Dataset]:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"order {path!r} cannot be imported: {error}",
            where=where,
            hint="write module:callable, and put its folder on PYTHONPATH",
        ) from None
    if not callable(found):
        raise ConfigError(f"order {path!r} is no callable", where=where)
    made: Callable[[DatasetSpec], Dataset] = found
    return made
