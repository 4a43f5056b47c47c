"""Input files of a data set: their formats, and paths files.

`FORMATS` alone lists the formats. The suffix of a name gives the format, in any case of letters. A line of a paths file
is a path, taken literally: blanks, quotes and undecodable bytes included (`os.fsencode`); only a newline ends it. This
module does not import Arrow.
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from relayrun.errors import InputError, RelayrunError, combined_error, did_you_mean_path
from relayrun.progress import Progress, count
from relayrun.tokens.readers.contents import COMPRESSIONS, HEAD_BYTES, TAR_ARCHIVE, content_fault, file_compression
from relayrun.tokens.readers.file_ranges import file_of_range, range_bytes
from relayrun.tokens.readers.published import FILTERED_OUT, JSON_ENDINGS, listed_splits, live_files, why_left_out
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
_MEMBER_READERS = "relayrun.tokens.readers.text_files"
_ARROW_READERS = "relayrun.tokens.readers.arrow_files"


def _compressed(*endings: str) -> tuple[str, ...]:
    return tuple(ending + compression for compression in ("", *COMPRESSIONS) for ending in endings)


PARQUET = FileFormat(name="parquet", suffixes=(".parquet", ".pq"), reader=f"{_ARROW_READERS}:read_parquet")
JSON_LINES = FileFormat(
    name="jsonl", suffixes=_compressed(*JSON_ENDINGS), reader=f"{_TEXT_READERS}:read_jsonl", by_line=True
)
CSV = FileFormat(name="csv", suffixes=_compressed(".csv", ".tsv"), reader=f"{_TEXT_READERS}:read_csv")
ARROW = FileFormat(name="arrow", suffixes=(".arrow", ".feather"), reader=f"{_ARROW_READERS}:read_arrow")
TEXT = FileFormat(name="txt", suffixes=_compressed(".txt"), reader=f"{_MEMBER_READERS}:read_text")
TAR = FileFormat(name="tar", suffixes=(*_compressed(".tar"), ".tgz"), reader=f"{_MEMBER_READERS}:read_tar")
FORMATS = {each.name: each for each in (PARQUET, JSON_LINES, CSV, ARROW, TEXT, TAR)}
"""All formats by name. A new format is an entry here and its reader; for streams, also a value of `SourceKind`."""

_MODEL_FILE_NAMES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "trainer_state.json")
_MODEL_ENDINGS = (".safetensors", ".pt", ".pth", ".ckpt", ".gguf", ".distcp", ".model", "pytorch_model.bin")


def data_suffixes() -> tuple[str, ...]:
    return tuple(suffix for each in FORMATS.values() for suffix in each.suffixes)


def data_endings() -> str:
    """Return the endings of data files for a message, the compressed ones in short."""
    plain = [suffix for suffix in data_suffixes() if file_compression(suffix) is None]
    return f"{', '.join(plain)}; all but columns also with {', '.join(COMPRESSIONS)}"


def expected_content(path: str) -> str | None:
    """Return the content that a name promises (see `contents`); None for text."""
    return file_compression(path) or {PARQUET: "parquet", ARROW: "Arrow", TAR: TAR_ARCHIVE}.get(file_format(path))


def file_format(path: str) -> FileFormat:
    """Return the format of a file by its suffix; JSON lines for any other name."""
    return next((each for each in FORMATS.values() if path.lower().endswith(each.suffixes)), JSON_LINES)


InputFile = tuple[str, int, int]
"""Path below the data set folder, of a file or of a range of it, bytes, and the file's modification time in ns."""

MISSING_FILE = (0, -1)
"""Bytes and modification time of a missing file."""


def read_paths_file(path: str | os.PathLike[str]) -> list[str]:
    """Return the paths of a paths file in its order, without empty lines. Raises InputError for a missing file, an
    absolute path, a path given twice, or a file without paths."""
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        hint = "`relayrun dumps prepare` writes them"
        raise InputError("there is no such paths file", where=path, hint=hint) from None
    names: dict[str, str] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        name = os.fsdecode(line)
        where = f"{path}:{number}"
        if b"\0" in line or os.path.isabs(name):
            hint = "write it from the dataset folder on"
            raise InputError("a paths file holds paths below the dataset folder, one a line", where=where, hint=hint)
        if (file := file_of_range(name)) in names:
            words = f"this path is listed twice: {printable(file)}"
            raise InputError(words, where=where, hint="remove one of the lines")
        names[file] = name
    if not names:
        raise InputError("the paths file lists no file", where=path, hint="`relayrun dumps prepare` writes them")
    return list(names.values())


