"""What publishers and programs write beside data: splits, checksums, and marks of what is not finished.

A dataset card and lists of files say which files are held out; SHA256SUMS, `.md5` files, Hadoop's `.crc` files and the
notes of a hub download say which bytes a file has; Spark, datatrove and programs that download say what is not whole.
A note that a filter leaves out (`--filter-out SHA256SUMS`) says nothing. Below a URL none of it is read.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import json
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from relayrun.errors import InputError
from relayrun.files import read_json
from relayrun.tokens.readers.contents import UNFINISHED
from relayrun.tokens.stores.urls import printable

_HELD_OUT = {
    "validation": {"validation", "valid", "val", "dev"},
    "test": {"test", "testing", "eval", "evaluation"},
    "held-out": {"heldout", "holdout"},
}
"""Words for the splits that are kept from training."""

_LIST_WORDS = {"split", "splits", "files", "filelist", "list", "manifest"}.union(*_HELD_OUT.values())
_LIST_ENDINGS = (".txt", ".json", ".lst", ".list")
_MOST_BYTES = 1 << 24
"""Larger files are no lists."""

_FILES_AT_A_TIME = 8


def split_words(text: str) -> list[str]:
    """Return the words of a path or a filter, without numbers and hashes; `held-out` is one word."""
    words = re.split(r"[-._/=\s]+", re.sub(r"(held|hold)[-_. ]out", r"\1out", text.lower()))
    return [word for word in words if not re.fullmatch(r"of|[0-9a-f]*\d[0-9a-f]*", word)]


def split_of(words: Iterable[str]) -> str | None:
    """Return the split that one of these words says, if it is kept from training."""
    known = set(words)
    return next((split for split, names in _HELD_OUT.items() if known & names), None)


class ListedSplit(NamedTuple):
    """The split of a file, as a list says."""

    split: str | None
    """None: a split that is trained on."""
    by: str
    """Path of the list."""


def listed_splits(folder: str, files: Collection[str], others: Iterable[tuple[str, int]]) -> dict[str, ListedSplit]:
    """Return the split of each of `files` that a list or a dataset card beside them names. `others`: the path and
    bytes of each file that may be one. A file that a list holds out and another one does not is held out."""
    found: dict[str, ListedSplit] = {}
    for path, size in others:
        place, name = os.path.split(path)
        is_card = name == "README.md"
        is_list = name.lower().endswith(_LIST_ENDINGS) and not _LIST_WORDS.isdisjoint(split_words(name))
        if not (is_card or is_list) or size > _MOST_BYTES:
            continue
        for words, entry in _card_entries(folder, path) if is_card else _list_entries(folder, path):
            split = split_of(split_words(words))
            for file in _matching(entry, place, files):
                if split is not None or file not in found:
                    found[file] = ListedSplit(split, path)
    return found


def _matching(entry: str, place: str, files: Collection[str]) -> Iterable[str]:
    """Return the files that an entry of a list in the folder `place` names, by their path from there or from the top;
    as a pattern only if none has that name."""
    names = [os.path.normpath(os.path.join(base, entry)) for base in dict.fromkeys((place, ""))]
    if literal := [name for name in names if name in files]:
        return literal
    return fnmatch.filter(files, names[0]) if re.search(r"[*?[]", entry) else ()


def _card_entries(folder: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield split and path of the `data_files` in the front matter of a dataset card."""
    import yaml

    try:
        _, front, _ = re.split(r"^---\s*$", Path(folder, path).read_text("utf-8"), maxsplit=2, flags=re.MULTILINE)
        for config in yaml.safe_load(front)["configs"]:
            for each in config["data_files"]:
                entries = each["path"]
                yield from ((each["split"], entry) for entry in ([entries] if isinstance(entries, str) else entries))
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return


