"""Input files of a data set: their formats, and paths files.

`FORMATS` alone lists the formats. The suffix of a name gives the format, in any case of letters. A line of a paths file
is a path, taken literally: blanks, quotes and undecodable bytes included (`os.fsencode`); only a newline ends it. This
module does not import Arrow.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from relayrun.errors import InputError, RelayrunError, combined_error, did_you_mean_path
from relayrun.progress import Progress, count
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import MissingInput, printable


@dataclass(frozen=True, kw_only=True)
class FileFormat:
    """A format of data files."""

    name: str
    """Name in messages, and as `data.mixture.NAME.source` if `relayrun.config.sections.data.SourceKind` lists it."""
    suffixes: tuple[str, ...]
    reader: str
    """`module:function` with the arguments of `arrow_files.read_parquet`, imported when a file is opened."""
    by_line: bool = False
    """The reader shows every row to `LineFaults.look`, by which a stream filters rows."""


_TEXT_READERS = "relayrun.tokens.readers.json_csv"
PARQUET = FileFormat(name="parquet", suffixes=(".parquet",), reader="relayrun.tokens.readers.arrow_files:read_parquet")
JSON_LINES = FileFormat(
    name="jsonl",
    suffixes=(".jsonl", ".jsonl.gz", ".jsonl.zst", ".json", ".json.gz", ".json.zst"),
    reader=f"{_TEXT_READERS}:read_jsonl",
    by_line=True,
)
CSV = FileFormat(name="csv", suffixes=(".csv", ".csv.gz"), reader=f"{_TEXT_READERS}:read_csv")
ARROW = FileFormat(name="arrow", suffixes=(".arrow",), reader="relayrun.tokens.readers.arrow_files:read_arrow")
FORMATS = {each.name: each for each in (PARQUET, JSON_LINES, CSV, ARROW)}
"""All formats by name. A new format is an entry here and its reader; for streams, also a value of `SourceKind`."""

METADATA_FILE_NAMES = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that Hugging Face's datasets writes beside its data; they hold no documents."""


def data_suffixes() -> tuple[str, ...]:
    return tuple(suffix for each in FORMATS.values() for suffix in each.suffixes)


def file_format(path: str) -> FileFormat:
    """Return the format of a file by its suffix; JSON lines for any other name."""
    return next((each for each in FORMATS.values() if path.lower().endswith(each.suffixes)), JSON_LINES)


InputFile = tuple[str, int, int]
"""Path below the data set folder, bytes, and modification time in ns."""

MISSING_FILE = (0, -1)
"""Bytes and modification time of a missing file."""


def read_paths_file(path: str | os.PathLike[str]) -> list[str]:
    """Return the paths of a paths file in its order, without empty lines. Raises InputError for a missing file, an
    absolute path, a path given twice, or a file without paths."""
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
    """Return size and modification time of `names` below `dataset`, a folder or a URL (see `urls.stat_url`). Raises
    InputError that names the missing files. With `missing_ok`, missing files have the size and time `MISSING_FILE`."""
    if not urls.is_url(dataset) and not os.path.isdir(dataset):
        raise InputError("there is no such dataset folder", where=dataset, hint=did_you_mean_path(dataset) or None)
    inputs: list[InputFile] = []
    missing: list[RelayrunError] = []
    for name in names:
        try:
            inputs.append((name, *urls.stat_file(urls.join_path(os.fspath(dataset), name))))
        except MissingInput as error:
            missing.append(error)
            inputs.append((name, *MISSING_FILE))
    if missing and not missing_ok:
        raise combined_error(missing, f"of {len(names):,} files are missing")
    return inputs


def paths_file_bytes(names: Iterable[str]) -> bytes:
    """Return the content of a paths file. Raises InputError for a name that holds a newline."""
    lines = []
    for name in names:
        if "\n" in name:
            hint = "rename the file, or leave it out with --filter-out"
            raise InputError("a file name with a newline cannot stand in a paths file", where=repr(name), hint=hint)
        lines.append(os.fsencode(name) + b"\n")
    return b"".join(lines)


@dataclass(frozen=True, kw_only=True)
class DataFile:
    """A file of the data set: its path below the data set folder, bytes, and identity."""

    path: str
    size: int
    identity: tuple[int, int] | str
    """Device and inode: equal for two paths to one file. Below a URL: the path."""


def find_data_files(
    folder: str | os.PathLike[str], *, filter_in: Sequence[str] = (), filter_out: Sequence[str] = ()
) -> list[DataFile]:
    """Return all data files below `folder`, local or a URL that fsspec knows, ordered by path. A file is kept if its
    path below `folder` (links not resolved, case-sensitive) contains any of `filter_in`, if given, and none of
    `filter_out`. Links in a local folder are followed, except to a parent folder. Raises InputError if the folder is
    missing or cannot be listed, or a link to a data file is broken. Names that begin with `.` hold no data."""
    suffixes = data_suffixes()

    def is_wanted(path: str) -> bool:
        count(1)
        name = path.lower()
        return (
            name.endswith(suffixes)
            and name.rsplit("/", 1)[-1] not in METADATA_FILE_NAMES
            and not any(part.startswith(".") for part in name.split("/"))
            and (not filter_in or any(text in path for text in filter_in))
            and not any(text in path for text in filter_out)
        )

    place = urls.absolute_path(folder)
    find = _find_below_url if urls.is_url(place) else _find_locally
    with Progress("finding files", None, "files"):
        return sorted(find(place, is_wanted), key=lambda file: os.fsencode(file.path))


def _find_below_url(url: str, is_wanted: Callable[[str], bool]) -> list[DataFile]:
    found = [DataFile(path=path, size=size, identity=path) for path, size in urls.list_url(url) if is_wanted(path)]
    for file in found:
        if "::" in file.path:
            hint = "rename the file, or leave it out with --filter-out"
            raise InputError("fsspec cannot open a name with `::`", where=urls.join_path(url, file.path), hint=hint)
    return found


def _find_locally(folder: str, is_wanted: Callable[[str], bool]) -> list[DataFile]:
    if not os.path.isdir(folder):
        hint = did_you_mean_path(folder) or "give the folder that holds the files of text, or a URL"
        raise InputError("there is no such dataset folder", where=folder, hint=hint)
    dead: list[InputError] = []
    found: list[DataFile] = []
    top = os.stat(folder)
    stack = [("", frozenset({(top.st_dev, top.st_ino)}))]
    while stack:
        relative, ancestors = stack.pop()
        with os.scandir(os.path.join(folder, relative)) as entries:
            for entry in entries:
                path = os.path.join(relative, entry.name)
                wanted = is_wanted(path)
                try:
                    status = entry.stat()
                except OSError as error:
                    if not wanted:
                        continue
                    if entry.is_symlink():
                        what, hint = f"this link leads nowhere ({error.strerror})", "mend or remove it, or --filter-out"
                        dead.append(InputError(what, where=printable(entry.path), hint=hint))
                        continue
                    raise
                identity = (status.st_dev, status.st_ino)
                if stat.S_ISDIR(status.st_mode):
                    if identity not in ancestors:
                        stack.append((path, ancestors | {identity}))
                elif wanted and stat.S_ISREG(status.st_mode):
                    found.append(DataFile(path=path, size=status.st_size, identity=identity))
    if dead:
        raise combined_error(sorted(dead, key=str), "links lead nowhere")
    return found
