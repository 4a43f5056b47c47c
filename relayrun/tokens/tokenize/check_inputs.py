"""A look at the files of dumps before jobs are queued: whether they can be opened, and have the column of the text."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from relayrun.errors import InputError, RelayrunError, combined_error
from relayrun.tokens.readers.columns import check_column
from relayrun.tokens.readers.inputs import read_paths_file
from relayrun.tokens.stores.urls import is_url, join_path
from relayrun.tokens.tokenize.dumps import MetadataFolder
from relayrun.tokens.tokenize.options import TokenizeOptions

log = logging.getLogger(__name__)

MAX_FILES = 256
"""Files that are looked at, evenly chosen; of a dataset in a store, which may be slow or closed from here, a few."""
MAX_REMOTE_FILES = 8
THREADS = 8


def check_dump_inputs(metadata: MetadataFolder, indices: Sequence[int], options: TokenizeOptions) -> None:
    """Raise InputError naming the files of these dumps that have no such column, or cannot be opened.

    What the options skip is no error; see `check_files`.
    """
    dataset = metadata.dataset()
    names = [name for index in indices for name in read_paths_file(metadata.paths_file(index))]
    paths = [join_path(dataset, name) for name in names]
    check_files(paths, options.column, skip_lines=options.skips_lines, skip_files=options.skips_files)


def check_files(
    paths: Sequence[str],
    column: str,
    *,
    skip_lines: bool,
    skip_files: bool = False,
    what: str = "files cannot be tokenized",
) -> None:
    """Raise InputError, which begins with `what`, naming the files that have no such column, or cannot be opened.

    The beginning of each file is read, or its schema. With `skip_files` only a column that no file has is an error,
    with `skip_lines` only a file without a good line. A store that cannot be read from here is a warning.
    """
    if not paths:
        return
    remote = is_url(paths[0])
    chosen = paths[:: -(-len(paths) // (MAX_REMOTE_FILES if remote else MAX_FILES))]
    with ThreadPoolExecutor(THREADS) as pool:
        found = list(pool.map(lambda path: _file_fault(path, column, skip_lines=skip_lines), chosen))
    faults: list[RelayrunError] = [fault for fault in found if fault is not None]
    if not faults or (skip_files and len(faults) < len(chosen)):
        return
    every = f" (looked at {len(chosen):,} of {len(paths):,})" if len(chosen) < len(paths) else ""
    error = combined_error(faults, f"{what}{every}")
    if remote and not any("no column" in fault.message for fault in faults):
        log.warning("%s", error)
        return
    raise error


def _file_fault(path: str, column: str, *, skip_lines: bool) -> InputError | None:
    if not is_url(path) and os.path.exists(path) and not os.path.isfile(path):
        return None  # a pipe can be read once alone
    try:
        check_column(path, column, skip_lines=skip_lines)
    except InputError as error:
        return error
    return None
