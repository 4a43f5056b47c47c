"""A global shuffle of a dataset on disk, in two passes, within a memory limit.

Every row has a key: a 64-bit hash of the seed, the number of its file in the sorted list, and its number there.
The output is all rows in the order of their keys. Pass 1 scatters rows to buckets by the upper bits of the key
(Arrow streams in a temporary folder); pass 2 sorts one bucket after the other in memory and appends it to the
output. So the same files and seed give the same bytes, whatever the memory, the threads and the number of
buckets. DuckDB's ORDER BY of a hash does not, with several threads and files.
Cost: every row is read twice and written twice; memory of a few buckets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from relayrun.data.folders import replaced_folder
from relayrun.errors import InputError
from relayrun.tokenization.columns import read_column
from relayrun.tokenization.dumps import find_files

KEY, FILE, ROW = "__relayrun_key", "__relayrun_file", "__relayrun_row"
PICTURE = "lengths.png"
_BASE = 250_000_000
"""Memory of the process itself, with Arrow and its readers."""

_COPIES = 6
"""Of a bucket at most: as read, keyed, sorted, as a row group, encoded."""

_READ_AHEAD = 1 << 18
"""Bytes of every column that are read at a time."""

_COMPRESSED = 6
"""A compressed jsonl file holds about this many times its bytes."""


@dataclass
class Lengths:
    """Mean length of the rows of a stretch, in the order in which they come: enough for a picture."""

    rows: list[int] = field(default_factory=list)
    means: list[float] = field(default_factory=list)

    def add(self, texts: pa.ChunkedArray | pa.Array) -> None:
        if len(texts):
            self.rows.append(len(texts))
            self.means.append(float(pc.mean(pc.binary_length(texts)).as_py() or 0))


def reshard(
    dataset_folder: Path,
    output: Path,
    *,
    column: str = "text",
    seed: int = 0,
    file_size: int = 500_000_000,
    row_group_size: int = 4096,
    compression: str = "snappy",
    memory_limit: int = 4_000_000_000,
    temp_dir: Path | None = None,
    threads: int = 1,
) -> int:
    """Write all rows below `dataset_folder`, shuffled, to `output/data_{i}.parquet`; return their number.

    Parquet files keep all their columns, which must be the same in all; of jsonl files only `column` is kept.
    `file_size`: bytes of an output file, checked after every row group of `row_group_size` rows.
    `memory_limit`: bytes; `threads` buckets are sorted at a time, each in its share. The folder appears at once.
    Raises InputError if `output` exists, or a file is torn or has other columns.
    """
    files = find_files(dataset_folder)
    if not files:
        raise InputError("no parquet or jsonl file below this folder", where=dataset_folder)
    if output.exists():
        raise InputError("the output exists", where=output, hint="move it away, or choose another folder")
    if memory_limit <= _BASE:
        raise InputError(f"a shuffle needs more memory than {_BASE:,} bytes", where="--memory-limit")
    paths = [dataset_folder / file.path for file in files]
    size = sum(_bytes_in_memory(path) for path in paths)
    buckets = int(min(4096, 1 + size * _COPIES * threads // (memory_limit - _BASE)))
    before, after = Lengths(), Lengths()
    with replaced_folder(output) as building, tempfile.TemporaryDirectory(prefix="reshard-", dir=temp_dir) as scratch:
        most = (memory_limit - _BASE) // 4
        with ThreadPoolExecutor(threads) as pool:
            if buckets == 1:
                tables = iter([_sorted(pa.concat_tables(_keyed(paths, column, seed, before)))])
            else:
                streams = _scatter(paths, column, seed, buckets, most, Path(scratch), before)
                tables = _in_order(pool, streams, threads)
            rows = _write(tables, building, column, file_size, row_group_size, compression, after)
        draw(before, after, building / PICTURE)
    return rows


def keys(seed: int, file: int, rows: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The keys of these rows of file number `file`: two rounds of the splitmix64 finaliser (Steele et al., 2014)."""
    start = np.random.SeedSequence([seed, file]).generate_state(1, np.uint64)[0]
    mixed = rows * np.uint64(0x9E3779B97F4A7C15) + start
    for _ in range(2):
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return np.asarray(mixed, np.uint64)


def _bytes_in_memory(path: Path) -> int:
    if path.suffix.lower() != ".parquet":
        return path.stat().st_size * (1 if path.suffix.lower() == ".jsonl" else _COMPRESSED)
    try:
        metadata = pq.read_metadata(path)
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot be read, it may be torn: {error}", where=path) from None
    return sum(metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups))


def _read(path: Path, column: str) -> Iterator[pa.Table]:
    if path.suffix.lower() != ".parquet":
        for array in read_column(str(path), column):
            yield pa.table({column: array.cast(pa.large_string())})
        return
    try:
        # pages come through a buffer: without it a whole row group is read at once
        with pq.ParquetFile(path, buffer_size=_READ_AHEAD, pre_buffer=False) as file:
            if column not in file.schema_arrow.names:
                raise InputError(f"no column {column!r}; there are: {', '.join(file.schema_arrow.names)}", where=path)
            for batch in file.iter_batches(1024, use_threads=False):
                yield pa.Table.from_batches([batch]).replace_schema_metadata()
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"cannot be read, it may be torn: {error}", where=path) from None


