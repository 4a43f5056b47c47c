"""Which files are read, known by the end of their names, in any case of letters."""

from __future__ import annotations

from typing import Literal

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
