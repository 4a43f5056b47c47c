"""Creates a mixture: a folder of links to token shards in which each data set has its weight in tokens.

The `refuse_...` functions refuse impossible mixtures, with the numbers that would help.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

from relayrun import progress
from relayrun.control.rundir.find_runs import all_run_folders
from relayrun.control.rundir.run import PLAN_NAME
from relayrun.errors import ConfigError, InputError, refuse_unwritable, refuse_urls
from relayrun.files import RealPathCache, write_atomic
from relayrun.publishing import InputFiles, published_folder
from relayrun.terminal import terminal_width
from relayrun.tokens.mixture import shard_selection
from relayrun.tokens.mixture.shard_selection import (
    CutShard,
    MixtureDataset,
    mixture_summary_json,
    pass_folder,
    summarise_mixture,
)
from relayrun.tokens.shards.manifest import doubled_texts
from relayrun.tokens.shards.prefixes import SUMMARY_JSON, SUMMARY_TEXT, find_prefixes, mixture_files
from relayrun.tokens.shards.shard import Shard, ShardRecords

log = logging.getLogger(__name__)

MAX_REPEATS = 100
"""Default limit of passes over a dataset."""


def refuse_repeats(datasets: Sequence[MixtureDataset], targets: Sequence[int], *, most: int) -> None:
    """Raise ConfigError if a dataset would be read more than `most` times to reach its target of tokens."""
    for dataset, target in zip(datasets, targets, strict=True):
        if target > most * dataset.available:
            times = math.ceil(target / dataset.available)
            raise ConfigError(
                f"this dataset has {dataset.available:,} tokens, and {target:,}, its share, would be all of them "
                f"{times:,} times; {most:,} is the most",
                where=dataset.folder,
                hint=f"give it about {_percent(dataset.weight * most / times)} of the weights or less, leave "
                "it out, ask "
                f"for fewer tokens, or, if it is meant, --most-repeats {times}",
            )


def refuse_empty_datasets(
    datasets: Sequence[MixtureDataset], targets: Sequence[int], *, tokens: int | None, repeat: bool, most: int
) -> None:
    """Raise ConfigError if one of the selected `datasets` contributes no token. Its target is then less than half of
    its first document. The hint lists only remedies that work."""
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
    """Raise InputError for shards whose records name different tokenizers; `allow`: warn instead."""
    records = ShardRecords()
    known = ((shard.prefix, records.of(shard.prefix)) for dataset in datasets for shard in dataset.shards)
    ids = {prefix: record.made.ids for prefix, record in known if record is not None and record.made is not None}
    first = next(iter(ids), "")
    if (other := next((prefix for prefix in ids if ids[prefix] != ids[first]), None)) is None:
        return
    words = f"another tokenizer made this shard than {first}: ids mean other text"
    hint = "tokenize one of them again, or leave it out; if it is meant, --allow-other-tokenizer"
    if not allow:
        raise InputError(words, where=other, hint=hint)
    log.warning("taken, as --allow-other-tokenizer says: %s: %s", other, words)


def _min_tokens(dataset: MixtureDataset) -> int:
    """Return the smallest target for which the first document is the nearest end."""
    return _first_document(dataset) // 2 + 1


def _first_document(dataset: MixtureDataset) -> int:
    """Return the tokens of the first non-empty document, in the order in which the mixture takes them."""
    for shard in dataset.shards:
        if shard.tokens:
            ends = shard.document_ends()
            return int(ends[ends > 0][0])
    return 0


def _percent(value: float, *, up: bool = False) -> str:
    """Return a share in percent with two digits, rounded to the safe side: down, or `up`."""
    digits = 1 - math.floor(math.log10(100 * value))
    scale = 10.0**digits
    rounded = (math.ceil if up else math.floor)(100 * value * scale) / scale
    return f"{rounded:.{max(digits, 0)}f} %"


LINK_THREADS = 4  # more are slower on a local disk: reading a header is as fast as starting a thread
MAX_LINKS = 10_000_000


def create_mixture(
    folders: Sequence[Path],
    weights: Sequence[float],
    output: Path,
    *,
    seed: int = 0,
    tokens: int | None = None,
    allow_repeats: bool = False,
    most_repeats: int = MAX_REPEATS,
    allow_other_tokenizer: bool = False,
    dry_run: bool = False,
    replace_used: bool = False,
    report: Callable[[str], None] = lambda line: None,
) -> str:
    """Write the mixture of `folders` into the folder `output` and return its summary, a table and a forecast.

    The folder appears atomically and replaces a former mixture; any other content is refused. `tokens`: total; default:
    until the first dataset is used up, or, with `allow_repeats`, the last. `most_repeats`: maximum passes over a
    dataset. `allow_other_tokenizer`: warn about different tokenizers. `dry_run`: write nothing. `replace_used`: replace
    also a mixture that runs of the project read. `report` receives lines of progress. Raises ConfigError for wrong
    weights or options, InputError for wrong folders, torn shards, text that stands there twice, or two tokenizers.
    """
    if len(folders) != len(weights):
        hint = "give one weight a folder, in the same order"
        raise ConfigError(f"{len(folders)} folders but {len(weights)} weights", where="--weights", hint=hint)
    shares = shard_selection.normalise_weights(weights)
    check_mixture_output(output, folders)
    if not dry_run:
        refuse_urls(output)
        refuse_unwritable(Path(os.path.realpath(output)).parent)
        if output.exists() and (runs := _runs_that_read(output)):
            words = f"runs read this mixture, and would go on with other data: {', '.join(runs)}"
            if not replace_used:
                raise InputError(words, where=output, hint="choose another output; if it is meant, --replace")
            log.warning("replaced, as --replace says: %s", words)
    read = InputFiles(())
    datasets = _read_datasets(folders, shares, seed, read, report)
    refuse_two_tokenizers(datasets, allow=allow_other_tokenizer)
    prefixes = [shard.prefix for dataset in datasets for shard in dataset.shards]
    if (doubled := doubled_texts(prefixes, refuse=True)) is not None:
        log.warning("%s", doubled)
    targets = shard_selection.tokens_per_dataset(
        [d.available for d in datasets], shares, tokens=tokens, repeat=allow_repeats
    )
    refuse_repeats(datasets, targets, most=most_repeats)
    datasets = [_take_tokens(dataset, target) for dataset, target in zip(datasets, targets, strict=True)]
    refuse_empty_datasets(datasets, targets, tokens=tokens, repeat=allow_repeats, most=most_repeats)
    links = sum(dataset.prefixes for dataset in datasets)
    if links > MAX_LINKS:
        words = f"{links:,} shards would be linked, because a small dataset is repeated often"
        raise ConfigError(words, where="--weights", hint="give it less weight, or merge its shards first")
    shown = summarise_mixture(datasets, seed, width=terminal_width())
    if dry_run:
        return shown
    report(f"linking {links:,} shards into {output}")
    with published_folder(output, replaces=lambda found: _check_former_mixture(found, output)) as building:
        with progress.Progress("linking", links, "shards"):
            for dataset in datasets:
                _link_shards(dataset, building / dataset.name)
        write_atomic(building / SUMMARY_TEXT, summarise_mixture(datasets, seed).encode("utf-8", "backslashreplace"))
        write_atomic(building / SUMMARY_JSON, mixture_summary_json(datasets, seed))
        read.check()
    report(f"made: {output}")
    return shown


def distinct_names(names: Sequence[str], fallbacks: Sequence[str], *, reserved: Sequence[str] = ()) -> list[str]:
    """Return distinct file names: a unique name is kept, the others get their fallback or a number."""
    counts = Counter(names)
    used = {name for name, count in counts.items() if count == 1} | set(reserved)
    numbers: Counter[str] = Counter()
    chosen = []
    for name, fallback in zip(names, fallbacks, strict=True):
        if counts[name] == 1 and name not in reserved:
            chosen.append(name)
            continue
        unique = fallback if len(os.fsencode(fallback)) <= 240 else name
        base = unique if len(os.fsencode(unique)) <= 240 else "shard"
        while unique in used:
            numbers[base] += 1
            unique = f"{base}-{numbers[base]}"
        used.add(unique)
        chosen.append(unique)
    return chosen


def check_mixture_output(output: Path, folders: Sequence[Path]) -> None:
    """Raise InputError for an output that overlaps an input or holds anything but a former mixture."""
    final = Path(os.path.realpath(output))
    for folder in folders:
        real = Path(os.path.realpath(folder))
        if final == real or real in final.parents or final in real.parents:
            words = "output and input lie inside each other"
            raise InputError(words, where=f"{output} and {folder}", hint="give an output folder of its own")
    if final.exists():
        _check_former_mixture(final, output)


def _runs_that_read(folder: Path) -> list[str]:
    """Return the project's runs whose frozen data or plan name a path below `folder`."""
    places = {os.path.join(place, "") for place in (os.path.abspath(folder), os.path.realpath(folder))}
    names = {json.dumps(place, ensure_ascii=ascii)[1:-1].encode() for place in places for ascii in (True, False)}
    found = []
    for run in all_run_folders():
        for file in (run.manifest, run.path / PLAN_NAME):
            with contextlib.suppress(OSError):
                content = file.read_bytes()
                if any(name in content for name in names):
                    found.append(f"{run.path.parent.name}/{run.path.name}")
                    break
    return found