def stat_inputs(dataset: str | os.PathLike[str], names: list[str], *, missing_ok: bool = False) -> list[InputFile]:
    """Return size and modification time of `names` below `dataset`, a folder or a URL (see `urls.stat_url`). Raises
    InputError that names the missing files. With `missing_ok`, missing files have the size and time `MISSING_FILE`."""
    if not urls.is_url(dataset) and not os.path.isdir(dataset):
        next(_list_local_files(os.fspath(dataset)))  # raises: it is a file, or missing
    inputs: list[InputFile] = []
    missing: list[RelayrunError] = []
    folder = urls.join_path(os.fspath(dataset), "")
    for name in names:
        try:
            size, changed = urls.stat_file(folder + file_of_range(name))
            inputs.append((name, range_bytes(name, size), changed))
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
    """A file of the data set, or a range of it: its path below the data set folder, and bytes."""

    path: str
    size: int
    why: str = ""
    """Why it is left out; empty if it is taken."""
    fault: InputError | None = None
    """The error of a file that is refused: it has to be mended or filtered out."""


@dataclass(frozen=True)
class Inventory:
    """All files below a data set folder, taken or left out, each ordered by path."""

    taken: tuple[DataFile, ...]
    left_out: tuple[DataFile, ...]

    @property
    def notes(self) -> set[str]:
        """Paths of the files that are left out and not by a filter: what others wrote beside the data."""
        return {file.path for file in self.left_out if file.why != FILTERED_OUT}

    def leave_out(self, files: Iterable[DataFile]) -> Inventory:
        """Return the inventory with these files left out; the first reason for a file counts."""
        left = {file.path: file for file in reversed([*files])}
        taken = tuple(file for file in self.taken if file.path not in left)
        return Inventory(taken, tuple(sorted((*self.left_out, *left.values()), key=by_path)))

    def refuse(self, *, dead_links_only: bool = False) -> None:
        """Raise InputError that names the refused files, if any."""
        whys = {DEAD_LINK} if dead_links_only else {file.why for file in self.left_out if file.fault}
        if faults := [file.fault for file in self.left_out if file.fault and file.why in whys]:
            raise combined_error(faults, "links lead nowhere" if whys == {DEAD_LINK} else "files are refused")


DEAD_LINK = "link that leads nowhere"
_HEADS_AT_A_TIME = 16
"""Files whose first bytes are read in parallel; the file system dominates the time."""


def _metadata_beside(place: str, taken: Sequence[DataFile], left: Sequence[DataFile]) -> set[str]:
    """Return the paths of taken files that are no data because of the files beside them: JSON of a model or tokenizer,
    or among logs of datatrove, and lists of files."""
    names = {file.path: os.path.split(file.path) for file in taken}
    others = [os.path.split(file.path) for file in left if file.why != FILTERED_OUT]
    folders = {folder for folder, name in others if name.lower().endswith(_MODEL_ENDINGS)}
    folders |= {folder for folder, name in names.values() if name in _MODEL_FILE_NAMES}
    logs = [folder for folder, name in others if name == "executor.json"]
    folders.update(logs, (os.path.join(folder, "stats") for folder in logs))
    found = {path for path, (folder, name) in names.items() if folder in folders and name.lower().endswith(".json")}
    there = {*names, *(file.path for file in left)}  # filtered files, too: their list stays a list
    return found | {by for _, by in listed_splits(place, there, names).values()}


def take_inventory(
    folder: str | os.PathLike[str],
    *,
    filter_in: Sequence[str] = (),
    filter_out: Sequence[str] = (),
    names: Sequence[str] | None = None,
    endings: Sequence[str] = (),
) -> Inventory:
    """Return all files below `folder`, local or a URL that fsspec knows, or only local `names` there: the data files,
    and the others with the reason. A file is kept if its path below `folder` (links not resolved, case-sensitive)
    contains any of `filter_in`, if given, and none of `filter_out`. `endings`: in place of the known ones. Links in a
    local folder are followed, except to a parent folder. The first bytes of local files are compared with their names;
    below a URL the reader does that. Raises InputError if the folder is missing or cannot be listed."""
    place, suffixes = urls.absolute_path(folder), tuple(map(str.lower, endings)) or data_suffixes()
    taken: list[DataFile] = []
    left: list[DataFile] = []
    with Progress("finding files", None, "files"):
        for file in _list_files(place, names):
            count(1)
            if by_name := why_left_out(file.path, suffixes, filter_in, filter_out):
                file = DataFile(path=file.path, size=file.size, why=by_name)
            elif not (file.why or file.size or expected_content(file.path)):
                file = replace(file, why="empty")
            (left if file.why else taken).append(file)
    there = Inventory(tuple(sorted(taken, key=by_path)), tuple(left))
    metadata = _metadata_beside(place, taken, left)
    there = there.leave_out(replace(file, why="metadata") for file in taken if file.path in metadata)
    with ThreadPoolExecutor(_HEADS_AT_A_TIME) as pool:
        faults = zip(there.taken, pool.map(functools.partial(_content_fault, place), there.taken), strict=True)
    why = "other content than its name"
    there = there.leave_out(replace(file, why=why, fault=bad) for file, bad in faults if bad)
    return there if urls.is_url(place) else there.leave_out(_by_live_lists(place, there))


