"""The text files of a data set, found and frozen at the submit."""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from urllib.parse import unquote

import pyarrow as pa

from relayrun.config.sections.conditions import Condition, condition_columns, parse_row_condition
from relayrun.config.sections.data import DataSource, StreamSection, StreamSubset
from relayrun.errors import ConfigError, InputError, did_you_mean_path
from relayrun.tokens.readers.arrow_files import open_parquet
from relayrun.tokens.readers.columns import check_column, read_column
from relayrun.tokens.readers.inputs import FORMATS, PARQUET, data_suffixes, file_format
from relayrun.tokens.readers.inventory import find_data_files
from relayrun.tokens.readers.texts import missing_column_error
from relayrun.tokens.shards.manifest import DatasetManifest, TextFileEntry
from relayrun.tokens.shards.prefixes import escape_literal_front, literal_front, literal_name_start
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.streams.row_filters import RowFaults, arrow_expression, is_content_fault, stream_filter

log = logging.getLogger(__name__)

_BATCH_BYTES = 1 << 16
_AT_A_TIME = 16
"""Files that are examined in parallel; the file system dominates the time."""

MAX_COUNTED_FILES = 64
"""Row counts are checked at the submit for at most this many files."""

MAX_HASHED_BYTES = 4_000_000_000
"""Files are hashed whole at the first submit if the data set has at most this many bytes."""


def freeze_text_files(
    name: str, source: DataSource, lanes: int, known: Sequence[TextFileEntry] = ()
) -> DatasetManifest:
    """Return the files of the stream `name`: paths in the given order, the content of a folder sorted.

    `known` holds files that the run already has under this name. A local file with another time of change is hashed
    whole: with an unchanged hash it stays the known file, otherwise it is a new one. Raises InputError for missing and
    doubled files, files of another kind, or a first file without the column; ConfigError if a condition does not fit
    the files, or if up to `MAX_COUNTED_FILES` parquet files have fewer rows than lanes."""
    stream, where = source.stream or StreamSection(), f"data set {name!r}"
    found = find_text_files(source, where)
    first = _first_good([file.path for file in found], stream)
    is_parquet = FORMATS[source.source] is PARQUET
    if is_parquet:
        _try_columns(first, stream, where)
    elif stream.filters is not None:
        _try_lines(first, stream, where)
    counted = is_parquet and len(found) <= MAX_COUNTED_FILES and stream.on_error == "fail"
    if counted and (rows := sum(map(_rows_of, found))) < lanes:
        words = f"{where}: its {rows:,} rows are fewer than data.lanes {lanes}, each of which needs one in every epoch"
        raise ConfigError(words, hint="set data.lanes lower, or give more rows")
    whole = sum(file.size for file in found) <= MAX_HASHED_BYTES
    by_name: dict[tuple[str, int], list[TextFileEntry]] = {}
    for file in known:
        by_name.setdefault((os.path.basename(file.path), file.size), []).append(file)
    with ThreadPoolExecutor(_AT_A_TIME) as pool:
        files = pool.map(
            lambda file: _frozen(file, by_name.get((os.path.basename(file.path), file.size), []), whole=whole), found
        )
        return DatasetManifest(shards=(), files=tuple(files))


def _frozen(file: TextFileEntry, known: Sequence[TextFileEntry], *, whole: bool) -> TextFileEntry:
    """Return a file as it is now, with the fingerprint of a `known` file of this name and size if the content is equal.
    With `whole`, a new file is hashed whole."""
    local = not urls.is_url(file.path)
    changed = urls.stat_file(file.path)[1]
    ends = urls.hash_file_ends(file.path)
    now = replace(file, fingerprint=ends, changed=changed)
    alike = [one for one in known if one.fingerprint in (ends, _whole_fingerprint(ends, one))]
    for one in alike:
        if one.changed == changed or 0 in (one.changed, changed):  # 0: a store without times
            return replace(now, fingerprint=one.fingerprint, content=one.content)
    now = replace(now, content=file_checksum(file.path) if local and (alike or whole) else "")
    for one in alike:
        if now.content and now.content == one.content:
            return replace(now, fingerprint=one.fingerprint)
    return replace(now, fingerprint=_whole_fingerprint(ends, now)) if alike else now


def _whole_fingerprint(ends: str, file: TextFileEntry) -> str:
    """Return a fingerprint for a file whose ends equal another's; below a URL the time stands for the content."""
    return hashlib.sha256(f"{ends} {file.content or file.changed}".encode()).hexdigest()


