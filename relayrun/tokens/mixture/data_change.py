"""Changes of a run's data at a submit: a pure function of manifests and configs.

The table in `relayrun help data-order` ("What is refused") lists which changes are taken, which are refused unless
they are accepted, and which cannot be accepted. A refusal names each difference.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from relayrun.config.compose.schema import DataSection, DataSource, RunConfig
from relayrun.errors import InputError
from relayrun.tokens.order.sampler import short_value
from relayrun.tokens.order.schedule import integer_weights
from relayrun.tokens.shards.manifest import DatasetManifest, Manifest

T = TypeVar("T")
ACCEPT_OPTION = "--accept-data-change"


@dataclass(frozen=True, kw_only=True)
class AcceptedData:
    """The result of a submit's data change."""

    config: RunConfig
    """The submitted config, with the editions in its mixture."""
    manifest: Manifest
    notes: list[str]
    """Changes that were accepted, a line each."""


def apply_data_change(
    *, frozen: Manifest, history: Sequence[RunConfig], found: Manifest, config: RunConfig, accept: bool, trained: bool
) -> AcceptedData:
    """Bring a run's manifest `frozen` up to `found`, the data of the submitted `config`. `found` names data sets like
    the config, without editions; `history` are the run's config revisions, newest first; `trained`: the run has a
    checkpoint. Raises InputError that names every difference that is not accepted."""
    fixed = _fixed_differences(frozen, history[0], found, config)
    if fixed and trained:
        words = "these cannot change in a run that has trained, not even accepted:\n  " + "\n  ".join(fixed)
        raise InputError(words, hint="restore them, or start a run with another name")
    changes = list(fixed)
    datasets, sources = dict(frozen.datasets), {}
    for name, source in config.data.sources.items():
        edition, change = _edition(name, source, found.datasets[name], frozen, history, config.data)
        sources[name] = source.model_copy(update={"edition": edition})
        datasets[sources[name].identity(name)] = found.datasets[name]
        changes += change
    for name, held_out in found.validation.items():
        before = frozen.validation.get(name)
        if before is not None and before.fingerprint != held_out.fingerprint:
            changes += [f"validation {name!r}: {line}" for line in _shard_differences(before, held_out)]
    if changes and not accept:
        how = "see `relayrun help data-order`" if trained else "it has not trained, and would begin anew"
        hint = f"restore them, or submit with {ACCEPT_OPTION}: {how}"
        raise InputError("the data are not those that this run began with:\n  " + "\n  ".join(changes), hint=hint)
    if changes and not trained:
        return AcceptedData(config=config, manifest=found, notes=changes)
    _refuse_leak(frozen, sources, found, config.data.split)
    manifest = replace(
        frozen,
        datasets=datasets,
        validation=found.validation,
        tokenizer=found.tokenizer,
        tokenizer_ids=found.tokenizer_ids or frozen.tokenizer_ids,
    )
    manifest.check_apart([source.identity(name) for name, source in sources.items()], split=config.data.split)
    if any(source.edition > 1 for source in sources.values()):
        data = config.data.model_copy(update={"datasets": [], "mixture": sources})
        config = config.model_copy(update={"data": data})
    return AcceptedData(config=config, manifest=manifest, notes=changes)


def _refuse_leak(frozen: Manifest, sources: Mapping[str, DataSource], found: Manifest, split: float) -> None:
    """Refuse other files with a split: their end would be held out, and the run may have trained on it."""
    known = {dataset.fingerprint for dataset in frozen.datasets.values()}
    for name, source in sources.items():
        if split and source.edition > 1 and found.datasets[name].fingerprint not in known:
            raise InputError(
                f"{name}: these files are not those the run began with, and data.split would hold out "
                "windows of them that may have been trained on",
                hint="restore the files, or add the new ones alone as a data set of another name",
            )


def integer_mixture_weights(config: RunConfig) -> dict[str, int]:
    """Return the integer weights of a config's mixture by identity; a change begins a phase."""
    return integer_weights({source.identity(name): source.weight for name, source in config.data.sources.items()})


def _edition(
    name: str,
    source: DataSource,
    files: DatasetManifest,
    frozen: Manifest,
    history: Sequence[RunConfig],
    data: DataSection,
) -> tuple[int, list[str]]:
    """Return the edition of a data set, and the changes that must be accepted for it. `data` belongs to the config."""
    editions: dict[int, DatasetManifest] = {}
    while (identity := source.model_copy(update={"edition": len(editions) + 1}).identity(name)) in frozen.datasets:
        editions[len(editions) + 1] = frozen.datasets[identity]
    revision = next((revision for revision in history if name in revision.data.sources), None)
    if not editions or revision is None:
        twins = [
            other
            for other, dataset in frozen.datasets.items()
            if (dataset.shards or dataset.files) and dataset.fingerprint == files.fingerprint and other != name
        ]
        return 1, [
            f"{name}: has the files of {twin!r}, which the run has under that name: its windows would come again"
            for twin in twins[:1]
        ]
    last = revision.data.sources[name]
    was, now = revision.data.order_of(name), data.order_of(name)
    if was != now:
        return max(editions) + 1, [f"{name}: order and options were {was}, are {now}: it would begin anew"]
    if changed := _stream_setting_differences(revision.data.stream_of(name), data.stream_of(name)):
        return max(editions) + 1, [f"{name}: {line}: it would begin anew" for line in changed]
    if editions[last.edition].fingerprint == files.fingerprint:
        return last.edition, []
    for edition, dataset in reversed(editions.items()):
        if dataset.fingerprint == files.fingerprint:
            return edition, [f"{name}: has the files of its edition {edition} again, and would go on there"]
    lines = [f"{name}: {line}" for line in _shard_differences(editions[last.edition], files)]
    return max(editions) + 1, lines


