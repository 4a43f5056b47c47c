"""The files of a dataset that are read: a paths file, and what stands at its paths.

A paths file is taken literally: a line is a path, blanks, quotes and undecodable bytes included
(`os.fsencode`), and only a newline ends it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from relayrun.errors import InputError, RelayrunError, combined_error, did_you_mean_path
from relayrun.tokens.stores import stores
from relayrun.tokens.stores.stores import MissingInput, printable

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

    `dataset` may be a URL, see `stores.stat`. Raises InputError naming the files that are missing, unless `missing_ok`:
    then they have the size and time `MISSING`.
    """
    if not stores.is_url(dataset) and not os.path.isdir(dataset):
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
    if stores.is_url(dataset):
        return stores.stat_url(stores.join_path(dataset, name))
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