def _check_former_mixture(final: Path, output: Path) -> None:
    if not final.is_dir():
        raise InputError("the output exists and is not a folder", where=output)
    hint = "move it away, or choose another output"
    expected = mixture_files(final)
    start, waiting = len(os.path.join(final, "")), [os.fspath(final)]
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                name, link = entry.path[start:], entry.is_symlink()
                if name not in expected or (expected[name] and not link):
                    words = f"the output holds something that no former mixture left there: {entry.name}"
                    raise InputError(words, where=output, hint=hint)
                if entry.is_dir(follow_symlinks=False):
                    waiting.append(entry.path)


def _read_datasets(
    folders: Sequence[Path], shares: Sequence[float], seed: int, read: InputFiles, report: Callable[[str], None]
) -> list[MixtureDataset]:
    roots = [folder.absolute() for folder in folders]
    bases = [os.path.basename(os.path.normpath(root)) or "dataset" for root in roots]
    names = distinct_names(
        bases, [f"{base}-{i + 1}" for i, base in enumerate(bases)], reserved=(SUMMARY_TEXT, SUMMARY_JSON)
    )
    real_path = RealPathCache()
    datasets = []
    for i, (root, name) in enumerate(zip(roots, names, strict=True)):
        prefixes = find_prefixes([folders[i]])
        report(f"reading the sizes of {len(prefixes):,} shards below {root}")
        read.add(prefix + suffix for prefix in prefixes for suffix in (".bin", ".idx"))
        start = len(os.path.join(root, ""))
        relative = [prefix[start:] for prefix in prefixes]
        parts = [prefixes[k : k + 64] for k in range(0, len(prefixes), 64)]
        with ThreadPoolExecutor(LINK_THREADS) as pool, progress.Progress("reading sizes", len(prefixes), "shards"):
            shards = [shard for part in pool.map(_open_shards, parts) for shard in part]
        bin_paths = [real_path(shard.prefix + ".bin") for shard in shards]
        if not any(shard.tokens for shard in shards):
            raise InputError("the shards of this folder hold no tokens", where=root, hint="leave it out")
        links = distinct_names(
            [os.path.basename(path) for path in relative], [path.replace("/", "-") for path in relative]
        )
        order = shard_selection.shuffled_order(relative, seed=seed, dataset=i)
        datasets.append(
            MixtureDataset(
                name=name,
                folder=str(root),
                weight=shares[i],
                shards=[shards[k] for k in order],
                links=[links[k] for k in order],
                bin_paths=[bin_paths[k] for k in order],
            )
        )
    return datasets


