"""Input files of a data set: their formats by name, paths files, and lines that cannot be read.

A format is known by the suffix of a name, in any case of letters. A paths file is taken literally: a line is a path,
blanks, quotes and undecodable bytes included (`os.fsencode`), and only a newline ends it. The first bad line or row is
an error that names it, or all are counted by reason (`LineFaults`). This module imports no Arrow.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from relayrun.errors import InputError, RelayrunError, combined_error, did_you_mean_path
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import MissingInput, printable

MAX_EXAMPLES = 5
"""Lines that are named, of those that were left out."""


def describe_bad_lines(counts: Mapping[str, int]) -> str:
    """How many lines were left out, for a message: `3 lines (2 not UTF-8, 1 not JSON)`."""
    total = sum(counts.values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items(), key=lambda each: -each[1]))
    return f"{total:,} line{'s' if total != 1 else ''} ({reasons})"


class BadLine(Exception):
    """A line has no text: a `reason` of few words, which is counted, and the whole `message`."""

    def __init__(self, reason: str, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.reason, self.message, self.hint = reason, message, hint


class LineFaults:
    """What becomes of bad lines and rows."""

    def __init__(self, *, skip: bool = False, keep: bool = False) -> None:
        """`skip`: leave them out and count them; else the first one is an InputError.

        `keep`: a row without a text stays in the place of each, so that rows keep their numbers; see `take_marks`.
        """
        self._skip = skip
        self.keep = keep
        self._marks: list[tuple[int, str]] = []
        self.counts: dict[str, int] = {}
        """Lines that were left out, by reason."""
        self.examples: list[str] = []
        """The first of them, each with its place."""

    def add(self, bad: BadLine, where: str) -> None:
        """Count the line at `where` as left out. Raises InputError naming it where none may be left out."""
        error = InputError(printable(bad.message), where=printable(where), hint=bad.hint)
        if not self._skip:
            raise error from None
        self.counts[bad.reason] = self.counts.get(bad.reason, 0) + 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{error.where}: {error.message}")

    def look(self, row: Mapping[str, Any], long: Mapping[str, Any]) -> None:
        """Look at the object of a line before its text is taken; raise BadLine to leave it out.

        `long`: the long strings of the line, which have names in their place (`jsonlines`).
        """

    def mark(self, row: int, reason: str) -> None:
        """Remember why row number `row` of the array that is read has no text."""
        self._marks.append((row, reason))

    def take_marks(self) -> list[tuple[int, str]]:
        """Return the rows of the array that was read last that were kept without a text, and why; forget them."""
        marks, self._marks = self._marks, []
        return marks


DATA_SUFFIXES = (
    ".parquet",
    ".jsonl",
    ".jsonl.gz",
    ".jsonl.zst",
    ".json",
    ".json.gz",
    ".json.zst",
    ".csv",
    ".csv.gz",
    ".arrow",
)
"""The endings of the files of a dataset."""

METADATA_FILE_NAMES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Names of files that Hugging Face's datasets puts beside its data; they hold no documents."""

FileKind = Literal["parquet", "arrow", "csv", "json lines"]


def is_data_file(path: str) -> bool:
    """Whether a file of a dataset's folder is read."""
    name = path.lower()
    return name.endswith(DATA_SUFFIXES) and name.rsplit("/", 1)[-1] not in METADATA_FILE_NAMES


def file_kind(path: str) -> FileKind:
    """How a file is read; one of another name is taken for JSON lines."""
    name = path.lower()
    if name.endswith(".parquet"):
        return "parquet"
    if name.endswith(".arrow"):
        return "arrow"
    return "csv" if name.removesuffix(".gz").endswith(".csv") else "json lines"


def file_compression(path: str) -> Literal["gzip", "zstd"] | None:
    """How the bytes of a file of text are compressed."""
    name = path.lower()
    return "gzip" if name.endswith(".gz") else "zstd" if name.endswith(".zst") else None


InputFile = tuple[str, int, int]
"""Path below the dataset folder, bytes, time of change in ns."""

MISSING_FILE = (0, -1)
"""Bytes and time of change of a file that is not there."""


def read_paths_file(path: str | os.PathLike[str]) -> list[str]:
    """The paths of a paths file, in its order. Empty lines name no file and are skipped.

    Raises InputError for a missing file, an absolute path, a path given twice, or no path at all.
    """
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise InputError("there is no such paths file", where=path, hint="prepare_dumps.py writes them") from None
    names: dict[str, None] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        name = os.fsdecode(line)
        where = f"{path}:{number}"
        if b"\0" in line or os.path.isabs(name):
            hint = "write it from the dataset folder on"
            raise InputError("a paths file holds paths below the dataset folder, one a line", where=where, hint=hint)
        if name in names:
            raise InputError(
                f"this path is listed twice: {printable(name)}", where=where, hint="remove one of the lines"
            )
        names[name] = None
    if not names:
        raise InputError("the paths file lists no file", where=path, hint="prepare_dumps.py writes them")
    return list(names)


def stat_inputs(dataset: str | os.PathLike[str], names: list[str], *, missing_ok: bool = False) -> list[InputFile]:
    """Size and time of change of `names` below `dataset`.

    `dataset` may be a URL, see `urls.stat_url`. Raises InputError naming the files that are missing, unless
    `missing_ok`: then they have the size and time `MISSING_FILE`.
    """
    if not urls.is_url(dataset) and not os.path.isdir(dataset):
        raise InputError("there is no such dataset folder", where=dataset, hint=did_you_mean_path(dataset) or None)
    inputs: list[InputFile] = []
    missing: list[RelayrunError] = []
    for name in names:
        try:
            inputs.append((name, *_stat_input(os.fspath(dataset), name)))
        except MissingInput as error:
            missing.append(error)
            inputs.append((name, *MISSING_FILE))
    if missing and not missing_ok:
        raise combined_error(missing, f"of {len(names):,} files are missing")
    return inputs


def _stat_input(dataset: str, name: str) -> tuple[int, int]:
    if urls.is_url(dataset):
        return urls.stat_url(urls.join_path(dataset, name))
    try:
        status = os.stat(os.path.join(dataset, name))
    except (FileNotFoundError, NotADirectoryError):
        raise MissingInput(
            "this file of the paths file is missing",
            where=printable(os.path.join(dataset, name)),
            hint="run prepare_dumps.py again if the dataset has changed",
        ) from None
    return status.st_size, status.st_mtime_ns


def paths_file_bytes(names: Iterable[str]) -> bytes:
    """The content of a paths file. Raises InputError for a name that holds a newline."""
    lines = []
    for name in names:
        if "\n" in name:
            raise InputError(
                "a file name with a newline cannot stand in a paths file",
                where=repr(name),
                hint="rename the file, or leave it out with --filter-out",
            )
        lines.append(os.fsencode(name) + b"\n")
    return b"".join(lines)
