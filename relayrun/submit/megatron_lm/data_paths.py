"""The shards of a run as Megatron-LM's `--data-path` has them: prefixes, with weights where there is a mixture."""

from __future__ import annotations

from pathlib import Path

from relayrun.config.schema import Data, DataSource
from relayrun.shards.indexed import Shard
from relayrun.shards.prefixes import expand, find_prefixes
from relayrun.submit.megatron_lm.flag import Flag


def flags_of(data: Data) -> list[Flag]:
    """The flags of training and validation data. Raises InputError for a path that leads to no shard.

    Without a mixture no prefix has a weight: Megatron-LM weighs them by their samples. In a mixture the weight of a
    data set goes to its shards by their tokens, so that each of its samples is as likely as the others.
    """
    if data.mock_data:
        return []
    if data.mixture:
        training, source = _weighted(data.mixture), "data.mixture"
    else:
        training, source = expand(data.datasets), "data.datasets"
    if not data.validation:
        return [Flag(name="data-path", values=tuple(training), source=source)]
    held_out = [
        prefix
        for folders in data.validation.values()
        for prefix in find_prefixes([Path(folder) for folder in folders], listed=True)
    ]
    return [
        Flag(name="train-data-path", values=tuple(training), source=source),
        Flag(name="valid-data-path", values=tuple(held_out), source="data.validation"),
    ]


def _weighted(mixture: dict[str, DataSource]) -> list[str]:
    """Weights and prefixes in turns."""
    words: list[str] = []
    for source in mixture.values():
        prefixes = expand(source.paths)
        tokens = [Shard.open(prefix).tokens for prefix in prefixes] if len(prefixes) > 1 else [1]
        total = sum(tokens) or 1
        for prefix, share in zip(prefixes, tokens, strict=True):
            if share:
                words += [f"{source.weight * share / total:.12g}", prefix]
    return words
