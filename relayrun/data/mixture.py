"""A mixture: a folder of links to token shards, so chosen that each dataset has its weight in tokens.

The draw. Each dataset's shards are put into a seeded order. Again and again the dataset furthest
behind its weight (weight x total - own tokens is largest) takes its next shard, until one that should
take has none left. No shard is taken twice, and no shard is cut. The one exception to the rule: a
shard that would leave any dataset more than one shard (the largest chosen one) away from its weight
waits, and the next one in line takes. So the reached weights are always within one shard.

Links are absolute and lead to the real files: the mixture may be moved or copied anywhere on the same
machines, and stays what it is when a folder that was reached through a link (another mixture, say) is
rebuilt. Relative links would survive only if mixture and datasets moved together.

Cost: every header is read once, in a few threads for file systems with slow metadata; the draw takes
O(shards x datasets); two links are made a shard, one after another (threads only wait for the folder's lock).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from relayrun.data.folders import replaced_folder
from relayrun.data.prefixes import SUFFIXES, find_prefixes
from relayrun.errors import ConfigError, InputError
from relayrun.files import fsync_directory, read_json, write_atomic
from relayrun.indexed import Shard

FORMAT = "relayrun dataset mixture, version 1"
SUMMARY_TEXT = "dataset_mixture_summary.txt"
SUMMARY_JSON = "dataset_mixture_summary.json"
THREADS = 4  # more are slower on a local disk, where reading a header takes no longer than starting to


@dataclass(frozen=True, kw_only=True)
class Dataset:
    """One dataset of a mixture. `shards` and `links` stand in the order of the draw."""

    name: str
    """Sub-folder of the mixture that holds its links."""
    folder: str
    """Absolute path as given."""
    weight: float
    """Wanted share of the tokens; the weights of a mixture sum to 1."""
    shards: list[Shard]
    """All that were found."""
    links: list[str]
    """Link names without suffix, one a shard."""
    taken: int
    """How many shards the mixture takes, from the front."""

    @property
    def tokens(self) -> int:
        """Tokens that the mixture takes."""
        return sum(shard.tokens for shard in self.shards[: self.taken])

    @property
    def available(self) -> int:
        """Tokens that the dataset has."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def size(self) -> int:
        """Bytes of the .bin files that the mixture takes."""
        return sum(shard.bin_bytes for shard in self.shards[: self.taken])


def create_mixture(folders: Sequence[Path], weights: Sequence[float], output: Path, *, seed: int = 0,
                   report: Callable[[str], None] = lambda line: None) -> str:  # fmt: skip
    """Write the mixture of `folders` into the folder `output` and return its summary, a table.

    The folder appears at once and replaces a former mixture; anything else that stands there is
    refused. `report` gets a line of progress now and then.
    Raises ConfigError for wrong weights, InputError for wrong folders or torn shards.
    """
    if len(folders) != len(weights):
        raise ConfigError(f"{len(folders)} folders but {len(weights)} weights", where="--weights",
                          hint="give one weight a folder, in the same order")  # fmt: skip
    shares = normalised(weights)
    check_output(output, folders)
    datasets = _read_datasets(folders, shares, seed, report)
    taken = choose([[shard.tokens for shard in dataset.shards] for dataset in datasets], shares)
    datasets = [
        Dataset(name=d.name, folder=d.folder, weight=d.weight, shards=d.shards, links=d.links, taken=count)
        for d, count in zip(datasets, taken, strict=True)
    ]
    summary = summarise(datasets, seed)
    report(f"linking {sum(taken):,} shards into {output}")
    with replaced_folder(output) as building:
        for dataset in datasets:
            _link(dataset, building / dataset.name)
        write_atomic(building / SUMMARY_TEXT, summary.encode("utf-8", "backslashreplace"))
        write_atomic(building / SUMMARY_JSON, _as_json(datasets, seed))
        check_output(output, folders)  # again: the links may have taken minutes
    return summary


def normalised(weights: Sequence[float]) -> list[float]:
    """The weights divided by their sum. Raises ConfigError unless all are positive and finite."""
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise ConfigError(f"a weight must be a positive number, not {weight:g}", where="--weights",
                              hint="leave a dataset out to give it no weight")  # fmt: skip
    largest = max(weights, default=1.0)  # first, lest the sum of huge weights be infinite
    total = math.fsum(weight / largest for weight in weights)
    shares = [weight / largest / total for weight in weights]
    if not all(shares):
        raise ConfigError("a weight is too small beside the others", where="--weights")
    return shares


