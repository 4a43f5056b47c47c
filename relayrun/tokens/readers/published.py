"""Reads what publishers and programs write beside data: lists and cards of held-out files, of live ones, checksums.

A note that a filter leaves out (`--filter-out SHA256SUMS`) says nothing. Below a URL none of it is read.
"""

from __future__ import annotations

import base64
import contextlib
import fnmatch
import hashlib
import json
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence, Set
from pathlib import Path
from typing import Any

import yaml

JSON_ENDINGS = (".jsonl", ".json", ".ndjson", ".jsonlines")
STATE_FILE = "state.json"
"""Lists the files of a data set that Hugging Face's datasets saved."""

METADATA_FILE_NAMES = (
    *("dataset_info.json", "dataset_infos.json", "dataset_dict.json", STATE_FILE),
    *("inventory.jsonl", "dump-sizes.json", "executor.json"),
)
"""Files that Hugging Face's datasets writes beside its data, datatrove, and `prepare_dumps`; they hold no documents."""

_METADATA_TEXT = re.compile(
    r"(licen[cs]es?|copying|notice|readme|change(log|s)|requirements|version|vocab|merges|urls|robots|paths_file_\d+)\.txt"
)
_TEMPORARY = re.compile(r"\.|_(?![^/]*=)|\$recycle\.bin$|cache-[0-9a-f]{16,}.*\.arrow$")
"""Beginnings of names: of hidden files, caches of Hugging Face's datasets, and deleted files."""

_HELD_OUT = {
    "validation": "validation|valid|val|dev",
    "test": "test|testing|eval|evaluation",
    "held-out": "heldout|holdout",
}
"""Words for the splits that are kept from training; `testset` and `devtest` are such words, too."""

_LIST_WORDS = {"split", "splits", "files", "filelist", "list", "manifest"}


def split_words(text: str) -> list[str]:
    """Return the words of a path or a filter, without numbers and hashes; `held-out` is one word, `testSet1` two."""
    text = re.sub(r"(?<=[a-z])(?=[A-Z])", "-", text).lower()
    words = re.split(r"[\W_]+", re.sub(r"(held|hold)[-_. ]out", r"\1out", text))
    return [word.strip("0123456789") for word in words if not re.fullmatch(r"of|[0-9a-f]*\d[0-9a-f]*|", word)]


def split_of(words: Sequence[str]) -> str | None:
    """Return the split that one of these words says, if it is kept from training."""
    text, more = " ".join(words), "(set|split|data|dev|test)?"
    return next((split for split, names in _HELD_OUT.items() if re.search(rf"\b({names}){more}\b", text)), None)


def listed_splits(folder: str, files: Set[str], others: Iterable[str]) -> dict[str, tuple[str | None, str]]:
    """Return the split of each of `files` that a list or a dataset card names, None if it is trained on, and the path
    of the list. `others`: paths that may be lists. An entry is a path from the list's folder or from the top, or a
    pattern. What one list holds out is held out."""
    found: dict[str, tuple[str | None, str]] = {}
    for path in others:
        place, name = os.path.split(path)
        is_list = name.lower().endswith((".txt", ".json", ".lst", ".list"))
        said = split_words(name)
        if name != "README.md" and not (is_list and (split_of(said) or _LIST_WORDS.intersection(said))):
            continue
        for words, entry in _entries(os.path.join(folder, path)):
            split = split_of(split_words(words))
            names = [os.path.normpath(os.path.join(base, entry)) for base in (place, "")]
            is_pattern = files.isdisjoint(names) and re.search(r"[*?[]", entry)
            for file in fnmatch.filter(files, names[0]) if is_pattern else files & set(names):
                if split is not None or file not in found:
                    found[file] = split, path
    return found


def listed_rows(folder: str, path: str, files: Set[str]) -> Iterator[tuple[str, int, set[str]]]:
    """Yield the splits that a card or a note of datasets at `path` counts, as `train` or `de/train`, their rows and
    their files: those that `state.json` lists, or those of `files` with the names of configuration and split."""
    place, name = os.path.split(path)
    if name not in ("README.md", "dataset_info.json", "dataset_infos.json"):
        return
    with contextlib.suppress(LookupError, TypeError, ValueError, AttributeError):
        state = _read_list(os.path.join(folder, place, STATE_FILE)) or {}
        live = live_files(folder, [os.path.join(place, STATE_FILE)])[place]
        top = os.path.join(place, "")
        below = {file.removeprefix(top): file for file in live or files if file.startswith(top)}
        infos = _read_list(os.path.join(folder, path), "dataset_info")
        if isinstance(infos, dict):
            infos = [infos] if "splits" in infos else [info | {"config_name": key} for key, info in infos.items()]
        for info in infos:
            config = f"{info['config_name']}/" if len(infos) > 1 else ""
            mine = [at for at in below if f"/{config}" in f"/{at}"]
            splits = info["splits"]
            if isinstance(splits, dict):
                splits = [split | {"name": key} for key, split in splits.items()]
            for split in splits:
                named = re.compile(rf"[/._-]{re.escape(split['name'])}(-\d|[/.]|$)")
                found = [at for at in mine if named.search(f"/{at}")] or (mine if live or len(splits) == 1 else [])
                if state.get("_split", split["name"]) == split["name"]:
                    yield config + split["name"], int(split["num_examples"]), {below[at] for at in found}