def _first_good(paths: Sequence[str], stream: StreamSection) -> str:
    """Return the first readable file. With `on_error: fail` it must be the first of all."""
    bad: InputError | None = None
    for path in paths[: 1 if stream.on_error == "fail" else MAX_COUNTED_FILES]:
        try:
            check_column(path, stream.column, skip_lines=stream.on_error == "skip-line")
            return path
        except InputError as error:
            hint = error.hint and error.hint.replace("--column", "stream.column")
            bad = bad or InputError(error.message, where=error.where, hint=hint)
    assert bad is not None
    raise bad


def find_text_files(source: DataSource, where: str) -> list[TextFileEntry]:
    """Return the files of a stream without fingerprints. Raises like `freeze_text_files`; errors name `where`."""
    stream = source.stream or StreamSection()
    found: dict[str, int] = {}
    for path in source.paths:
        for file, size in _matches(path, source, where):
            if file in found:
                raise InputError(f"{where}: two of its paths lead to this file", where=file, hint="name each file once")
            found[file] = size
    if stream.partition_filters is not None:
        found = {path: found[path] for path in _in_partitions(list(found), stream.partition_filters, where)}
    files = [TextFileEntry(path=path, size=size, fingerprint="") for path, size in found.items()]
    limit = stream.limit or StreamSubset()
    if limit.fraction_of_files is not None:
        files = files[: max(1, round(len(files) * limit.fraction_of_files))]
    return [*_cut(files[: limit.nb_files], limit, stream)]


def _matches(path: str, source: DataSource, where: str) -> list[tuple[str, int]]:
    wanted = FORMATS[source.source]
    stream, has_magic = source.stream or StreamSection(), glob.has_magic(path) and not os.path.lexists(path)
    strict = not has_magic and stream.partition_filters is None
    below = partial(find_data_files, of=f"{where}: ", dead_links_only=stream.on_error != "fail", strict=strict)
    is_pattern = has_magic and not urls.is_url(path)
    places = sorted(glob.glob(escape_literal_front(path), recursive=True)) if is_pattern else [path]
    front = os.path.abspath(literal_front(path)) if is_pattern else ""
    found, names = [], []
    for match in map(urls.resolve_url_link, places):
        if urls.is_url(match):
            found += _below_url(match, below)
        elif os.path.isdir(match):
            found += below(os.path.abspath(match))
        elif os.path.isfile(match) and is_pattern and re.search(r"(^|/)[._]", path[len(literal_front(path)) :]) is None:
            names.append(os.path.relpath(match, front))  # by the rules of a folder, but for what the pattern spells out
        elif os.path.isfile(match):
            found.append((os.path.abspath(match), os.stat(match).st_size))
        elif os.path.islink(match):  # its target may be unmounted: its rows would silently be missing
            raise InputError("this link leads nowhere", where=match, hint="mend or remove it")
    found += below(front, names=names) if names else []
    fitting = [(file, size) for file, size in found if file_format(file) is wanted]
    others = sorted({file_format(file).name for file, _ in found} - {wanted.name})
    if fitting and others:
        log.info("%s: left out, of %s: %d files", where, ", ".join(others), len(found) - len(fitting))
    if not fitting:
        what = f"; there are files of {', '.join(others)}" if others else ""
        near = "" if found or urls.is_url(path) else did_you_mean_path(path)
        hint = near or "give a folder, a file or a pattern of either, and the source that they are of"
        raise InputError(f"source: {wanted.name} finds no such file here{what}", where=path, hint=hint)
    return fitting


def _below_url(url: str, below: Callable[[str], list[tuple[str, int]]]) -> list[tuple[str, int]]:
    """Return path and bytes of the files at a URL, below it, or matching its pattern. Raises like `absolute_path`."""
    url = urls.absolute_path(url)
    if not glob.has_magic(url):
        if url.lower().endswith((*data_suffixes(), ".gz", ".zst", ".zstd")):
            return [(url, urls.stat_url(url)[0])]
        return below(url)
    folder = re.split(r"[*?[]", url, maxsplit=1)[0].rpartition("/")[0]
    inside = below(folder)
    pattern = _pattern(url, [file for file, _ in inside])
    return [(file, size) for file, size in inside if pattern.fullmatch(file)]


def _pattern(url: str, files: Sequence[str]) -> re.Pattern[str]:
    """Compile the wildcards `**/`, `*`, `?` and `[...]` of a URL behind its longest prefix that exists in `files`."""
    names = url.split("/")
    fronts = ("/".join(names[:length]) for length in range(len(names), 0, -1))
    front = next((front for front in fronts if any(f"{file}/".startswith(f"{front}/") for file in files)), "")
    begin = literal_name_start(url[len(front) :])
    front += begin if any(file.startswith(front + begin) for file in files) else ""
    words = {"**/": "(?:.*/)?", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*|\?|\[[^]]+\])", url[len(front) :])
    rest = "".join(words.get(part, part if part.startswith("[") else re.escape(part)) for part in parts)
    return re.compile(re.escape(front) + (rest or "(?:/.*)?"))