def drawing_order(names: Sequence[str], *, seed: int, dataset: int) -> list[int]:
    """A shuffle of the shards called `names`: indices sorted by a keyed hash of the name.

    It depends on nothing but seed, number of the dataset and names: not on the place of the folder,
    and a shard that is added leaves the others in their order.
    """
    key = hashlib.sha256(f"{seed}/{dataset}".encode()).digest()
    digests = [hashlib.blake2b(os.fsencode(name), key=key, digest_size=16).digest() for name in names]
    return sorted(range(len(names)), key=lambda i: (digests[i], names[i]))


def choose(sizes: Sequence[Sequence[int]], weights: Sequence[float]) -> list[int]:
    """How many shards each dataset gives, from the front of its list. Pure; the rule is above.

    `sizes[d]` are the tokens of dataset d's shards in the order of the draw, `weights` sum to 1.
    For the counts returned, |tokens of d - weights[d] x total| is at most the largest shard chosen,
    for every d. With two or three datasets one is always used up; with four or more the draw can
    (rarely) run into states where every step breaks the bound: it then goes on by the plain rule, and
    the last state within the bound counts.
    """
    share = np.asarray(weights, dtype=np.float64)
    tokens = np.zeros(len(sizes), dtype=np.int64)
    taken = [0] * len(sizes)
    within = list(taken)
    largest = 0
    while True:
        behind = share * int(tokens.sum()) - tokens
        line = np.argsort(-behind, kind="stable").tolist()
        pick = line[0]
        bounded = False
        for d in line:
            if behind[d] < 0 and d != line[0]:  # the rest are ahead
                break
            if taken[d] == len(sizes[d]):
                return within
            size = sizes[d][taken[d]]
            after = behind + share * size
            after[d] -= size
            if float(np.abs(after).max()) <= max(largest, size):
                pick, bounded = d, True
                break
        size = sizes[pick][taken[pick]]
        largest = max(largest, size)
        tokens[pick] += size
        taken[pick] += 1
        if bounded:
            within = list(taken)


def distinct(names: Sequence[str], fallbacks: Sequence[str], *, reserved: Sequence[str] = ()) -> list[str]:
    """File names, all different: a name that stands once is kept, the others get their fallback or a number."""
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


def check_output(output: Path, folders: Sequence[Path]) -> None:
    """Refuse an output that holds anything but a former mixture, or lies in an input, or holds one.

    Raises InputError.
    """
    final = Path(os.path.realpath(output))
    for folder in folders:
        real = Path(os.path.realpath(folder))
        if final == real or real in final.parents or final in real.parents:
            raise InputError("output and input lie inside each other", where=f"{output} and {folder}",
                             hint="give an output folder of its own")  # fmt: skip
    if not final.exists():
        return
    if not final.is_dir():
        raise InputError("the output exists and is not a folder", where=output)
    hint = "move it away, or choose another output"
    try:
        former = read_json(final / SUMMARY_JSON)
        expected = {SUMMARY_TEXT, SUMMARY_JSON}
        if former["format"] != FORMAT:
            raise ValueError(former["format"])
        expected |= {dataset["name"] for dataset in former["datasets"]}
        expected |= {f"{shard['link']}{suffix}" for shard in former["shards"] for suffix in SUFFIXES}
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # ValueError: also no JSON, no UTF-8
        expected = set()
    start = len(os.path.join(final, ""))
    for root, names, files in os.walk(final):
        for name in (*names, *files):
            path = os.path.join(root, name)
            relative = path[start:]
            if relative not in expected or (relative.endswith(SUFFIXES) and not os.path.islink(path)):
                raise InputError(f"the output holds something that no former mixture left there: {name}",
                                 where=output, hint=hint)  # fmt: skip


def summarise(datasets: Sequence[Dataset], seed: int) -> str:
    """The table that is printed and written beside the links: one line a dataset, and the total."""
    total = sum(dataset.tokens for dataset in datasets)
    rows = [("dataset", "tokens", "of", "prefixes", "of", "GB", "wanted", "reached", "folder")]
    rows += [
        (d.name, f"{d.tokens:,}", f"{d.available:,}", f"{d.taken:,}", f"{len(d.shards):,}",
         f"{d.size / 1e9:.3f}", f"{d.weight:.4f}", f"{d.tokens / total:.4f}", d.folder)
        for d in datasets
    ]  # fmt: skip
    rows.append(("total", f"{total:,}", f"{sum(d.available for d in datasets):,}",
                 f"{sum(d.taken for d in datasets):,}", f"{sum(len(d.shards) for d in datasets):,}",
                 f"{sum(d.size for d in datasets) / 1e9:.3f}", "1.0000", "1.0000", ""))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, 8)), row[8]]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(map(len, lines)))
    lines.insert(-1, lines[1])
    for d in datasets:
        if d.taken == len(d.shards):
            lines.append(f"{d.name} is used up: all its shards are taken")
        off = 100 * (d.tokens / total - d.weight)
        if abs(off) > 1:
            lines.append(f"{d.name} is {off:+.1f} points off its weight: write smaller shards to come closer")
    lines.append(f"seed {seed}")
    return "\n".join(lines) + "\n"


