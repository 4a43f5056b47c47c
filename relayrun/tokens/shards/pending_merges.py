"""Print the dumps of a dataset that are not merged yet: `python -m relayrun.tokens.shards.pending_merges DATASET`.

submit_merge.sh reads their names, a line each. All their shards are checked first, so that errors appear before a job
is queued.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from relayrun.errors import InputError, RelayrunError, combined_error, run_main
from relayrun.files import free_space
from relayrun.tokens.shards.merge import inspect_inputs
from relayrun.tokens.shards.prefixes import find_prefixes

log = logging.getLogger(__name__)


def merged_prefix(dataset: Path, dump: str) -> Path:
    """Return the prefix of the merged shard of a dump."""
    return dataset.with_name(f"{dataset.name}-merge") / f"{dump}-merged"


def unmerged_dumps(dataset: Path) -> list[str]:
    """Return the names of the dumps that are not merged yet.

    Raises RelayrunError for torn shards, for different tokenizers or token types, and for lack of space.
    """
    dumps = sorted(path.name for path in dataset.glob("dump-*") if path.is_dir())
    if not dumps:
        hint = "give the folder that holds dump-0, dump-1, ..."
        raise InputError("there is no dump in this folder", where=dataset, hint=hint)
    names: list[str] = []
    errors: list[RelayrunError] = []
    size = 0
    for name in dumps:
        output = merged_prefix(dataset, name)
        if output.with_name(f"{output.name}.idx").exists():
            log.info("%s: merged already", name)
            continue
        names.append(name)
        try:
            size += inspect_inputs(find_prefixes([dataset / name], listed=True), output).bytes
        except InputError as error:
            errors.append(error)
    if errors:
        raise combined_error(errors, "dumps cannot be merged")
    if names and (free := free_space(merged_prefix(dataset, names[0]))) < size:
        raise InputError(
            f"the merged shards take {size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free",
            where=merged_prefix(dataset, names[0]).parent,
            hint="make room; or make that folder a link to one on another file system",
        )
    return names


def print_unmerged_dumps(dataset: str) -> int:
    """Print the names, a line each."""
    for name in unmerged_dumps(Path(os.path.abspath(dataset))):
        print(name)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: print_unmerged_dumps(sys.argv[1])))
