"""The shards of a run as Megatron-LM's `--data-path` has them: prefixes, with weights where there is a mixture."""

from __future__ import annotations

from pathlib import Path

from relayrun.config.compose.schema import DataSection, DataSource
from relayrun.submit.megatron_lm.flags import Flag
from relayrun.tokens.shards.indexed import Shard
from relayrun.tokens.shards.manifest import check_held_out
from relayrun.tokens.shards.prefixes import expand_paths, find_prefixes


def data_path_flags(data: DataSection) -> list[Flag]:
    """The flags of training and validation data. Raises InputError for a path that leads to no shard.

    Without a mixture no prefix has a weight: Megatron-LM weighs them by their samples. In a mixture the weight of a
    data set goes to its shards by their tokens, so that each of its samples is as likely as the others.
    """
    if data.mock_data:
        return []
    found = {name: expand_paths(source.paths) for name, source in data.sources.items()}
    validation = {
        name: find_prefixes([Path(folder) for folder in folders], listed=True)
        for name, folders in data.validation.items()
    }
    check_held_out(found, validation, split=found if data.split else ())
    if data.mixture:
        training, source = _weighted_prefixes(data.mixture, found), "data.mixture"
    else:
        training, source = [prefix for prefixes in found.values() for prefix in prefixes], "data.datasets"
    if not data.validation:
        return [Flag(name="data-path", values=tuple(training), source=source)]
    held_out = [prefix for prefixes in validation.values() for prefix in prefixes]
    return [
        Flag(name="train-data-path", values=tuple(training), source=source),
        Flag(name="valid-data-path", values=tuple(held_out), source="data.validation"),
    ]


def _weighted_prefixes(mixture: dict[str, DataSource], found: dict[str, list[str]]) -> list[str]:
    """Weights and prefixes in turns."""
    words: list[str] = []
    for name, source in mixture.items():
        prefixes = found[name]
        tokens = [Shard.open(prefix).tokens for prefix in prefixes] if len(prefixes) > 1 else [1]
        total = sum(tokens) or 1
        for prefix, share in zip(prefixes, tokens, strict=True):
            if share:
                words += [f"{source.weight * share / total:.12g}", prefix]
    return words
