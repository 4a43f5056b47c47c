"""Which files belong together: splits, sets of `-of-N` files, files of the same content; and the inventory as a file.

`inputs.take_inventory` looks at each file alone; `check_sets` looks at all of them. It refuses what would put held-out
or stale text into training, and names what may stand there twice.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayrun.errors import InputError
from relayrun.files import write_atomic
from relayrun.tokens.readers.contents import file_compression
from relayrun.tokens.readers.inputs import DataFile, Inventory, LeftOutFile, data_suffixes
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import printable

log = logging.getLogger(__name__)

_HELD_OUT = {
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words for the splits that are kept from training."""

OTHER_SPLIT, MIXED_SETS = "another split", "another -of-N set"
_NUMBERED = re.compile(
    r"(?P<front>.*?)(?P<number>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]{8,})?(?P<end>\D[^/]*)", re.IGNORECASE
)
_SAMPLE_BYTES = 4096
_MOST_NAMES = 3
"""Files that a line names as examples."""


def held_out_split(path: str) -> str | None:
    """Return `validation` or `test` if a folder, or the first or last word of the name, says so; else None."""
    *folders, name = path.lower().split("/")
    for suffix in sorted(data_suffixes(), key=len, reverse=True):
        name = name.removesuffix(suffix)
    words = [
        word for word in re.split(r"[-._ ]+", name) if word != "of" and not re.fullmatch(r"[0-9a-f]*\d[0-9a-f]*", word)
    ]
    known = {*words[:1], *words[-1:], *(folder.removeprefix("split=") for folder in folders)}
    return next((split for split, names in _HELD_OUT.items() if known & {*names}), None)


def check_sets(
    folder: str, inventory: Inventory, *, filter_in: Sequence[str] = (), all_splits: bool = False
) -> Inventory:
    """Return the inventory with the files refused that are of a held-out split, unless `all_splits` or a text of
    `filter_in` names the split, and those of `-of-N` sets that are mixed."""
    faults = set_faults(folder, inventory.taken, filter_in=filter_in, all_splits=all_splits)
    refused: dict[str, LeftOutFile] = {}
    for fault, (why, files) in faults.items():
        for number, file in enumerate(files):  # the first one has the fault of all
            left = LeftOutFile(path=file.path, size=file.size, why=why, fault=None if number else fault)
            refused.setdefault(file.path, left)
    left_out = sorted((*inventory.left_out, *refused.values()), key=lambda file: os.fsencode(file.path))
    return Inventory(
        taken=tuple(file for file in inventory.taken if file.path not in refused), left_out=tuple(left_out)
    )


def set_faults(
    folder: str, files: Sequence[DataFile], *, filter_in: Sequence[str] = (), all_splits: bool = False
) -> dict[InputError, tuple[str, Sequence[DataFile]]]:
    """Return the faults of splits and of `-of-N` sets, each with its reason and its files. Warns of missing numbers."""
    faults = {} if all_splits else dict(_held_out_sets(folder, files, filter_in))
    return faults | dict(_mixed_sets(folder, files))


_Faults = Iterator[tuple[InputError, tuple[str, Sequence[DataFile]]]]


def _held_out_sets(folder: str, files: Sequence[DataFile], filter_in: Sequence[str]) -> _Faults:
    splits: dict[str | None, list[DataFile]] = defaultdict(list)
    for file in files:
        splits[held_out_split(file.path)].append(file)
    for split, found in splits.items():
        if split is None or len(splits) == 1 or any(name in text for name in _HELD_OUT[split] for text in filter_in):
            continue
        words = f"{_count(found)} of a {split} set beside other text: {_names(found)}"
        hint = "leave them out with --filter-out, choose them with --filter-in, or take all with --all-splits"
        yield InputError(words, where=folder, hint=hint), (OTHER_SPLIT, found)