def _stream_setting_differences(was: Mapping[str, object], now: Mapping[str, object]) -> list[str]:
    if not was or not now:
        kinds = [side.get("source", "tokens") for side in (was, now)]
        return [] if was == now else [f"source was {kinds[0]}, is {kinds[1]}"]
    names = [name for name in {**was, **now} if was.get(name) != now.get(name)]
    return [f"{name} was {was.get(name)!r}, is {now.get(name)!r}" for name in names]


def _fixed_differences(frozen: Manifest, previous: RunConfig, found: Manifest, config: RunConfig) -> list[str]:
    """Return differences that would change the meaning of sample numbers, each with its reason."""
    before, now = previous.training, config.training
    whole = frozen.tokenizer_fingerprint, found.tokenizer_fingerprint
    ids = frozen.tokenizer_ids, found.tokenizer_ids
    tokenizers = ids if all(ids) else whole  # a template or a decoder may change: it decides no id
    compared: list[tuple[str, object, object, str]] = [
        ("tokenizer", *tokenizers, "ids would mean other text"),
        ("vocabulary size", frozen.vocabulary_size, found.vocabulary_size, "the embeddings would not fit"),
        ("end of document", frozen.eod, found.eod, "documents would end elsewhere"),
        ("training.seq_length", before.seq_length, now.seq_length, "positions are counted in windows of this length"),
        ("training.seed", before.seed, now.seed, "the running epochs would be shuffled anew"),
        ("data.split", previous.data.split, config.data.split, "windows would move into or out of training"),
    ]
    return [
        f"{name} was {short_value(was)}, is {short_value(value)}: {why}"
        for name, was, value, why in compared
        if was != value
    ]


def _shard_differences(before: DatasetManifest, now: DatasetManifest) -> list[str]:
    old, new = (_by_name({shard.prefix: shard for shard in part.shards}) for part in (before, now))
    lines = [*_other_names("shard", old, new), *_file_differences(before, now)]
    for name in old:
        if name in new and (was := old[name]).fingerprint != (now_is := new[name]).fingerprint:
            same = ", in another order or of other lengths" if was.tokens == now_is.tokens else ""
            lines.append(
                f"shard {name} had {was.documents:,} documents, {was.tokens:,} tokens, now "
                f"{now_is.documents:,} documents, {now_is.tokens:,} tokens{same}"
            )
        elif name in new and old[name].bin_bytes != new[name].bin_bytes:
            lines.append(f"shard {name}: the .bin had {old[name].bin_bytes:,} bytes, now {new[name].bin_bytes:,}")
    if not lines:
        lines = ["its shards stand in another order" if list(old) != list(new) else "its token type differs"]
    return lines if len(lines) <= 20 else [*lines[:20], f"and {len(lines) - 20:,} more"]


def _file_differences(before: DatasetManifest, now: DatasetManifest) -> list[str]:
    old, new = (_by_name({file.path: file for file in part.files}) for part in (before, now))
    lines = _other_names("file", old, new)
    for name in [name for name in old if name in new]:
        was, now_is = old[name], new[name]
        if was.size != now_is.size:
            lines.append(f"file {name} had {was.size:,} bytes, now {now_is.size:,}")
        elif was.fingerprint != now_is.fingerprint:
            why = f": {was.other_time()}" if was.changed != now_is.changed and not was.content else ""
            lines.append(f"file {name} was changed{why}")
        elif (was.fragments, was.rows) != (now_is.fragments, now_is.rows):
            lines.append(f"file {name}: stream.limit takes another part of it")
    if not lines and old:
        lines = ["its files stand in another order"]
    return lines


def _other_names(what: str, old: Mapping[str, object], new: Mapping[str, object]) -> list[str]:
    gone = [f"{what} {name} is gone" for name in old if name not in new]
    return gone + [f"{what} {name} was added" for name in new if name not in old]


def _by_name(entries: Mapping[str, T]) -> dict[str, T]:
    """Return entries by the part of their path behind the common folder, which may have moved."""
    first, last = min(entries, default=""), max(entries, default="")
    same = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    start = first.rfind("/", 0, same) + 1
    return {path[start:]: entry for path, entry in entries.items()}
