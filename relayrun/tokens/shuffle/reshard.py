"""Shuffle a whole data set on disk within a memory limit.

The key of a row is a 64-bit hash of the seed, the number of its file in the sorted list, and its number there. The
output is all rows in the order of their keys, in files of equal numbers of rows. Pass 1 scatters rows to buckets on
disk by the upper bits of the key (buckets.py), and pass 2 sorts one bucket after another in memory and writes it. So
the same files and seed give the same bytes, whatever the memory, the threads and the buckets; DuckDB's ORDER
BY of a hash does not, with several threads and files. Cost: every row is read twice and written twice; memory of a few
buckets.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from relayrun.errors import InputError, on_interrupt, refuse_unwritable
from relayrun.leftovers import remove_leftovers
from relayrun.progress import Progress, count
from relayrun.publishing import MADE_RECORD, InputFiles, published_folder, work_folder
from relayrun.tokens.readers.columns import RowFile, inspect_files
from relayrun.tokens.readers.faults import LineFaults, describe_bad_lines
from relayrun.tokens.readers.inputs import data_endings
from relayrun.tokens.readers.inventory import find_data_files
from relayrun.tokens.shuffle.buckets import (
    Buckets,
    BucketSplitter,
    OutputFormat,
    RowSplit,
    ShuffleWriter,
    keyed_rows,
    scatter_rows,
)
from relayrun.tokens.stores import urls
from relayrun.tokens.tokenize.options import TokenizeOptions

log = logging.getLogger(__name__)

LOCAL_SETTINGS = {"output", "memory_limit", "temp_dir", "threads"}
"""Options that the bytes of the output do not depend on."""
_BASE = 200_000_000
"""Memory of the process itself, with Arrow."""

_THREAD = 30_000_000
"""Memory of a thread besides its rows: read buffers, and memory that the allocator keeps."""

_ENOUGH = 64_000_000
"""Bytes moved at a time, or of a bucket, even if more would fit: the kernel has to clear fresh memory."""

_SEGMENT = 256_000
"""Bytes of a segment, if memory allows: smaller segments cost more calls."""

_PAGES = 2
"""Pages that a reader holds: as stored, and decompressed."""

_LEAST = 32_000_000
"""Least memory for the rows of a thread: with less, rows move in small pieces."""

_GROUP_COPIES = 3
"""Copies of a row group in memory: as taken from its bucket, and encoded."""

_MOST_BUCKETS = 1 << 15

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ReshardOptions:
    """Options of a shuffle. Sizes are in bytes; `row_group_size` in rows.

    Parquet files keep all their columns, which must be equal in all files; of other files only `column` is kept.

    `file_size`: minimum of an output file, checked after every row group of the first file.
    `row_group_bytes`: of the text of a row group before compression, about; replaces `row_group_size`.
    `split_rows`: characters of a row, at most; longer texts are split, with an overlap of `split_overlap`.
    `on_error`: fail at, or skip and count, a line or row without a text in UTF-8.
    `memory_limit`: of a process; up to `threads` threads work at a time, as many as fit.
    """

    dataset_folder: str
    output: Path
    column: str = TokenizeOptions.default("column")
    seed: int = 0
    file_size: int = 500_000_000
    row_group_size: int = 4096
    row_group_bytes: int | None = None
    split_rows: int | None = None
    split_overlap: int = 0
    compression: str = "snappy"
    memory_limit: int = 4_000_000_000
    temp_dir: Path | None = None
    threads: int = 1
    on_error: Literal["fail", "skip-line"] = TokenizeOptions.default("on_error")

    @property
    def cut(self) -> RowSplit | None:
        """The split of long texts. Raises InputError for invalid lengths."""
        if self.split_rows is None:
            if self.split_overlap:
                raise InputError("is of rows that --split-rows cuts", where="--split-overlap")
            return None
        return RowSplit(size=self.split_rows, overlap=self.split_overlap)

    def group_rows(self, rows: int, text: int) -> int:
        """Return the rows of a row group if `rows` rows hold `text` bytes of text."""
        if self.row_group_bytes is None:
            return self.row_group_size
        return max(1, round(self.row_group_bytes * rows / max(text, 1)))


@dataclass(frozen=True, kw_only=True)
class ShufflePlan:
    """Division of the work. `parts`: runs of files [first, last) that are scattered side by side."""

    options: ReshardOptions
    files: tuple[RowFile, ...]
    read: InputFiles
    parts: tuple[tuple[int, int], ...]
    buckets: int

    def form(self, buckets: Buckets) -> OutputFormat:
        """Return the format of the output files."""
        options = self.options
        return OutputFormat(
            schema=self.files[0].schema,
            size=options.file_size,
            row_group_size=options.group_rows(int(buckets.counts.sum()), buckets.text_bytes),
            compression=options.compression,
        )

    @property
    def buffer(self) -> int:
        """Bytes that a thread of pass 1 splits at a time."""
        return min(self.readers().each // 4, max(_ENOUGH, self.buckets * _SEGMENT))

    def readers(self) -> ThreadShares:
        """Return the threads of pass 1. Raises InputError if not even one fits into memory."""
        return _shares(self.options, _THREAD + _PAGES * max(file.page for file in self.files), _LEAST)

    def writers(self, size: int, rows: int, text: int) -> ThreadShares:
        """Return the threads of pass 2. `size`, `text`: bytes of all rows, of texts. Raises as `readers`."""
        group = size / max(rows, 1) * min(self.options.group_rows(rows, text), rows)
        return _shares(self.options, _THREAD, max(_LEAST, int(2 * _GROUP_COPIES * group)))  # half of it for buckets


@dataclass(frozen=True)
class ThreadShares:
    """Number of threads that fit at a time, and the bytes that each may keep."""

    threads: int
    each: int


def _shares(options: ReshardOptions, fixed: int, least: int) -> ThreadShares:
    room = options.memory_limit - _BASE
    if (threads := min(options.threads, room // (fixed + least))) < 1:
        option = "--row-group-size" if options.row_group_bytes is None else "--row-group-mb"
        words = f"a thread that shuffles these rows takes at least {(_BASE + fixed + least) / 1e9:.2f} GB"
        hint = f"give more, or, where rows are long, make {option} smaller"
        raise InputError(words, where="--memory-limit", hint=hint)
    return ThreadShares(threads, room // threads - fixed)


@on_interrupt(lambda: "the same command begins again")
def reshard(options: ReshardOptions) -> int:
    """Write all rows, shuffled, to `output/data_{i}.parquet`, and return their number. The folder appears at once.
    Raises InputError if `output` exists, a file is torn or has other columns, or memory does not suffice."""
    remove_leftovers(options.temp_dir or tempfile.gettempdir(), shared=True)
    if (rows := rows_made(options, Path(os.path.realpath(options.output)))) is not None:
        return rows
    plan = make_shuffle_plan(options)
    with work_folder(options.temp_dir) as work, published_folder(options.output, read=plan.read) as building:
        with Progress("reading", sum(file.size for file in plan.files)):
            scatter_parts(plan, work)
        buckets = Buckets([part_stem(work, part) for part in range(len(plan.parts))], plan.files[0].schema)
        rows = int(buckets.counts.sum())
        buckets.split(plan.writers(buckets.size, rows, buckets.text_bytes).each // 3)
        with Progress("writing", rows, "rows"):
            of_a_file = write_first_file(plan, buckets, building)
            write_files(plan, buckets, range(1, -(-rows // of_a_file)), of_a_file, building)
    return rows


def data_files(options: ReshardOptions) -> tuple[list[tuple[str, int]], InputFiles]:
    """Return path and size of each file of the dataset, and everything that the rows of the output depend on."""
    root = urls.absolute_path(options.dataset_folder)
    found = find_data_files(root)
    chosen = {name: value for name, value in asdict(options).items() if name not in LOCAL_SETTINGS}
    chosen |= {"command": "dumps shuffle", "dataset_folder": root}
    return found, InputFiles((path for path, _ in found if not urls.is_url(path)), chosen)


def rows_made(options: ReshardOptions, output: Path) -> int | None:
    """Return the rows of an output that this command has made from these files before; None for any other."""
    known = not urls.is_url(urls.absolute_path(options.dataset_folder)) and (output / MADE_RECORD).exists()
    if not known or not data_files(options)[1].was_made(output):
        return None
    return sum(int(pq.read_metadata(path).num_rows) for path in output.glob("data_*.parquet"))


def make_shuffle_plan(options: ReshardOptions) -> ShufflePlan:
    """Inspect all files and plan the work. Raises InputError before anything is written."""
    for name in ("file_size", "row_group_size", "threads"):
        if getattr(options, name) < 1:
            raise InputError("must be at least 1", where=f"--{name.replace('_', '-')}")
    if options.row_group_bytes is not None and options.row_group_bytes < 1:
        raise InputError("must be above 0", where="--row-group-mb")
    cut = options.cut
    output = os.path.realpath(options.output)
    if os.path.lexists(options.output):
        raise InputError("the output exists", where=options.output, hint="move it away, or choose another folder")
    refuse_unwritable(options.output)
    folder = urls.absolute_path(options.dataset_folder)
    if not urls.is_url(folder) and Path(output).is_relative_to(os.path.realpath(folder)):
        raise InputError("the output would lie in the dataset folder, and join its files", where=options.output)
    found, read = data_files(options)
    if not found:
        raise InputError(f"no file below this folder ends in {data_endings()}", where=folder)
    files = inspect_files(found, options.column)
    if cut is not None:
        files = [replace(file, size=math.ceil(file.size * cut.growth)) for file in files]
        if options.column not in files[0].schema.names:
            raise InputError(f"the text {options.column!r} lies in a column of structs", where="--split-rows")
    size = sum(file.size for file in files)
    plan = ShufflePlan(options=options, files=tuple(files), read=read, parts=_parts(files, options.threads), buckets=1)
    plan.readers()
    rows, known = sum(file.rows or 0 for file in files), cut is None and all(file.rows is not None for file in files)
    writers = plan.writers(size, rows, size) if known else plan.writers(0, 0, 0)
    buckets = 1 + size * 5 // 4 // min(writers.each // 3, max(_ENOUGH, size // 1000))
    return replace(plan, buckets=min(_MOST_BUCKETS, buckets))


def _parts(files: Sequence[RowFile], count: int) -> tuple[tuple[int, int], ...]:
    ends = np.cumsum([file.size + 1 for file in files])
    bounds = np.searchsorted(ends, ends[-1] * np.arange(count + 1) / count, side="left")
    bounds[0], bounds[-1] = 0, len(files)
    return tuple(
        (first, last) for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True) if first < last
    )


def _keyed_part(plan: ShufflePlan, part: int) -> Iterator[pa.Table]:
    first, last = plan.parts[part]
    files = ((number, plan.files[number]) for number in range(first, last))
    faults = LineFaults(skip=plan.options.on_error == "skip-line")
    for rows in keyed_rows(files, plan.options.column, plan.options.seed, faults, plan.options.cut):
        count(rows.nbytes)
        yield rows
    if faults.counts:
        log.warning("left out: %s, the first is %s", describe_bad_lines(faults.counts), faults.examples[0])


def scatter_parts(plan: ShufflePlan, work: Path) -> None:
    """Run pass 1."""
    readers = plan.readers()

    def one(part: int) -> Iterator[None]:
        partition = BucketSplitter(plan.buckets, plan.buffer, plan.options.column)
        yield from scatter_rows(_keyed_part(plan, part), part_stem(work, part), partition)

    run_in_threads([one(part) for part in range(len(plan.parts))], readers.threads)
    pa.default_memory_pool().release_unused()  # pass 2 has buffers of other sizes


def part_stem(work: Path, part: int) -> Path:
    return work / f"part-{part}"


def write_first_file(plan: ShufflePlan, buckets: Buckets, building: Path) -> int:
    """Write file 0; return its number of rows, which all files but the last share."""
    if not buckets.counts.sum():
        raise InputError("the files hold no row", where=plan.options.dataset_folder)
    rows: list[int] = []
    for _ in ShuffleWriter(buckets, plan.form(buckets), building).write_first(rows):
        pass
    return rows[0]


def write_files(plan: ShufflePlan, buckets: Buckets, numbers: Sequence[int], rows: int, building: Path) -> None:
    """Run pass 2 for these files, in runs for the threads."""
    threads = plan.writers(buckets.size, int(buckets.counts.sum()), buckets.text_bytes).threads
    runs = [numbers[at * len(numbers) // threads : (at + 1) * len(numbers) // threads] for at in range(threads)]
    run_in_threads(
        [ShuffleWriter(buckets, plan.form(buckets), building).write(run, rows) for run in runs if run], threads
    )


def run_in_threads(works: Sequence[Iterator[None]], threads: int) -> None:
    """Exhaust all iterators, `threads` at a time. After an error or an interrupt the others end at their next step."""
    stop = threading.Event()

    def exhaust(work: Iterator[None]) -> None:
        try:
            for _ in work:
                if stop.is_set():
                    break
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(max(1, threads)) as pool:
        try:
            for future in [pool.submit(exhaust, work) for work in works]:
                future.result()
        except BaseException:
            stop.set()
            raise
