"""Cut large files into ranges, and deal files and ranges in order onto shards or dumps."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from itertools import pairwise

from relayrun.errors import RelayrunError
from relayrun.tokens.readers.file_ranges import cut_path, next_member, range_of_file, split_range
from relayrun.tokens.readers.inputs import JSON_LINES, PARQUET, InputFile, file_format
from relayrun.tokens.stores.urls import join_path, open_input

SMALLEST_RANGE = 32 << 20
"""Least bytes of a range: a start of a task costs as much as some megabytes of text."""

_SEARCHED_BYTES = 256 << 20
"""A file whose next member begins farther away than this is not cut."""


def deal_in_ranges(dataset: str, files: Sequence[InputFile], tasks: int) -> list[list[str]]:
    """Deal files, which are cut into ranges, in order onto at most `tasks` parts of about the same bytes; none if no
    file that can be cut has the bytes of two parts."""
    total = sum(size for _, size, _ in files)
    share = max(total / tasks, SMALLEST_RANGE)
    if not files or max(size for _, size, _ in files) < 2 * share:
        return []
    parts: list[list[str]] = [[] for _ in range(tasks)]
    place = cuts = 0
    for file in files:
        offsets: list[int] = []
        with contextlib.suppress(RelayrunError, OSError):  # the task of the file reports it
            offsets = cut_offsets(join_path(dataset, file[0]), file[1], round(file[1] / share))
        owners: list[int] = []
        for path in cut_path(file[0], offsets):
            size = range_of_file(file, path)[1]
            owners.append(min(tasks - 1, int((place + size / 2) * tasks / total)))
            place += size
        # two ranges in one part are one
        kept = [offset for offset, (one, other) in zip(offsets, pairwise(owners), strict=True) if one != other]
        for owner, path in zip(dict.fromkeys(owners), cut_path(file[0], kept), strict=True):
            parts[owner].append(path)
        cuts += len(kept)
    return [part for part in parts if part] if cuts else []


def cut_offsets(path: str, size: int, pieces: int) -> list[int]:
    """Return up to `pieces` - 1 offsets that cut a file or range of `size` bytes evenly; fewer where it has few row
    groups, or its members of gzip or zstd are large; none for formats that are read from the beginning."""
    file, begin, _ = split_range(path)
    wanted = [begin + size * piece // pieces for piece in range(1, pieces)]
    found: set[int] = set()
    if file_format(file) is PARQUET:
        from relayrun.tokens.readers.arrow_files import open_parquet, row_group_starts  # on demand: Arrow

        with open_parquet(file) as parquet:
            starts = row_group_starts(parquet)[1:]
        found = {min((abs(start - offset), start) for start in starts)[1] for offset in wanted if starts}
    elif file_format(file) is JSON_LINES:
        with open_input(file) as raw:
            for offset in wanted:
                member = next_member(raw, file, offset, offset + _SEARCHED_BYTES)
                if member is None:
                    break
                found.add(member)
    return sorted(offset for offset in found if begin < offset < begin + size)
