"""Which files belong together: splits, sets of `-of-N` files, files of the same content; and the inventory as a file.

`inputs.take_inventory` looks at each file alone; `check_sets` looks at all of them. It refuses what would put held-out
or stale text into training, and names what may stand there twice.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import tarfile
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any

from relayrun.errors import InputError, RelayrunError, combined_error
from relayrun.files import write_atomic
from relayrun.tokens.readers import published
from relayrun.tokens.readers.contents import file_compression, is_torn, text_bytes, uncompressed_name
from relayrun.tokens.readers.file_ranges import decompress, file_of_range
from relayrun.tokens.readers.inputs import TAR, TEXT, DataFile, Inventory, data_suffixes, file_format, take_inventory
from relayrun.tokens.readers.published import FILTERED_OUT, STATE_FILE, split_of, split_words
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.direct_io import open_file_checksum
from relayrun.tokens.stores.urls import printable

log = logging.getLogger(__name__)

_UNFINISHED = (".aria2", ".part", ".partial", ".crdownload", ".incomplete", ".filepart", ".st")
"""Endings of the note beside a file that its download has not ended."""

_NUMBERED = re.compile(
    r"(?P<front>.*?)(?P<number>\d+)-of-(?P<count>\d+)(?:-[0-9a-f]{8,})?(?P<end>\D[^/]*)", re.IGNORECASE
)
_BELOW_HIDDEN = re.compile(r"(?s)((?:^|.*?/)\.[^/]+/).*")
_COPY = re.compile(
    r"(?i)^copy of | \(.*conflicted copy.*|\.sync-conflict-.*"
    r"|([-._ ](old|bak|backup|orig)|( -)? copy( \d+)?| ?\(\d+\))+$"
)
"""Words in the name of a file or folder that say it is a copy of another: `data_old`, `a (1)`, `Copy of a`."""
_SPARK_PART = re.compile(r"part-\d{5}-[0-9a-f]{8}-[0-9a-f]{4}-.*")
_NO_DATA = ("metadata", "empty", "hidden or temporary")
_MOST_NAMES, _READ_AT_A_TIME, _LOOKED_MEMBERS = 3, 8, 1000


def held_out_split(path: str, *, title: bool = False) -> str | None:
    """Return the split kept from training that a word of a folder or of the name says; else None. `title`: the name is
    the one of a document, whose first or last word says it."""
    folder, name = os.path.split(os.path.splitext(uncompressed_name(path))[0])
    words = split_words(name)
    if title or file_format(path) is TEXT:
        words = [*words[:1], *words[-1:]]
    return split_of([*split_words(folder), *words])


def find_data_files(
    folder: str, *, names: Sequence[str] = (), of: str = "", dead_links_only: bool = False, strict: bool = False
) -> list[tuple[str, int]]:
    """Return path and bytes of the data files below `folder` (see `take_inventory`), without copies; log what is left
    out, and what `set_faults` names. `of`: the beginning of each line. Raises InputError as `Inventory.refuse`, and if
    `strict` for what `set_faults` names first."""
    there, twins = leave_out_twins(folder, take_inventory(folder, names=names or None))
    log_inventory(there, twins, of=of)
    there.refuse(dead_links_only=dead_links_only)
    for fault, _, _ in set_faults(folder, there):
        if strict:
            hint = "give a pattern of the files that are meant, as FOLDER/**/train*, or stream.partition_filters"
            raise InputError(fault.message, where=fault.where, hint=hint)
        log.warning("%s%s", of, fault.message)
    return [(urls.join_path(folder, file.path), file.size) for file in there.taken]


def check_sets(
    folder: str, inventory: Inventory, *, filter_in: Sequence[str] = (), all_splits: bool = False
) -> Inventory:
    """Return the inventory with the files refused that `set_faults` names, and those that are not whole.
    `all_splits`: held-out splits are taken."""
    faults = set_faults(folder, inventory, filter_in, all_splits=all_splits)
    return inventory.leave_out(
        replace(file, why=why, fault=None if number else fault)  # the first one has the fault of all
        for fault, why, files in itertools.chain(faults, _unfinished(folder, inventory))
        for number, file in enumerate(files)
    )


_SetFaults = Iterator[tuple[InputError, str, Sequence[DataFile]]]


def set_faults(
    folder: str, inventory: Inventory, filter_in: Sequence[str] = (), *, all_splits: bool = False
) -> _SetFaults:
    """Yield faults, each with its reason and files: held-out splits beside other text that no text of `filter_in`
    names, and mixed `-of-N` sets. Warns of missing numbers, and of parts of Spark without `_SUCCESS`."""
    held_out = () if all_splits else _held_out_sets(folder, inventory, filter_in)
    texts = [file.path for file in inventory.taken if file_format(file.path) is TEXT]
    if 0 < len(texts) < len(inventory.taken):
        words = "%s: of %s files, %s are texts, each read as one document; if they are notes: --filter-out"
        log.warning(words, first_names(texts), f"{len(inventory.taken):,}", f"{len(texts):,}")
    if begun := published.unfinished_downloads(inventory.notes):
        log.warning("%s: a download has not ended: %s; run `hf download` again", printable(folder), first_names(begun))
    done = {PurePath(path).parent for path in inventory.notes if re.search(r"(^|/)_(SUCCESS|committed_)", path)}
    parts = [PurePath(file.path) for file in inventory.taken if _SPARK_PART.match(os.path.basename(file.path))]
    if open_folders := sorted({str(part.parent / "part-*") for part in parts if done.isdisjoint(part.parents)}):
        log.warning("%s: Spark's job may not have ended, as no _SUCCESS is there", first_names(open_folders))
    return itertools.chain(held_out, _mixed_sets(folder, inventory.taken))


def _held_out_sets(folder: str, inventory: Inventory, filter_in: Sequence[str]) -> _SetFaults:
    listed = published.listed_splits(folder, {file.path for file in inventory.taken}, inventory.notes)
    splits: dict[tuple[str | None, str], list[DataFile]] = defaultdict(list)
    for file in inventory.taken:
        split = held_out_split(file.path)
        told = (split, "") if split else listed.get(file.path) or _split_of_members(urls.join_path(folder, file.path))
        splits[told].append(file)
    chosen = {split_of([word]) for text in filter_in for word in split_words(text)}
    for (split, by), found in splits.items():
        if split is None or split in chosen or len({each for each, _ in splits}) == 1:
            continue
        words = f"{_count(found)} of a {split} set beside other text: {first_names([file.path for file in found])}"
        words += f"; {by} says so" if by else ""
        hint = "leave them out with --filter-out, choose them with --filter-in, or take all with --all-splits"
        yield InputError(words, where=folder, hint=hint), "another split", found


def _split_of_members(path: str) -> tuple[str | None, str]:
    """Return the held-out split that the name of a member of a local archive says, and that name; else None. The
    beginning of the archive is looked at."""
    if file_format(path) is TAR and not urls.is_url(path):
        from relayrun.tokens.readers.text_files import open_members  # on demand: Arrow

        with contextlib.suppress(OSError, ValueError, tarfile.TarError, RelayrunError), open(path, "rb") as raw:
            for name, _ in itertools.islice(open_members(raw, path), _LOOKED_MEMBERS):
                if split := held_out_split(name, title=True):
                    return split, f"its member {name}"
    return None, ""


def _unfinished(folder: str, inventory: Inventory) -> _SetFaults:
    """Yield files whose download or rank has not ended, as notes beside them say, or whose end is missing."""
    notes, hint = inventory.notes, "fetch or write it again, or leave it out with --filter-out, or the note"
    ranks = [*published.open_ranks(folder, notes)]
    for logs, begun, _ in ranks:
        log.warning("%s: %d ranks of datatrove have not ended: %s", logs, len(begun), first_names(begun))
    with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
        torn = pool.map(lambda file: is_torn(urls.join_path(folder, file.path)), inventory.taken)
    for file, has_no_end in zip(inventory.taken, torn, strict=True):
        found = [file.path + ending for ending in _UNFINISHED if file.path + ending in notes]
        faults = [f"{note} says that this download has not ended" for note in found]
        faults += [f"{logs}/completions lacks this rank of datatrove" for logs, _, of in ranks if of.match(file.path)]
        faults += ["it may be torn: its end is missing"] * has_no_end
        if faults:
            where = printable(urls.join_path(folder, file.path))
            yield InputError(faults[0], where=where, hint=hint), "not whole", [file]


def _mixed_sets(folder: str, files: Sequence[DataFile]) -> _SetFaults:
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
            where = urls.join_path(folder, names)
            yield InputError(words, where=where, hint=hint), "another -of-N set", [file for _, file in found]
        elif len(found) < (of := min(sets)):
            log.warning("%s: %d of the %d files of this set are missing", names, of - len(found), of)


def leave_out_twins(folder: str, inventory: Inventory, known: Collection[str] = ()) -> tuple[Inventory, dict[str, str]]:
    """Leave out each file that holds the text of another one: the same bytes, or the same after decompression. Returns
    also the suspects, by path of the other file: below a URL, which is not read, and files that cannot be read, they
    are taken. Of the same files one of `known` stays, or the shortest name."""
    files = sorted(inventory.taken, key=lambda file: (file.path not in known, len(file.path)))
    twins, sums = find_twins(folder, files)
    if urls.is_url(folder):
        return inventory, twins
    sums |= _text_checksums(folder, sorted({path for pair in twins.items() for path in pair} - sums.keys()))
    for path, first in [*twins.items()]:
        of_one_name = uncompressed_name(path) == uncompressed_name(first)  # the older may be a leftover
        if not of_one_name and None not in (sums[path], sums[first]) and sums[path] != sums[first]:
            del twins[path]
    why = "same content as another file"
    same = {path for path, first in twins.items() if path not in known and sums[path] == sums[first] is not None}
    there = inventory.leave_out(replace(file, why=why) for file in inventory.taken if file.path in same)
    return there, _named_copies(there.taken) | twins


def _text_checksums(folder: str, names: Sequence[str]) -> dict[str, str | None]:
    """Return a checksum of the bytes of each file, decompressed; None if it cannot be read."""

    def checksum(name: str) -> str | None:
        try:
            with open(os.path.join(folder, name), "rb") as raw, decompress(raw, file_compression(name)) as text:
                return open_file_checksum(text)
        except (OSError, ValueError, ImportError):
            return None

    with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
        return dict(zip(names, pool.map(checksum, names), strict=True))


def find_twins(folder: str, files: Sequence[DataFile]) -> tuple[dict[str, str], dict[str, str | None]]:
    """Map each file that may hold an earlier one's text to that file: the same name but for a compression, the same
    size and the same bytes at both ends, as links to one file have, or the same text in another compression. Below a
    URL names are compared. Return also the checksums of texts that were taken for it."""
    twins: dict[str, str] = {}
    firsts: dict[str, str] = {}
    sizes, alike = Counter(file.size for file in files), defaultdict[int, list[str]](list)
    for file in files:
        with contextlib.suppress(Exception):  # the reader says why; below a URL, of compressed files
            alike[text_bytes(os.path.join(folder, file.path), file.size)].append(file.path)
    packed = (names for size, names in alike.items() if size and len(names) > 1 and any(map(file_compression, names)))
    sums = _text_checksums(folder, [*itertools.chain(*packed)])
    for file in files:
        keys = [sums.get(file.path) or file.path, uncompressed_name(file.path)]
        if sizes[file.size] > 1 and not urls.is_url(folder):
            with contextlib.suppress(OSError, RelayrunError):  # the reader says why
                keys.insert(0, f"{file.size} {urls.hash_file_ends(os.path.join(folder, file.path))}")
        for first in (firsts.setdefault(key, file.path) for key in keys):
            if first != file.path:
                twins.setdefault(file.path, first)
    return twins, sums


def _named_copies(files: Sequence[DataFile]) -> dict[str, str]:
    """Map each file whose path is that of another one but for its ending and the words of copies to that file."""
    parts = {file.path: os.path.splitext(uncompressed_name(file.path))[0].split("/") for file in files}
    names = {path: "/".join(_COPY.sub("", each) or each for each in split) for path, split in parts.items()}
    firsts = {names[path]: path for path in sorted(names, key=len, reverse=True)}
    return {path: firsts[name] for path, name in names.items() if firsts[name] != path}


def write_inventory(path: Path, folder: str, inventory: Inventory, twins: dict[str, str]) -> None:
    """Write a line of JSON for each file: `path`, `bytes`, `taken`; `why` of a file that is left out, and `refused`;
    `same_as` of a file that may hold the text of another one; `rows` that are known of a file of this size; `splits`
    that a note counts, with its `expected_rows` and the `rows` of their files, if all are tokenized."""
    before = _read_inventory(path)
    lines: dict[str, dict[str, Any]] = {}
    for file in (*inventory.taken, *inventory.left_out):
        line = lines[file.path] = {"path": file.path, "bytes": file.size, "taken": not file.why}
        if file.why:
            line |= {"why": file.why} | ({"refused": file.fault.message} if file.fault else {})
        if file.path in twins:
            line["same_as"] = twins[file.path]
        if (known := before.get(file.path, {})).get("bytes") == file.size:
            line |= {name: known[name] for name in ("rows", "rows_of_ranges") if name in known}
    _write_lines(path, folder, lines)


def _write_lines(path: Path, folder: str, lines: dict[str, dict[str, Any]]) -> None:
    rows = {name: line["rows"] for name, line in lines.items() if line["taken"] and "rows" in line}
    rows = {name: found for name, found in rows.items() if file_format(name) not in (TEXT, TAR)}  # lines count there
    data = {name for name, line in lines.items() if line.get("why") not in _NO_DATA and name.endswith(data_suffixes())}
    for name, line in lines.items():
        if line.get("why", FILTERED_OUT) != FILTERED_OUT and not urls.is_url(folder):
            for split, expected, files in published.listed_rows(folder, name, data):
                why = "not compared: no file of its name, or files that are left out or not yet tokenized"
                known = {"rows": sum(rows[file] for file in files)} if files and files <= rows.keys() else {"why": why}
                line.setdefault("splits", {})[split] = {"expected_rows": expected} | known
    write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines.values()).encode())


def _read_inventory(path: Path) -> dict[str, dict[str, Any]]:
    try:
        return {line["path"]: line for line in map(json.loads, path.read_bytes().splitlines())}
    except (FileNotFoundError, ValueError, KeyError, TypeError):  # of an earlier version, or damaged
        return {}


def add_rows(path: Path, folder: str, rows: Mapping[str, int]) -> None:
    """Add the tokenized `rows` of files to a written inventory. Warns of files without a row, and of a saved data set
    (`state.json`) whose files are all tokenized and have other rows than its publisher counted."""
    lines = _read_inventory(path)
    for name in rows:
        if (line := lines.get(file_of_range(name))) is not None:
            parts = {} if name == line["path"] else line.setdefault("rows_of_ranges", {})
            parts[name] = rows[name]
            line["rows"] = sum(parts.values())
    if empty := sorted(name for name, number in rows.items() if number == 0 and name in lines):
        log.warning("%s files gave no row: %s", f"{len(empty):,}", first_names(empty))
    _write_lines(path, folder, lines)
    for fault in other_rows(path, saved=True):
        log.warning("%s, perhaps from before a filter", fault)


def other_rows(path: Path, *, saved: bool = False) -> list[str]:
    """Name the splits of a written inventory that have other rows than their publisher counted. `saved`: those of
    data sets with `state.json`, where a filter leaves an old count; else the others."""
    lines = _read_inventory(path)
    return [
        f"{name}: {count['rows']:,} rows of {split} were tokenized, and {count['expected_rows']:,} are listed"
        for name, line in lines.items()
        if (os.path.join(os.path.dirname(name), STATE_FILE) in lines) == saved
        for split, count in line.get("splits", {}).items()
        if count.get("rows", count["expected_rows"]) != count["expected_rows"]
    ]


def refuse_wrong_checksums(path: Path, folder: str, names: Iterable[str]) -> None:
    """Raise InputError that names the files, of these files and ranges of a written inventory, that have other
    checksums than a list beside the data says."""
    lines = {} if urls.is_url(folder) else _read_inventory(path)
    notes = [name for name, line in lines.items() if line.get("why", FILTERED_OUT) != FILTERED_OUT]
    files = {file_of_range(name) for name in names}
    listed = list(published.listed_checksums(folder, notes, files))
    with ThreadPoolExecutor(_READ_AT_A_TIME) as pool:
        good = pool.map(lambda each: published.has_checksum(folder, *each), listed)
    faults, hint = [], "fetch it again, or leave out the file or the list with --filter-out"
    for (file, _, by), same in zip(listed, good, strict=True):
        if not same:
            words, where = f"its checksum is not the one that {printable(by)} lists", os.path.join(folder, file)
            faults.append(InputError(words, where=printable(where), hint=hint))
    if faults:
        raise combined_error(faults, "files have other checksums")


def log_inventory(inventory: Inventory, twins: dict[str, str], *, of: str = "") -> None:
    """Log a line for each reason with the files that are left out, and a warning of files that may be there twice.
    `of`: the beginning of each line."""
    pairs = {path: f"{path} = {first}" for path, first in twins.items()}
    for why in sorted({file.why for file in inventory.left_out}):
        files = [file for file in inventory.left_out if file.why == why]
        names = dict.fromkeys(pairs.pop(file.path, _BELOW_HIDDEN.sub(r"\1", file.path)) for file in files)
        log.info("%sleft out, %s: %s: %s", of, why, _count(files), first_names([*names]))
    if pairs:
        words = "%s%s files may hold the text of others (names or samples are alike): %s"
        log.warning(words, of, f"{len(pairs):,}", first_names([*pairs.values()]))


def _count(files: Sequence[DataFile]) -> str:
    return f"{len(files):,} file{'s' if len(files) != 1 else ''} ({sum(file.size for file in files):,} bytes)"


def first_names(names: Sequence[str]) -> str:
    """Return the first of these names for a message."""
    more = f" and {len(names) - _MOST_NAMES:,} more" if len(names) > _MOST_NAMES else ""
    return printable(", ".join(names[:_MOST_NAMES])) + more