def _take_tokens(dataset: MixtureDataset, target: int) -> MixtureDataset:
    """Return the dataset with its selection for `target` tokens; the last shard ends at the nearest document."""
    take = shard_selection.select_shards([shard.tokens for shard in dataset.shards], target)
    taken, cut = take.shards, None
    if take.rest:
        cut = _cut_shard(dataset.shards[taken], take.rest)
        if cut.documents == dataset.shards[taken].documents:
            taken, cut = taken + 1, None
        elif not cut.tokens:
            cut = None
    passes = take.passes
    if taken == len(dataset.shards):
        passes, taken = passes + 1, 0
    return replace(dataset, passes=passes, taken=taken, cut=cut)


def _cut_shard(shard: Shard, tokens: int) -> CutShard:
    if shard.first_gap() is not None:
        words = "this shard cannot be cut: its sequences do not lie one behind the other"
        raise InputError(words, where=shard.prefix + ".idx", hint="write it again, as `relayrun dumps merge` does")
    ends = shard.document_ends()
    documents = shard_selection.nearest_end(ends, tokens)
    return CutShard(documents=documents, tokens=int(ends[documents]), of=shard)


def _open_shards(prefixes: Sequence[str]) -> list[Shard]:
    shards = [Shard.open(prefix) for prefix in prefixes]
    progress.count(len(shards))
    return shards


def _link_shards(dataset: MixtureDataset, folder: Path) -> None:
    real_path = RealPathCache()
    used = None if dataset.passes else dataset.taken + 1
    indices = [real_path(shard.prefix + ".idx") for shard in dataset.shards[:used]]
    for number, count in enumerate(dataset.counts):
        place = folder / pass_folder(number)
        place.mkdir()
        start = os.path.join(place, "")
        for shard, real, index, link in zip(
            dataset.shards[:count], dataset.bin_paths[:count], indices[:count], dataset.links[:count], strict=True
        ):
            os.symlink(real, start + link + ".bin")
            progress.count(1)
            if shard.cut:  # its .idx belongs to another mixture, which may be made anew
                write_atomic(start + link + ".idx", Path(index).read_bytes())
            else:
                os.symlink(index, start + link + ".idx")
        if dataset.cut is not None and number == dataset.passes:
            os.symlink(dataset.bin_paths[count], start + dataset.links[count] + ".bin")
            write_atomic(start + dataset.links[count] + ".idx", dataset.cut.index())