def _in_partitions(paths: list[str], text: str, where: str) -> Iterator[str]:
    """Yield the files whose path parts `name=value` fulfil a condition. Integers if all files have integers."""
    parts = [dict(re.findall(r"([^/=]+)=([^/]*)(?=/)", path)) for path in paths]
    names = condition_columns(condition := parse_row_condition(text))
    if missing := [name for name in names if not any(name in part for part in parts)]:
        known = sorted({name for part in parts for name in part})
        words = f"no path has a part {missing[0]}=...; there are: {', '.join(known) or 'none'}"
        hint = "filter columns of the files with stream.filters"
        raise ConfigError(f"stream.partition_filters: {words}", where=where, hint=hint)
    table = pa.table({**{name: _typed([part.get(name) for part in parts]) for name in names}, "path": paths})
    chosen: list[str] = _filtered(table, condition, "stream.partition_filters", where)["path"].to_pylist()
    if not chosen:
        raise ConfigError(f"stream.partition_filters leaves none of {len(paths):,} files", where=where)
    yield from chosen


def _typed(values: Sequence[str | None]) -> list[str | int | None]:
    if all(value is None or re.fullmatch(r"-?(0|[1-9]\d*)", value) for value in values):
        return [None if value is None else int(value) for value in values]
    return [None if value is None else unquote(value) for value in values]


def _filtered(table: pa.Table, condition: Condition, setting: str, where: str) -> pa.Table:
    try:
        return table.filter(arrow_expression(condition, table.schema))
    except (pa.ArrowException, OverflowError) as error:
        raise ConfigError(f"{setting} does not fit the columns: {str(error).splitlines()[0]}", where=where) from None


def _try_columns(path: str, stream: StreamSection, where: str) -> None:
    """Check that a parquet file has the columns of filter and `extra_columns`, and that the filter fits their types."""
    condition = stream_filter(stream)
    with open_parquet(path) as file:
        schema = file.schema_arrow
    for option, names in (("filters", condition_columns(condition)), ("extra_columns", stream.extra_columns)):
        if missing := [name for name in names if schema.names.count(name) != 1]:
            fault = missing_column_error(path, missing[0], schema.names, hint=None)
            raise ConfigError(f"stream.{option}: {fault.message}", where=f"{where}, {path}", hint=fault.hint)
    if condition is not None:
        _filtered(schema.empty_table(), condition, f"stream.filters {stream.filters!r:.200}", where)


def _try_lines(path: str, stream: StreamSection, where: str) -> None:
    """Check that the condition fits the first lines of a file and that a line has each of its names."""
    condition = stream_filter(stream)
    faults = RowFaults(condition, skip=stream.on_error == "skip-line")
    arrays = read_column(path, stream.column, batch_bytes=_BATCH_BYTES, faults=faults)
    next(arrays, None)
    arrays.close()
    if missing := [name for name in condition_columns(condition) if name not in faults.seen]:
        raise ConfigError(f"stream.filters: the first lines have no {missing[0]!r}", where=f"{where}, {path}")


def _cut(files: list[TextFileEntry], limit: StreamSubset, stream: StreamSection) -> Iterator[TextFileEntry]:
    """Yield the files up to the limit of fragments or rows; the last file may be partial."""
    left = limit.nb_fragments or limit.nb_rows
    if left is None:
        yield from files
        return
    for file in files:
        if left <= 0:
            return
        try:
            fragments, rows = _size_of(file.path, stream)
        except InputError as error:
            if stream.on_error == "fail" or not is_content_fault(error):
                raise
            fragments, rows = 1, 0
        count = fragments if limit.nb_fragments else rows
        if count <= left:
            yield file
        else:
            yield replace(file, fragments=left) if limit.nb_fragments else replace(file, rows=left)
        left -= count


def _rows_of(entry: TextFileEntry) -> int:
    with open_parquet(entry.path) as file:
        groups = range(file.metadata.num_row_groups)[: entry.fragments]
        rows = sum(int(file.metadata.row_group(group).num_rows) for group in groups)
    return rows if entry.rows is None else min(rows, entry.rows)


def _size_of(path: str, stream: StreamSection) -> tuple[int, int]:
    if file_format(path) is PARQUET:
        with open_parquet(path) as file:
            groups, rows = int(file.metadata.num_row_groups), int(file.metadata.num_rows)
            return groups if stream.split_to_row_groups else 1, rows
    if stream.limit is not None and stream.limit.nb_fragments:
        return 1, 0
    faults = RowFaults(None, skip=stream.on_error == "skip-line")
    return 1, sum(len(array) for array in read_column(path, stream.column, batch_bytes=_BATCH_BYTES, faults=faults))
