"""Which shards a config names, in which order, and the manifest of them."""

from __future__ import annotations

import glob
import logging
from collections.abc import Iterable, Iterator
from itertools import count
from pathlib import Path

from relayrun.config.compose.schema import DataSource, RunConfig
from relayrun.control.rundir.run import Run
from relayrun.tokens.order.remote_shards import freeze_shards
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest
from relayrun.tokens.shards.prefixes import expand_paths, find_prefixes
from relayrun.tokens.stores.stores import is_url
from relayrun.tokens.streams.run_tokenizer import character_token_ids
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions

log = logging.getLogger(__name__)


def build_manifest(config: RunConfig, run: Run | None = None) -> Manifest:
    """Find the shards that a config names; data sets are named as there, without editions. Raises InputError.

    `run`: whose data they are to be, if it has begun.
    """
    if config.data.mock_data:
        size = config.data.mock_vocabulary_size
        eod = 0 if config.data.depends_on_ends else None  # made-up tokens count up and begin again at 0
        return Manifest.build(dict.fromkeys(config.data.sources), {}, vocabulary_size=size, eod=eod, tokenizer="mock")
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=config.data.tokenizer))
    if config.data.mask_tokens_except is not None:
        character_token_ids(config.data.mask_tokens_except, tokenizer)
    frozen = Manifest.read(run.manifest) if run is not None and run.manifest.exists() and run.revisions() else None
    return Manifest.build(
        {
            name: _stream_files(name, source, config.data.lanes, frozen)
            if source.is_stream
            else _shard_prefixes(name, source, frozen)
            for name, source in config.data.sources.items()
        },
        {
            name: _validation_prefixes(name, folders, frozen)
            if config.trainer == "native"
            else expand_paths([glob.escape(folder) for folder in folders])  # or prefixes, as flags name them
            for name, folders in config.data.validation.items()
        },
        vocabulary_size=tokenizer.size,
        eod=tokenizer.eos_id,
        tokenizer=config.data.tokenizer,
        tokenizer_fingerprint=tokenizer.fingerprint,
        tokenizer_ids=tokenizer.ids_fingerprint,
        split=config.data.split,
    )


def _stream_files(name: str, source: DataSource, lanes: int, frozen: Manifest | None) -> DatasetManifest:
    """The files of a data set that is text."""
    from relayrun.tokens.streams.files import (
        freeze_text_files,  # pyarrow, which a submit of token shards may do without
    )

    editions = [] if frozen is None else _editions(name, source, frozen)
    return freeze_text_files(name, source, lanes, [file for edition in editions for file in edition.files])


def _shard_prefixes(name: str, source: DataSource, frozen: Manifest | None) -> list[str] | DatasetManifest | None:
    """The shards of a data set; None where it has none by design."""
    if not source.paths:
        return None
    if any(is_url(path) for path in source.paths):
        return freeze_shards(source.paths)
    prefixes = expand_paths(source.paths)
    if frozen is None or frozen.listed_order or len(source.paths) == 1:
        return prefixes
    known = (dataset.fingerprint for dataset in _editions(name, source, frozen))
    return _in_first_order(f"data set {name!r}", prefixes, expand_paths(source.paths, listed=False), known)


def _validation_prefixes(name: str, folders: list[str], frozen: Manifest | None) -> list[str]:
    """The shards of a validation set."""
    paths = [Path(folder) for folder in folders]
    prefixes = find_prefixes(paths, listed=True)
    if frozen is None or frozen.listed_validation or len(paths) == 1 or name not in frozen.validation:
        return prefixes
    known = [frozen.validation[name].fingerprint]
    return _in_first_order(f"validation set {name!r}", prefixes, find_prefixes(paths), known)


def _in_first_order(what: str, prefixes: list[str], before: list[str], known: Iterable[str]) -> list[str]:
    """The list in the order in which it is given; but sorted, as in `before`, where a run began so.

    A list keeps its order. A run of an earlier version, which sorted every list, goes on with the order that it has.
    `known`: fingerprints of what it has.
    """
    if before == prefixes:
        return prefixes
    has = set(known)
    if DatasetManifest.build(prefixes).fingerprint in has or DatasetManifest.build(before).fingerprint not in has:
        return prefixes
    log.warning("%s: its shards stay in sorted order, with which this run began; the list has another", what)
    return before


def _editions(name: str, source: DataSource, frozen: Manifest) -> Iterator[DatasetManifest]:
    for edition in count(1):
        identity = source.model_copy(update={"edition": edition}).identity(name)
        if identity not in frozen.datasets:
            return
        yield frozen.datasets[identity]
