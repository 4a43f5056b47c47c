"""Find the shards below folders. Standard library only: launchers import it at no cost.

A prefix is the path of a shard without `.bin` or `.idx`. Prefixes are absolute (jobs start in other directories), keep
links, and are sorted unless a list gives the order: the order of a directory listing differs between machines and days,
and the order of the data must not.

The summary in the folder of a mixture lists the files of the mixture, and the links that repeat a shard on purpose:
passes over a data set lie in folders of their own, because each file needs its own name.
"""

from __future__ import annotations

import functools
import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from relayrun.errors import InputError, RelayrunError, combined_error, did_you_mean_path
from relayrun.files import read_json
from relayrun.leftovers import TEMPORARY_PREFIX

SHARD_SUFFIXES = (".bin", ".idx")


def find_prefixes(paths: Sequence[Path], *, listed: bool = False) -> list[str]:
    """Return every prefix below the folders `paths`, sorted, each once; `listed`: in the order of `paths`. Links are
    followed. A real folder is read once, under its first name: a loop of links ends, and two links to one folder do not
    repeat its shards. Links to single files are kept as they are. Raises InputError for a missing folder, a folder
    without shards, and half a shard."""
    for path in map(os.fspath, paths):
        if (found := re.match(r"([a-z][a-z0-9+.-]+):/+(.+)", path)) is not None:
            url = f"{found[1]}://{found[2]}"
            copy = f"import fsspec; s, p = fsspec.core.url_to_fs('{url}'); s.get(p + '/', 'FOLDER/', recursive=True)"
            words = "this is a URL, and shards are linked, merged and verified in folders"
            raise InputError(words, where=url, hint=f'copy them first: python -c "{copy}"')
    seen: set[tuple[int, int]] = set()
    prefixes: dict[str, None] = {}
    roots = [Path(path).absolute() for path in paths]
    for root in roots if listed else sorted(roots):
        prefixes |= dict.fromkeys(sorted(_prefixes_below(root, seen)))
    return list(prefixes) if listed else sorted(prefixes)


def expand_paths(paths: Sequence[str]) -> list[str]:
    """Return every prefix that folders, prefixes, or patterns (`*`, `?`, `[..]`) of either match, each once. An
    existing shard or folder of exactly that name is never a pattern. The order is that of `paths`, sorted within each
    path. Other matches of a pattern, such as a folder of logs, are skipped. Raises InputError as `find_prefixes`, and
    for paths that match nothing."""
    found: list[tuple[list[Path], set[str]]] = []
    bad: list[RelayrunError] = []
    for path in paths:
        try:
            found.append(_match_path(path))
        except InputError as error:
            bad.append(error)
    if bad:
        raise combined_error(bad, "paths lead to nothing")
    files = (prefix + suffix for _, prefixes in found for prefix in sorted(prefixes) for suffix in SHARD_SUFFIXES)
    if half := [_half_shard_error(file) for file in files if not os.path.isfile(file)]:
        raise combined_error(half, "shards are not whole")
    seen: set[tuple[int, int]] = set()
    ordered: dict[str, None] = {}
    for below, prefixes in found:
        every = prefixes.union(*(_prefixes_below(folder, seen) for folder in sorted(below)))
        ordered |= dict.fromkeys(sorted(every))
    return list(ordered)


def _match_path(path: str) -> tuple[list[Path], set[str]]:
    """Return the folders and prefixes that a path of `expand_paths` matches. Raises InputError for none."""
    if os.path.isdir(path):
        return [Path(path).absolute()], set()
    exists = any(os.path.lexists(path + suffix) for suffix in SHARD_SUFFIXES)
    pattern = glob.escape(path) if exists else escape_literal_front(path)
    files = set(glob.glob(pattern)) | {match for suffix in SHARD_SUFFIXES for match in glob.glob(pattern + suffix)}
    below = [Path(match).absolute() for match in files if os.path.isdir(match)]
    if glob.has_magic(path):  # `dump-0/*` means its shards, not the logs beside them
        below = [folder for folder in below if any(_walk_prefixes(os.fspath(folder), set()))]
    shards = {
        os.path.abspath(match[:-4]) for match in files if match.endswith(SHARD_SUFFIXES) and os.path.isfile(match)
    }
    if not below and not shards:
        usual = "give a folder, a shard without its suffix, or a pattern of either"
        other = "for files of text give their `source` too" if files else did_you_mean_path(path)
        hint = "; ".join(filter(None, [other, usual]))
        raise InputError("leads to no folder and to no shard", where=path, hint=hint)
    return below, shards