def _entries(path: str) -> Iterator[tuple[str, str]]:
    """Yield words that say a split, and the entry of a list that they belong to: a line or string, with the name of
    the list, the keys that lead to it and the `split` beside it; and a key with its string."""
    todo: list[tuple[str, Any]] = [(os.path.basename(path), _read_list(path))]
    while todo:
        words, value = todo.pop()
        if isinstance(value, dict):
            todo += [(f"{words} {key} {value.get('split', '')}", each) for key, each in value.items()]
            yield from ((each, str(key)) for key, each in value.items() if isinstance(each, str))
        elif isinstance(value, list):
            todo += [(words, each) for each in value]
        elif isinstance(value, str):
            yield words, value


def _read_list(path: str, key: str = "configs") -> Any:
    """Return the content of JSON, the value of `key` in a dataset card, or lines; None if it cannot be read."""
    try:
        with open(path, "rb") as file:
            text = file.read(1 << 24).decode()  # larger files are no lists
        if path.lower().endswith(".json"):
            return json.loads(text)
        if not path.endswith(".md"):
            return [line.strip() for line in text.splitlines()]
        return yaml.safe_load(re.split(r"^---\s*$", text, maxsplit=2, flags=re.MULTILINE)[1])[key]
    except (OSError, ValueError, LookupError, TypeError, RecursionError, yaml.YAMLError):
        return None


_LIVE_LIST = re.compile(
    r"(?:(.*)/)?(?:state\.json|_committed_\w+|(?P<table>_delta_log/.*|\.hoodie/.*|metadata/[^/]+\.avro))"
)


def live_files(place: str, notes: Iterable[str]) -> dict[str, set[str] | None]:
    """Return by folder the files that are data still, as a list there says (of datasets or Databricks), empty for
    lists of other programs; None for a table (Delta Lake, Hudi, Iceberg), which keeps removed rows."""
    found: dict[str, set[str] | None] = {}
    gone: set[str] = set()
    for path in notes:
        if match := _LIVE_LIST.fullmatch(path):
            folder = match[1] or ""
            if match["table"]:
                found[folder] = None
            elif (live := found.setdefault(folder, set())) is not None:
                with contextlib.suppress(OSError, ValueError, LookupError, TypeError, AttributeError):
                    value = json.loads(Path(place, path).read_bytes())
                    names = [file["filename"] for file in value.get("_data_files", ())] + value.get("added", [])
                    live.update(os.path.join(folder, name) for name in names)
                    gone.update(os.path.join(folder, name) for name in value.get("removed", ()))
    return {folder: live and live - gone for folder, live in found.items()}


_KINDS = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}
"""By the hexadecimal digits."""

CHECKSUM_LIST = re.compile(r"(?is)(?:(.+)\.)?(?:md5|sha\d+)-?(?:sums?)?(?:\.txt)?|checksums?(?:\.txt)?")

_HUB_NOTE = re.compile(r"(?s)((?:.*/)?)\.cache/huggingface/download/(.+)\.(metadata|lock)")
"""A note of `hf download --local-dir`: folder, file, kind. `metadata` is written when the file is whole, with the lines
commit, etag and time; `lock` when it is begun. The format is that of huggingface_hub/_local_folder.py."""


def listed_checksums(folder: str, notes: Iterable[str], files: Set[str]) -> Iterator[tuple[str, str, str]]:
    """Yield path and checksum of each of `files` that the lists among `notes` name, and the path of the list; an empty
    checksum for Hadoop's of the file's blocks."""
    for path in notes:
        place, name = os.path.split(path)
        if hub := _HUB_NOTE.fullmatch(path):
            file = hub[1] + hub[2]
            if hub[3] == "metadata" and file in files and (digest := _etag(os.path.join(folder, path))):
                yield file, digest, path
        elif of := re.fullmatch(r"\.(.+)\.crc", name):
            if (file := os.path.join(place, of[1])) in files:
                yield file, "", path
        elif (of := CHECKSUM_LIST.fullmatch(name)) and os.path.isfile(os.path.join(folder, path)):
            for line in Path(folder, path).read_text("utf-8", "surrogateescape").splitlines():
                digest, _, file = line.strip().lstrip("\\").partition(" ")
                file = os.path.normpath(os.path.join(place, file.lstrip(" *") or of[1] or ""))
                if len(digest) in _KINDS and file in files:
                    yield file, digest.lower(), path