def _keyed(paths: Sequence[Path], column: str, seed: int, before: Lengths) -> Iterator[pa.Table]:
    """The rows of all files, in pieces, with their keys and where they stood."""
    schema: pa.Schema | None = None
    for number, path in enumerate(paths):
        row = 0
        for table in _read(path, column):
            before.add(table[column])
            rows = np.arange(row, row + len(table), dtype=np.uint64)
            row += len(table)
            keyed = table.append_column(KEY, pa.array(keys(seed, number, rows)))
            keyed = keyed.append_column(FILE, pa.array(np.full(len(table), number, np.uint32)))
            keyed = keyed.append_column(ROW, pa.array(rows))
            if schema is not None and keyed.schema != schema:
                raise InputError("its columns are others than those of the files before it", where=path,
                                 hint="shuffle files of one kind at a time")  # fmt: skip
            schema = keyed.schema
            yield keyed


def _scatter(
    paths: Sequence[Path], column: str, seed: int, buckets: int, most: int, scratch: Path, before: Lengths
) -> list[Path]:
    """Pass 1: the rows of all files, with their keys, into a stream for every bucket."""
    streams = [scratch / f"{number}.arrow" for number in range(buckets)]
    writers: dict[int, Any] = {}
    waiting: list[pa.Table] = []
    size = 0

    def flush() -> None:
        nonlocal size
        if not waiting:
            return
        table = pa.concat_tables(waiting)
        bucket = (table[KEY].to_numpy() >> np.uint64(32)) * np.uint64(buckets) >> np.uint64(32)
        order = np.argsort(bucket, kind="stable")
        bounds = np.searchsorted(bucket[order], np.arange(buckets + 1, dtype=np.uint64))
        for number in np.flatnonzero(np.diff(bounds)).tolist():
            if number not in writers:
                writers[number] = pa.ipc.new_stream(str(streams[number]), table.schema)
            writers[number].write_table(table.take(order[bounds[number] : bounds[number + 1]]))
        waiting.clear()
        size = 0

    try:
        for keyed in _keyed(paths, column, seed, before):
            waiting.append(keyed)
            size += keyed.nbytes
            if size > most // 2:
                flush()
        flush()
    finally:
        for writer in writers.values():
            writer.close()
    return [streams[number] for number in sorted(writers)]


def _in_order(pool: ThreadPoolExecutor, streams: Sequence[Path], threads: int) -> Iterator[pa.Table]:
    """Pass 2: every bucket sorted, `threads` of them at a time."""
    for start in range(0, len(streams), threads):
        yield from pool.map(_sorted_bucket, streams[start : start + threads])


def _sorted_bucket(stream: Path) -> pa.Table:
    with pa.OSFile(str(stream)) as source, pa.ipc.open_stream(source) as reader:
        table = reader.read_all()
    stream.unlink()
    return _sorted(table)


def _sorted(table: pa.Table) -> pa.Table:
    order = np.lexsort([table[name].to_numpy() for name in (ROW, FILE, KEY)])
    return table.drop_columns([KEY, FILE, ROW]).take(order)


def _write(
    tables: Iterator[pa.Table], folder: Path, column: str, file_size: int, rows: int, compression: str, after: Lengths
) -> int:
    """Row groups of exactly `rows` rows, one behind the other, whatever the buckets."""
    written, number = 0, 0
    writer: Any = None
    sink: Any = None
    rest: pa.Table | None = None

    def write(group: pa.Table) -> None:
        nonlocal writer, sink, number, written
        if writer is None:
            sink = pa.OSFile(str(folder / f"data_{number}.parquet"), "wb")
            writer = pq.ParquetWriter(sink, group.schema, compression=compression)
        writer.write_table(group.combine_chunks(), row_group_size=len(group))
        after.add(group[column])
        written += len(group)
        if sink.tell() >= file_size:
            close()
            number += 1

    def close() -> None:
        nonlocal writer, sink
        if writer is not None:
            writer.close()
            sink.close()
            writer = None

    try:
        for table in tables:
            whole = table if rest is None else pa.concat_tables([rest, table])
            cut = len(whole) - len(whole) % rows
            for start in range(0, cut, rows):
                write(whole.slice(start, rows))
            rest = whole.slice(cut)
        if rest is not None and len(rest):
            write(rest)
    finally:
        close()
    return written


def draw(before: Lengths, after: Lengths, file: Path) -> None:
    """A PNG: mean length of the rows against their place in the dataset, before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, title, lengths in zip(panels, ("before", "after"), (before, after), strict=True):
        panel.scatter(np.cumsum(lengths.rows), lengths.means, s=4)
        panel.set(title=title, xlabel="row", xlim=(0, None), ylim=(0, None))
    panels[0].set_ylabel("mean length of text, bytes")
    FigureCanvasAgg(figure).print_png(file)