def _mixed_sets(folder: str, files: Sequence[DataFile]) -> _Faults:
    groups: dict[tuple[str, str], dict[int, list[tuple[int, DataFile]]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        if match := _NUMBERED.fullmatch(file.path):
            sets = groups[match["front"], match["end"]]
            sets[int(match["count"])].append((int(match["number"]), file))
    for (front, end), sets in groups.items():
        names, found = f"{printable(front)}*{printable(end)}", [each for numbered in sets.values() for each in numbered]
        if len(sets) > 1 or len({number for number, _ in found}) < len(found):
            counts = ", ".join(f"{len(numbered):,} -of-{of}" for of, numbered in sorted(sets.items()))
            words, hint = f"files of several sets are mixed: {counts}", "remove the stale set, or --filter-out"
            fault = InputError(words, where=urls.join_path(folder, names), hint=hint)
            yield fault, (MIXED_SETS, [file for _, file in found])
        elif len(found) < (of := min(sets)):
            log.warning("%s: %d of the %d files of this set are missing", names, of - len(found), of)


def find_twins(folder: str, files: Sequence[DataFile]) -> dict[str, str]:
    """Map each file that may hold an earlier one's text to that file: the same name but for a compression, or the
    same size and the same bytes at three places. Links to one file are no twins. Below a URL names are compared."""
    twins: dict[str, str] = {}
    stems: dict[str, str] = {}
    sizes: dict[int, list[DataFile]] = defaultdict(list)
    for file in files:
        stem = file.path.rpartition(".")[0] if file_compression(file.path) else file.path
        if (first := stems.setdefault(stem, file.path)) != file.path:
            twins[file.path] = first
        sizes[file.size].append(file)
    for alike in sizes.values() if not urls.is_url(folder) else ():
        samples: dict[bytes, DataFile] = {}
        for file in alike if len(alike) > 1 else ():
            known = samples.setdefault(_sample(os.path.join(folder, file.path), file.size), file)
            if known.identity != file.identity:
                twins.setdefault(file.path, known.path)
    return twins


def _sample(path: str, size: int) -> bytes:
    """Return a hash of three blocks of a file; a random one if the file cannot be read."""
    digest = hashlib.sha256()
    try:
        with open(path, "rb", buffering=0) as raw:
            for place in sorted({0, size // 2, max(0, size - _SAMPLE_BYTES)}):
                digest.update(os.pread(raw.fileno(), _SAMPLE_BYTES, place))
    except OSError:  # the reader says why
        return os.urandom(32)
    return digest.digest()


def write_inventory(path: Path, inventory: Inventory, twins: dict[str, str]) -> None:
    """Write a line of JSON for each file: `path`, `bytes`, `taken`; `why` of a file that is left out, and `refused`;
    `same_as` of a file that may hold the text of another one."""
    lines = [
        {"path": file.path, "bytes": file.size, "taken": True}
        | ({"same_as": twins[file.path]} if file.path in twins else {})
        for file in inventory.taken
    ]
    lines += [
        {"path": file.path, "bytes": file.size, "taken": False, "why": file.why}
        | ({"refused": file.fault.message} if file.fault else {})
        for file in inventory.left_out
    ]
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines).encode())


def log_inventory(inventory: Inventory, twins: dict[str, str], *, of: str = "") -> None:
    """Log a line for each reason with the files that are left out, and a warning of files that may be there twice.
    `of`: the beginning of each line."""
    reasons: dict[str, list[LeftOutFile]] = defaultdict(list)
    for file in inventory.left_out:
        reasons[file.why].append(file)
    for why, files in sorted(reasons.items()):
        log.info("%sleft out, %s: %s: %s", of, why, _count(files), _names(files))
    if twins:
        pairs = "; ".join(f"{printable(one)} = {printable(first)}" for one, first in [*twins.items()][:_MOST_NAMES])
        more = f" and {len(twins) - _MOST_NAMES:,} more" if len(twins) > _MOST_NAMES else ""
        words = "%s%s files may hold the same text as others, by their names or samples of their bytes: %s%s"
        log.warning(words, of, f"{len(twins):,}", pairs, more)


def _count(files: Sequence[DataFile | LeftOutFile]) -> str:
    size = sum(file.size for file in files)
    return f"{len(files):,} file{'s' if len(files) != 1 else ''} ({size:,} bytes)"


def _names(files: Sequence[DataFile | LeftOutFile]) -> str:
    more = f" and {len(files) - _MOST_NAMES:,} more" if len(files) > _MOST_NAMES else ""
    return ", ".join(printable(file.path) for file in files[:_MOST_NAMES]) + more
