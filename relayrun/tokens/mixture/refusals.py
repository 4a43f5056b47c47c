"""What cannot be asked of a mixture, why, and what would help, in numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

import numpy as np

from relayrun.errors import ConfigError, InputError
from relayrun.tokens.mixture.summary import MixtureDataset
from relayrun.tokens.shards.record import ShardRecords, TokenizerRecord

log = logging.getLogger(__name__)

MAX_REPEATS = 100
"""How often a dataset may be read in a mixture unless somebody says otherwise."""


def refuse_repeats(datasets: Sequence[MixtureDataset], targets: Sequence[int], *, most: int) -> None:
    """Raise ConfigError if a dataset would be read more than `most` times to give its target of tokens."""
    for dataset, target in zip(datasets, targets, strict=True):
        if target > most * dataset.available:
            times = math.ceil(target / dataset.available)
            raise ConfigError(
                f"this dataset has {dataset.available:,} tokens, and {target:,}, its share, would be all of them "
                f"{times:,} times; {most:,} is the most",
                where=dataset.folder,
                hint=f"give it about {_percent(dataset.weight * most / times)} of the weights or less, leave it out, ask "
                f"for fewer tokens, or, if it is meant, --most-repeats {times}",
            )


def refuse_empty_datasets(
    datasets: Sequence[MixtureDataset], targets: Sequence[int], *, tokens: int | None, repeat: bool, most: int
) -> None:
    """Raise ConfigError if one of `datasets`, which have been taken from, gives nothing.

    Its target is then less than half of its first document. Only what would help is advised.
    """
    found = next(((d, target) for d, target in zip(datasets, targets, strict=True) if not d.tokens), None)
    if found is None:
        return
    starved, target = found
    first = _first_document(starved)
    need = _min_tokens(starved)
    whole = round(sum(targets))
    share = f"{100 * starved.weight:.2g} % of {whole:,} tokens"
    what = f"{target:,} tokens, its share ({share}), are less than half of its first document, which has {first:,}"
    ways = []
    shortest = min(datasets, key=lambda d: d.available / d.weight)
    if need <= whole:
        ways.append(f"give it about {_percent(need / whole, up=True)} of the weights or more, or leave it out")
    elif tokens is None and not repeat and shortest is not starved:
        what += f"; the mixture ends there, where {shortest.name} with {shortest.available:,} tokens is used up"
        ratio = need * (1 - shortest.weight) / (starved.weight * shortest.available)
        ways.append(f"give {shortest.name} about {_percent(1 / (1 + ratio))} of the weights or less, or leave it out")
    elif len(datasets) > 1:
        ways.append("leave it out")
    least = max(math.ceil(_min_tokens(dataset) / dataset.weight) for dataset in datasets)
    if all(least * dataset.weight <= most * dataset.available for dataset in datasets):
        times = least * shortest.weight / shortest.available
        again = f", which read {shortest.name} {times:,.1f} times" if times > 1 else ""
        ways.append(f"ask for --tokens {least} or more{again}")
    raise ConfigError(what, where=starved.folder, hint="; or ".join(ways) or None)


def refuse_two_tokenizers(datasets: Sequence[MixtureDataset], *, allow: bool = False) -> None:
    """Raise InputError if two shards were made with different tokenizers, as far as records tell; `allow`: warn."""
    records = ShardRecords()
    first: tuple[str, TokenizerRecord] | None = None
    for dataset in datasets:
        for shard, real in zip(dataset.shards, dataset.reals, strict=True):
            record = records.of(real.removesuffix(".bin"))
            if record is None or record.made is None:
                continue
            first = first or (shard.prefix, record.made)
            if record.made.same(first[1]):
                continue
            error = InputError(
                f"another tokenizer made this shard than {first[0]}: ids mean other text",
                where=shard.prefix,
                hint="tokenize one of them again, or leave it out; if it is meant, --allow-other-tokenizer",
            )
            if not allow:
                raise error
            log.warning("taken, as --allow-other-tokenizer says: %s: %s", shard.prefix, error.message)
            return


def _min_tokens(dataset: MixtureDataset) -> int:
    """Tokens of which the first document is the nearest end."""
    return _first_document(dataset) // 2 + 1


def _first_document(dataset: MixtureDataset) -> int:
    """Tokens of the first document that is not empty, in the order in which the mixture takes them."""
    for shard in dataset.shards:
        if shard.tokens:
            ends = np.zeros(shard.sequences + 1, np.int64)
            np.cumsum(shard.lengths(), out=ends[1:])
            at_ends = ends[np.asarray(shard.bounds())]
            return int(at_ends[at_ends > 0][0])
    return 0


def _percent(value: float, *, up: bool = False) -> str:
    """A share in percent with two digits, rounded to the safe side: down, or `up`."""
    digits = 1 - math.floor(math.log10(100 * value))
    scale = 10.0**digits
    rounded = (math.ceil if up else math.floor)(100 * value * scale) / scale
    return f"{rounded:.{max(digits, 0)}f} %"