def _by_live_lists(place: str, inventory: Inventory) -> list[DataFile]:
    """Return the taken files to leave out: those that the list above them does not name, which are of an earlier set
    or a cache. Its missing files are refused, and the files of tables."""
    left: list[DataFile] = []
    lists = live_files(place, inventory.notes)
    for path in sorted(path for live in lists.values() for path in live or ()):
        if not os.path.lexists(os.path.join(place, path)):
            hint = "fetch the data set again, or leave it out with --filter-out"
            fault = InputError("a list beside it names this file, which is missing", where=f"{place}/{path}", hint=hint)
            left.append(DataFile(path=path, size=0, why="missing", fault=fault))
    for file in inventory.taken:
        folder = os.path.dirname(file.path)
        while folder and folder not in lists:
            folder = os.path.dirname(folder)
        if (live := lists.get(folder, set())) is None:
            words = "part of a table of Delta Lake, Hudi or Iceberg, which may keep removed rows"
            hint = "export the live rows, or take all with --filter-out _delta_log, .hoodie or .avro"
            fault = InputError(words, where=f"{place}/{file.path}", hint=hint)
            left.append(replace(file, why="part of a table", fault=fault))
        elif live and file.path not in live and file.path.endswith(os.path.splitext(next(iter(live)))[1]):
            left.append(replace(file, why="not in the list of live files"))
    return left


def by_path(file: DataFile) -> bytes:
    return os.fsencode(file.path)


def _content_fault(place: str, file: DataFile) -> InputError | None:
    """Return the fault of a local file by its first bytes; below a URL, by its name."""
    path = urls.join_path(place, file.path)
    if urls.is_url(place):
        hint = "rename the file, or leave it out with --filter-out"
        return InputError("fsspec cannot open a name with `::`", where=path, hint=hint) if "::" in file.path else None
    return content_fault_now(path)


def content_fault_now(path: str) -> InputError | None:
    """Return the fault of a file by its first bytes; None if it cannot be read, which its reader explains."""
    with contextlib.suppress(OSError, RelayrunError):
        if urls.is_url(path) or os.path.isfile(path):  # a pipe can be read only once
            with urls.open_input(path) as raw:
                return content_fault(path, raw.read(HEAD_BYTES), expected_content(path))
    return None


def _list_files(place: str, names: Sequence[str] | None) -> Iterator[DataFile]:
    if urls.is_url(place):
        return (DataFile(path=path, size=size) for path, size in urls.list_url(place))
    if names is None:
        return _list_local_files(place)
    return (DataFile(path=name, size=os.stat(os.path.join(place, name)).st_size) for name in names)


def _list_local_files(folder: str) -> Iterator[DataFile]:
    if not os.path.isdir(folder):
        is_file = os.path.isfile(folder)
        hint = (not is_file and did_you_mean_path(folder)) or "give the folder that holds the files of text, or a URL"
        what = "this is a file, not a" if is_file else "there is no such"
        raise InputError(f"{what} dataset folder", where=folder, hint=hint)
    top = os.stat(folder)
    stack = [("", frozenset({(top.st_dev, top.st_ino)}))]
    while stack:
        relative, ancestors = stack.pop()
        with os.scandir(os.path.join(folder, relative)) as entries:
            for entry in entries:
                path = os.path.join(relative, entry.name)
                try:
                    status = entry.stat()
                except OSError as error:
                    what = "this link leads nowhere" if entry.is_symlink() else "this file cannot be looked at"
                    what, hint = f"{what} ({error.strerror})", "mend or remove it, or --filter-out"
                    fault = InputError(what, where=printable(entry.path), hint=hint)
                    yield DataFile(path=path, size=0, why=DEAD_LINK, fault=fault)
                    continue
                if not stat.S_ISDIR(status.st_mode):
                    why = "" if stat.S_ISREG(status.st_mode) else "no regular file"
                    yield DataFile(path=path, size=status.st_size, why=why)
                elif (identity := (status.st_dev, status.st_ino)) not in ancestors:
                    stack.append((path, ancestors | {identity}))
