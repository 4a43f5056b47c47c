"""`relayrun checkpoint`: whether a checkpoint still holds the bytes that were saved."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from relayrun.errors import InputError
from relayrun.rundir import lineage
from relayrun.rundir.find import find_run, split_iteration
from relayrun.rundir.quarantine import LeftBehind, left_behind
from relayrun.training.checkpoint import checksums


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
    folder, torn = _folder(options.name)
    for left in torn:
        print(f"damaged: {left.path}: {left.why}")
    commit = lineage.commit_of(folder)
    root = None if commit is None else commit.checksum
    if root is None and not (folder / checksums.INDEX).exists():
        raise InputError(
            "this checkpoint was saved without checksums: there is nothing to compare its bytes with",
            where=folder,
            hint="checkpoints have them that this version of relayrun saves or imports",
        )
    began, before = time.monotonic(), _identity(folder)
    size, faults = checksums.verify(folder, root)
    if before is None or _identity(folder) != before:
        raise InputError(
            "this checkpoint was removed or moved while it was read",
            where=folder,
            hint="a run removes its oldest ones (checkpoint.keep_last) and moves damaged ones: verify another one",
        )
    if faults:
        print(f"damaged: {folder}", *(f"  {fault}" for fault in faults), sep="\n")
        return 1
    vouched = "" if root is not None else "; no run vouches for its checksums.json"
    print(f"clean: {folder}: {size:,} bytes in {time.monotonic() - began:.1f} s{vouched}")
    return 1 if torn else 0


def _identity(folder: Path) -> tuple[int, int] | None:
    """Which folder stands under this name; None: there is none."""
    try:
        found = folder.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _folder(name: str) -> tuple[Path, list[LeftBehind]]:
    """The checkpoint that somebody named, and newer ones that are not whole. Raises InputError or RunDirError."""
    folder = Path(name).expanduser()
    if (folder / "metadata.json").is_file() or (folder / checksums.INDEX).is_file():
        return folder.absolute(), []
    named, iteration = split_iteration(name)
    run = find_run(named)
    line = lineage.Lineage(run)
    if iteration is None:
        newest = line.durable()
        if newest.path is None:
            raise InputError("this run has no checkpoint yet", where=run.path)
        beyond = left_behind(run, line, newest)
        return Path(newest.path), [left for left in beyond if not left.quarantined and Path(left.path).is_dir()]
    commits = line.line()
    have = ", ".join(str(commit.iteration) for commit in commits if Path(commit.path).is_dir()) or "none"
    for commit in commits:
        if commit.iteration == iteration:
            if Path(commit.path).is_dir():
                return Path(commit.path), []
            raise InputError(
                f"the checkpoint of iteration {commit.iteration} is not there any more",
                where=commit.path,
                hint=f"it has: {have}; `relayrun status` tells what lies in quarantine",
            )
    raise InputError(
        f"this run has no checkpoint of iteration {iteration}", where=run.checkpoints, hint=f"it has: {have}"
    )