def _read_datasets(folders: Sequence[Path], shares: Sequence[float], seed: int,
                   report: Callable[[str], None]) -> list[Dataset]:  # fmt: skip
    """Open every shard, put each dataset's shards into the order of the draw, name the links."""
    roots = [folder.absolute() for folder in folders]
    bases = [os.path.basename(os.path.normpath(root)) or "dataset" for root in roots]
    names = distinct(bases, [f"{base}-{i + 1}" for i, base in enumerate(bases)], reserved=(SUMMARY_TEXT, SUMMARY_JSON))
    owners: dict[str, str] = {}
    real_path = _RealPath()
    datasets = []
    for i, (root, name) in enumerate(zip(roots, names, strict=True)):
        prefixes = find_prefixes([root])
        report(f"reading the sizes of {len(prefixes):,} shards below {root}")
        start = len(os.path.join(root, ""))
        relative = [prefix[start:] for prefix in prefixes]
        parts = [prefixes[k : k + 64] for k in range(0, len(prefixes), 64)]
        with ThreadPoolExecutor(THREADS) as pool:
            shards = [shard for part in pool.map(lambda part: [Shard.open(p) for p in part], parts) for shard in part]
        for shard in shards:
            real = real_path(shard.prefix + ".bin")
            if real in owners:
                raise InputError("this shard stands in the mixture twice", where=f"{shard.prefix} and {owners[real]}",
                                 hint="remove one of the links, or give folders that do not overlap")  # fmt: skip
            owners[real] = shard.prefix
        if not any(shard.tokens for shard in shards):
            raise InputError("the shards of this folder hold no tokens", where=root, hint="leave it out")
        links = distinct([os.path.basename(path) for path in relative], [path.replace("/", "-") for path in relative])
        order = drawing_order(relative, seed=seed, dataset=i)
        datasets.append(Dataset(name=name, folder=str(root), weight=shares[i], taken=0,
                                shards=[shards[k] for k in order], links=[links[k] for k in order]))  # fmt: skip
    return datasets


def _link(dataset: Dataset, folder: Path) -> None:
    """Make the folder of one dataset's links."""
    folder.mkdir()
    place = os.path.join(folder, "")
    real_path = _RealPath()
    for shard, link in islice(zip(dataset.shards, dataset.links, strict=True), dataset.taken):
        for suffix in SUFFIXES:
            os.symlink(real_path(shard.prefix + suffix), place + link + suffix)
    fsync_directory(folder)


class _RealPath:
    """`os.path.realpath` that resolves each folder once: shards stand in few folders."""

    def __init__(self) -> None:
        self._folders: dict[str, str] = {}

    def __call__(self, path: str) -> str:
        folder, name = os.path.split(path)
        if os.path.islink(path):
            return os.path.realpath(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        return os.path.join(self._folders[folder], name)


def _as_json(datasets: Sequence[Dataset], seed: int) -> str:
    """The summary for programs; one line a shard. ASCII, because a file name need not be UTF-8."""
    total = sum(dataset.tokens for dataset in datasets)
    head = {
        "format": FORMAT,
        "seed": seed,
        "tokens": total,
        "datasets": [
            {"name": d.name, "folder": d.folder, "weight": d.weight, "reached": d.tokens / total, "tokens": d.tokens,
             "bytes": d.size, "prefixes": d.taken, "available_tokens": d.available,
             "available_prefixes": len(d.shards)}
            for d in datasets
        ],
    }  # fmt: skip
    shards = ",\n    ".join(
        json.dumps({"dataset": d.name, "link": f"{d.name}/{link}", "prefix": shard.prefix, "tokens": shard.tokens})
        for d in datasets
        for shard, link in islice(zip(d.shards, d.links, strict=True), d.taken)
    )
    return json.dumps(head, indent=2)[:-2] + f',\n  "shards": [\n    {shards}\n  ]\n}}\n'