def _etag(note: str) -> str | None:
    """Return the checksum in a note of `hf download`: SHA-256 of a file in LFS or Xet, `blob ` and SHA-1 of Git's."""
    try:
        etag = Path(note).read_text("utf-8").splitlines()[1]
    except (OSError, ValueError, IndexError):  # damaged, or gone since the inventory
        return None
    kinds = {40: f"blob {etag}", 64: etag}
    return kinds.get(len(etag)) if re.fullmatch("[0-9a-f]+", etag) else None


def has_checksum(folder: str, file: str, digest: str, by: str) -> bool:
    """Return whether a file below `folder` has this checksum of the list `by`, of Git's kind behind `blob `; it is read
    whole. Raises OSError."""
    kind, _, digest = digest.rpartition(" ")
    with open(os.path.join(folder, file), "rb") as content:
        if digest:
            blob = hashlib.sha1(b"blob %d\0" % os.fstat(content.fileno()).st_size, usedforsecurity=False)
            return hashlib.file_digest(content, blob.copy if kind else _KINDS[len(digest)]).hexdigest() == digest
        sums = Path(folder, by).read_bytes()  # 4 bytes for each block, behind 8
        blocks = iter(lambda: content.read(int.from_bytes(sums[4:8])), b"")
        return sums[8:] == b"".join(zlib.crc32(block).to_bytes(4) for block in blocks)


def unfinished_downloads(notes: Set[str]) -> list[str]:
    """Return the files that `hf download` has begun and not ended: a lock without the note of a whole file, or beside
    the bytes so far, whose name begins with a hash of the note's name."""
    begun = {path[: path.rfind("/") + 29] for path in notes if path.endswith(".incomplete")}
    found = []
    for path in notes:
        if (hub := _HUB_NOTE.fullmatch(path)) and hub[3] == "lock":
            place, note = os.path.split(path.removesuffix("lock") + "metadata")
            short = base64.urlsafe_b64encode(hashlib.sha1(os.fsencode(note), usedforsecurity=False).digest()).decode()
            if f"{place}/{note}" not in notes or f"{place}/{short}" in begun:
                found.append(hub[1] + hub[2])
    return sorted(found)


def open_ranks(place: str, notes: Set[str]) -> Iterator[tuple[str, list[str], re.Pattern[str]]]:
    """Yield a folder of logs of datatrove, the ranks that have not ended where others have, and a pattern of
    their files."""
    for logs, name in map(os.path.split, notes):
        if name == "executor.json":
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
                count = json.loads(Path(place, logs, name).read_bytes())["world_size"]
                ranks = [f"{rank:05d}" for rank in range(count)]
                begun = [rank for rank in ranks if os.path.join(logs, "completions", rank) not in notes]
                if 0 < len(begun) < count:
                    top = re.escape(os.path.join(os.path.dirname(logs), ""))
                    yield logs, begun, re.compile(rf"(?s){top}(.*/)?({'|'.join(begun)})\D")


FILTERED_OUT = "filtered out"
"""By `filter_out`: such a file says nothing of others."""
ENDING_NOT_READ = "ending not read"


def why_left_out(
    path: str, suffixes: tuple[str, ...], filter_in: Sequence[str] = (), filter_out: Sequence[str] = ()
) -> str | None:
    """Return why a file is left out by its path, or None. Names that begin with `.` or `_`, of a file or of a folder,
    hold no data, as in Spark and pyarrow; `_column=value` is a folder of a partition."""
    if any(text in path for text in filter_out):
        return FILTERED_OUT
    if filter_in and not any(text in path for text in filter_in):
        return "filters"
    *folders, name = path.lower().split("/")
    if any(map(_TEMPORARY.match, (*folders, name))):
        return "hidden or temporary"
    if name in METADATA_FILE_NAMES or _METADATA_TEXT.fullmatch(name) or CHECKSUM_LIST.fullmatch(name):
        return "metadata"
    way = "; `reader: warc` with --ending reads it" if name.endswith((".warc", ".warc.gz")) else ""
    return None if name.endswith(suffixes) else ENDING_NOT_READ + way