def literal_front(path: str) -> str:
    """Return the longest front of a path, in whole names, that exists."""
    parts = path.split("/")
    fronts = ("/".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next(filter(os.path.lexists, fronts), "")


def escape_literal_front(path: str) -> str:
    """Return `path` as a pattern whose longest existing front is literal. The start of a name before its first `*` or
    `?` is literal, too, if an existing name begins with it: `web[2024]-*`."""
    front = literal_front(path)
    begin = literal_name_start(path[len(front) :])
    if begin and glob.glob(glob.escape(front + begin) + "*"):
        front += begin
    return glob.escape(front) + path[len(front) :]


def literal_name_start(rest: str) -> str:
    """Return the part of a name before its first `*` or `?` if it holds a bracket; else an empty string."""
    found = re.match(r"/*[^/*?]*\[[^/*?]*(?=[*?])", rest)
    return "" if found is None else found[0]


def _prefixes_below(root: Path, seen: set[tuple[int, int]]) -> set[str]:
    if not root.is_dir():
        what, near = ("not a folder", "") if root.exists() else ("no such folder", did_you_mean_path(root))
        hint = "; ".join(filter(None, [near, "give folders that hold .bin and .idx files"]))
        raise InputError(what, where=root, hint=hint)
    found = set(_walk_prefixes(os.fspath(root), seen))
    if not found and not any(_walk_prefixes(os.fspath(root), set())):  # not even without `seen`
        raise InputError(
            "no .bin and .idx files below this folder", where=root, hint="tokenize into it first, or leave it out"
        )
    return found


def _half_shard_error(missing: str) -> InputError:
    words = "a shard needs both its .bin and its .idx file; this one is missing"
    hint = "wait until it is written, tokenize it again, or remove its other half"
    return InputError(words, where=missing, hint=hint)


def join_prefixes(prefixes: Sequence[str]) -> str:
    """Join the prefixes for Megatron's `--data-path $(...)`. Raises InputError for a prefix with a blank."""
    for prefix in prefixes:
        if prefix.split() != [prefix]:
            words = "this prefix holds a blank and cannot stand in a space-separated line"
            raise InputError(words, where=repr(prefix), hint="use --json or --null")
    return " ".join(prefixes)


def _walk_prefixes(root: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yield the prefixes below `root`; `seen` holds (device, inode) of the folders that were read."""
    waiting = [root]
    while waiting:
        folder = waiting.pop()
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            continue
        seen.add((status.st_dev, status.st_ino))
        folders: list[str] = []
        stems: dict[str, set[str]] = {suffix: set() for suffix in SHARD_SUFFIXES}
        with os.scandir(folder) as entries:
            for entry in entries:
                stem, suffix = entry.name[:-4], entry.name[-4:]
                if entry.is_dir():
                    if not entry.name.startswith(TEMPORARY_PREFIX):
                        folders.append(entry.path)
                elif suffix in SHARD_SUFFIXES and stem:
                    if not entry.is_file():
                        raise InputError(
                            "not a file, or a link that leads nowhere", where=entry.path, hint="mend or remove it"
                        )
                    stems[suffix].add(stem)
        bins, indices = stems.values()
        if bins != indices:
            missing = [os.path.join(folder, stem + (".idx" if stem in bins else ".bin")) for stem in bins ^ indices]
            raise combined_error([_half_shard_error(path) for path in sorted(missing)], "shards are not whole")
        yield from (os.path.join(folder, stem) for stem in bins)
        waiting.extend(sorted(folders, reverse=True))


MIXTURE_FORMAT = "relayrun dataset mixture, version 1"
SUMMARY_TEXT = "dataset_mixture_summary.txt"
SUMMARY_JSON = "dataset_mixture_summary.json"


def mixture_files(mixture: Path) -> dict[str, bool]:
    """Return the files of a mixture by its summary: path below it → True for a link. Empty for any other folder."""
    try:
        former = read_json(mixture / SUMMARY_JSON)
        if former["format"] != MIXTURE_FORMAT:
            return {}
        files = dict.fromkeys((SUMMARY_TEXT, SUMMARY_JSON, *(dataset["name"] for dataset in former["datasets"])), False)
        for shard in former["shards"]:
            link = shard["link"]
            files[os.path.dirname(link)] = False
            files |= {
                link + suffix: suffix == ".bin" or "cut_after_documents" not in shard for suffix in SHARD_SUFFIXES
            }
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):  # ValueError: also invalid UTF-8
        return {}
    return files


@functools.lru_cache(maxsize=16)
def _mixture_links(mixture: str) -> frozenset[str]:
    return frozenset(name[:-4] for name in mixture_files(Path(mixture)) if name.endswith(SHARD_SUFFIXES))


def is_repeated_pass(prefix: str, other: str) -> bool:
    """True if two prefixes are one shard in two passes of a mixture that repeats its data set."""
    mixture = os.path.dirname(os.path.commonpath([prefix, other]))
    names = [os.path.relpath(path, mixture) for path in (prefix, other)]
    passes = {re.fullmatch(r"epoch-\d+", os.path.basename(os.path.dirname(name))) is not None for name in names}
    return True in passes and _mixture_links(mixture).issuperset(names)