def _list_entries(folder: str, path: str) -> Iterator[tuple[str, str]]:
    """Yield words that say a split, and the entry that they belong to: a line of text with the name of the list; a
    string of JSON with its keys, and a key with its string."""
    name = os.path.basename(path)
    try:
        text = Path(folder, path).read_text("utf-8")
        if not name.lower().endswith(".json"):
            yield from ((name, line.strip()) for line in text.splitlines() if line.strip())
            return
        todo: list[tuple[str, Any]] = [(name.removesuffix(".json"), json.loads(text))]
    except (OSError, ValueError, RecursionError):
        return
    while todo:
        words, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{words} {key}", each) for key, each in value.items()]
            yield from ((each, key) for key, each in value.items() if isinstance(each, str))
        elif isinstance(value, list):
            todo += [(words, each) for each in value]
        elif isinstance(value, str):
            yield words, value


Faults = Iterator[tuple[InputError, list[str]]]


def unfinished(folder: str, files: Sequence[str], others: Sequence[str]) -> Faults:
    """Yield faults, each with those of `files` that it is about: of a download, or of a job of Spark or datatrove, that
    has not ended. `others`: the paths of all other files."""
    notes = set(others)
    for file in files:
        if note := next((file + ending for ending in UNFINISHED if file + ending in notes), None):
            yield _fault(folder, file, f"{os.path.basename(note)} says that this download has not ended"), [file]
    yield from _spark_jobs(folder, files, others)
    for path in others:
        if os.path.basename(path) == "executor.json":
            yield from _datatrove_ranks(folder, path, files, others)


def _fault(folder: str, path: str, words: str) -> InputError:
    hint = "fetch or write it again, or leave it out with --filter-out, or what says so if that is wrong"
    return InputError(words, where=printable(os.path.join(folder, path)), hint=hint)


def _spark_jobs(folder: str, files: Sequence[str], others: Sequence[str]) -> Faults:
    parts: dict[str, list[str]] = defaultdict(list)
    for file in files:
        if os.path.basename(file).startswith("part-"):
            parts[os.path.dirname(file)].append(file)
    ended = {os.path.dirname(path) for path in others if os.path.basename(path) == "_SUCCESS"}
    begun = {path.split("_temporary/")[0].rstrip("/") for path in others if "_temporary/" in path}
    for place, found in parts.items():
        has_ended = any(place == each or place.startswith(f"{each}/" if each else "") for each in ended)
        if place in begun or (ended and not has_ended):
            yield _fault(folder, place, "the job of Spark that wrote these parts has not ended: no _SUCCESS"), found
        lists = [path for path in others if path.startswith(os.path.join(place, "_committed_"))]
        committed = _committed_parts(folder, place, lists)
        if loose := [each for each in found if "-tid-" in each and each not in committed] if committed else []:
            yield _fault(folder, place, "no list of committed parts (_committed_*) holds these parts"), loose
        if gone := sorted(path for path in committed if not os.path.lexists(os.path.join(folder, path))):
            yield _fault(folder, gone[0], f"{len(gone):,} committed parts of this folder are missing"), found


def _committed_parts(folder: str, place: str, lists: Iterable[str]) -> set[str]:
    added: set[str] = set()
    removed: set[str] = set()
    for path in lists:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            parts = read_json(os.path.join(folder, path))
            added.update(os.path.join(place, name) for name in parts["added"])
            removed.update(os.path.join(place, name) for name in parts["removed"])
    return added - removed


def _datatrove_ranks(folder: str, path: str, files: Sequence[str], others: Sequence[str]) -> Faults:
    logs = os.path.dirname(path)
    done = {int(name) for each in others if (name := each.removeprefix(f"{logs}/completions/")).isdecimal()}
    try:
        ranks = set(range(read_json(os.path.join(folder, path))["world_size"])) - done if done else set()
    except (OSError, ValueError, KeyError, TypeError):
        return
    above = os.path.join(os.path.dirname(logs), "")
    output = re.compile(re.escape(above) + r"(?:.*/)?(\d{5})\.[^/]*")
    if found := [file for file in files if (match := output.fullmatch(file)) and int(match[1]) in ranks]:
        words = f"{len(ranks):,} ranks of this run of datatrove have not ended ({logs}/completions)"
        yield _fault(folder, os.path.dirname(found[0]), words), found


