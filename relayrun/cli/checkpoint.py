"""`relayrun checkpoint`: whether a checkpoint still holds the bytes that were saved."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from relayrun.errors import InputError
from relayrun.rundir import lineage
from relayrun.rundir.find import find_run
from relayrun.training.checkpoint import checksums

_ITERATION = re.compile(r"(?P<name>.+):(?P<iteration>\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True)
    verify = actions.add_parser("verify", help="read a checkpoint back in full and compare every byte with its hash")
    verify.add_argument(
        "name",
        metavar="RUN[:N]",
        help="run directory, or project/name below logs/runs, and an iteration (default: the newest whole one); or the "
        "folder of a checkpoint",
    )
    verify.set_defaults(run=verify_checkpoint)


def verify_checkpoint(options: argparse.Namespace) -> int:
    """Say whether a checkpoint is clean, or what is wrong with it; the exit code is 0 or 1. Raises RelayrunError."""
    folder = _folder(options.name)
    commit = lineage.commit_of(folder)
    root = None if commit is None else commit.checksum
    if root is None and not (folder / checksums.INDEX).exists():
        raise InputError(
            "this checkpoint was saved without checksums: there is nothing to compare its bytes with",
            where=folder,
            hint="checkpoints have them that this version of relayrun saves or imports",
        )
    began = time.monotonic()
    size, faults = checksums.verify(folder, root)
    if faults:
        print(f"damaged: {folder}", *(f"  {fault}" for fault in faults), sep="\n")
        return 1
    vouched = "" if root is not None else "; no run vouches for its checksums.json"
    print(f"clean: {folder}: {size:,} bytes in {time.monotonic() - began:.1f} s{vouched}")
    return 0


def _folder(name: str) -> Path:
    """The checkpoint that somebody named. Raises InputError or RunDirError."""
    folder = Path(name).expanduser()
    if (folder / "metadata.json").is_file() or (folder / checksums.INDEX).is_file():
        return folder.absolute()
    match = _ITERATION.fullmatch(name)
    run = find_run(match["name"] if match else name)
    if match is None:
        newest = lineage.durable(run)
        if newest.path is None:
            raise InputError("this run has no checkpoint yet", where=run.path)
        return Path(newest.path)
    for commit in reversed(lineage.line(run)):
        if commit.iteration == int(match["iteration"]):
            return Path(commit.path)
    have = ", ".join(str(commit.iteration) for commit in lineage.line(run)) or "none"
    raise InputError(
        f"this run has no checkpoint of iteration {match['iteration']}", where=run.checkpoints, hint=f"it has: {have}"
    )