class ListedChecksum(NamedTuple):
    """The checksum of a file, as a list says."""

    kind: str
    """A name that hashlib knows, or `crc`: then `digest` is empty, and the list has a CRC-32 of each block."""
    digest: str
    by: str
    """Path of the list."""


_KINDS = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}
"""By the hexadecimal digits."""

_SUMS = re.compile(r"(?:sha\d+|md5)-?sums?(?:\.txt)?|checksums?(?:\.txt)?|manifest-(?:sha\d+|md5)\.txt", re.IGNORECASE)
_SIDECAR = re.compile(r"(.+)\.(?:md5|sha1|sha256|sha512)(?:sum)?", re.IGNORECASE | re.DOTALL)
_SUM_LINE = re.compile(r"\\?([0-9a-f]{32,128})(?:\s+\*?(.+))?|\w+ \((.+)\) = ([0-9a-f]{32,128})", re.IGNORECASE)
_HUB_NOTE = re.compile(r"(.*?)\.cache/huggingface/download/(.+)\.metadata", re.DOTALL)


def listed_checksums(folder: str, others: Iterable[str]) -> dict[str, ListedChecksum]:
    """Return the checksums that the lists among the paths `others` have, by path of the file."""
    found: dict[str, ListedChecksum] = {}
    for path in others:
        place, name = os.path.split(path)
        if name.startswith(".") and name.endswith(".crc"):
            found[os.path.join(place, name[1:-4])] = ListedChecksum("crc", "", path)
            continue
        sidecar, note = _SIDECAR.fullmatch(name), _HUB_NOTE.fullmatch(path)
        if not (sidecar or note or _SUMS.fullmatch(name)):
            continue
        try:
            lines = Path(folder, path).read_bytes()[:_MOST_BYTES].decode("utf-8", "surrogateescape").splitlines()
        except OSError:
            continue
        if note:
            lines, place = [f"{line}  {note[2]}" for line in lines[1:2]], note[1]
        for line in lines:
            if match := _SUM_LINE.fullmatch(line.strip()):
                digest, file = match[1] or match[4], match[2] or match[3] or (sidecar and sidecar[1])
                if file and (kind := _KINDS.get(len(digest))):
                    file = os.path.normpath(os.path.join(place, file))
                    found[file] = ListedChecksum(kind, digest.lower(), path)
    return found


def checksum_faults(folder: str, listed: dict[str, ListedChecksum]) -> dict[str, InputError]:
    """Return the faults of the files that have other checksums than their lists say; each is read whole."""

    def fault(path: str) -> InputError | None:
        if _has_checksum(folder, path, listed[path]):
            return None
        return _fault(folder, path, f"its {listed[path].kind} is not the one that {printable(listed[path].by)} lists")

    with ThreadPoolExecutor(_FILES_AT_A_TIME) as pool:
        return {path: bad for path, bad in zip(listed, pool.map(fault, listed), strict=True) if bad is not None}


def _has_checksum(folder: str, path: str, wanted: ListedChecksum) -> bool:
    try:
        with open(os.path.join(folder, path), "rb") as file:
            if wanted.kind != "crc":
                return hashlib.file_digest(file, wanted.kind).hexdigest() == wanted.digest
            sums = Path(folder, wanted.by).read_bytes()
            block = int.from_bytes(sums[4:8], "big")
            if sums[:4] != b"crc\0" or not block:  # of another kind: CRC-32C, or another program
                return True
            pieces = iter(lambda: file.read(block), b"")
            return all(
                zlib.crc32(piece) == int.from_bytes(sums[at : at + 4], "big")
                for at, piece in zip(range(8, len(sums), 4), pieces, strict=True)
            )
    except ValueError:  # other lengths
        return False
    except OSError:  # the reader says why
        return True
