"""`relayrun checkpoint`: commit and verify the bytes of a checkpoint, mirror checkpoints, and restore copies."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path

from relayrun import checkpoints
from relayrun.cli import add_run
from relayrun.config.compose.writable import check_outputs
from relayrun.control.rundir import checkpoint_records
from relayrun.control.rundir.checkpoint_records import BrokenCheckpoint, newer_broken_checkpoints
from relayrun.control.rundir.find_runs import find_run, split_run_and_iteration
from relayrun.control.rundir.mirror import record_verified
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.trainers import checkpoint_hashes
from relayrun.errors import InputError, RunDirError
from relayrun.files import file_sizes, stat_of
from relayrun.progress import Progress
from relayrun.train.checkpoint import checksums
from relayrun.train.mirror import restore, sync
from relayrun.watch.status import queue, run_status
from relayrun.watch.status.summary import UNFINISHED_STATES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun checkpoint`."""
    actions = parser.add_subparsers(dest="action", required=True)
    verify = actions.add_parser("verify", help="read a checkpoint back in full and compare every byte with its hash")
    words = "run directory, or project/name below logs/runs, and an iteration (default: the newest whole one)"
    verify.add_argument("name", metavar="RUN[:N]", help=f"{words}; or the folder of a checkpoint")
    verify.set_defaults(run=verify_checkpoint)
    commit = actions.add_parser("commit", help="hash a checkpoint of any program, so that its bytes can be verified")
    commit.add_argument("folder", type=Path, metavar="FOLDER", help="the checkpoint, whole; its name ends in its step")
    commit.set_defaults(run=commit_checkpoint)
    copy = actions.add_parser("mirror", help="copy checkpoints to the second place of their run, as a job does")
    add_run(copy)
    copy.add_argument("--verify", action="store_true", help="read all copies back in full, too")
    copy.set_defaults(run=mirror_checkpoints)
    back = actions.add_parser("restore", help="put a copy back where the run expects it, or into a folder")
    words = "the run, and an iteration (default: the newest copy that counts and is missing or torn in the run)"
    back.add_argument("name", metavar="RUN[:N]", help=f"{words}; with --to the folder of a run's copies")
    back.add_argument("--to", metavar="FOLDER", help="put the copy into this folder: the run itself may be lost")
    back.set_defaults(run=restore_checkpoint)


def verify_checkpoint(options: argparse.Namespace) -> int:
    """Print `clean` and return 0, or print the faults of a checkpoint and return 1. Raises RelayrunError."""
    folder, torn = _checkpoint_folder(options.name)
    for left in torn:
        print(f"damaged: {left.path}: {left.why}")
    commit = checkpoint_records.newest_commit_at(folder)
    root = None if commit is None else commit.checksum
    run = Run((real := Path(os.path.realpath(folder))).parent.parent)
    named = run if real.parent == run.checkpoints and run.attempts.is_dir() else None
    recorded = None if named is None or commit is None else checkpoint_hashes.recorded_hashes(named, commit)
    if root is None and recorded is None and not (folder / checksums.CHECKSUM_INDEX).exists():
        words = "this checkpoint was saved without checksums: there is nothing to compare its bytes with"
        hint = "checkpoints have them that this version of relayrun saves or imports"
        raise InputError(words, where=folder, hint=hint)
    began, before = time.monotonic(), _identity(folder)
    with Progress("verifying", sum(file_sizes(folder).values())):
        if recorded is None:
            size, faults = checksums.verify_checkpoint(folder, root)
        else:
            size, faults = sum(file_sizes(folder).values()), checkpoint_hashes.faults(str(folder), recorded)
    if before is None or _identity(folder) != before:
        hint = "a run removes its oldest ones (checkpoint.keep_last) and moves damaged ones: verify another one"
        raise InputError("this checkpoint was removed or moved while it was read", where=folder, hint=hint)
    if faults:
        print(f"damaged: {folder}", *(f"  {fault}" for fault in faults), sep="\n")
        return 1
    if commit is not None and root is not None and named is not None:
        with contextlib.suppress(OSError, RunDirError):  # a run of another user, whose links would be followed
            Plan.load_trusted(named)
            record_verified(named, commit, now=time.time())
    vouched = "" if root is not None or recorded is not None else "; no run vouches for its checksums.json"
    print(f"clean: {folder}: {size:,} bytes in {time.monotonic() - began:.1f} s{vouched}")
    return 1 if torn else 0


def commit_checkpoint(options: argparse.Namespace) -> int:
    """Hash a checkpoint of any program and commit it. Raises RelayrunError."""
    folder = options.folder.expanduser().absolute()
    beyond = checkpoints.committed(folder.parent)
    done = checkpoints.commit(folder)
    print(f"committed step {done.step}: {done.path}")
    if beyond and beyond[0].step > done.step:
        print(f"step {beyond[0].step} beside it counts no more, until it is committed again")
    return 0


def mirror_checkpoints(options: argparse.Namespace) -> int:
    """Update the copies of a run; return 1 if a copy is missing. Raises RelayrunError."""
    return sync.mirror_checkpoints(find_run(options.name), verify=options.verify).tell()


def restore_checkpoint(options: argparse.Namespace) -> int:
    """Put a copy back into a run without jobs, or into a folder. Raises RelayrunError."""
    named, iteration = split_run_and_iteration(options.name)
    if options.to is not None:
        check_outputs({"--to": options.to})
        for line in restore.fetch_copy(named, iteration, Path(options.to).expanduser().absolute()):
            print(line)
        return 0
    try:
        run = find_run(named)
    except RunDirError as error:
        lost = "where the run directory itself is lost: relayrun checkpoint restore PLACE/PROJECT/NAME --to FOLDER"
        raise RunDirError(error.message, where=error.where, hint="; ".join(filter(None, [error.hint, lost]))) from None
    state = run_status.read_run_status(run, queue.query_queue(run), now=time.time()).state
    if state in UNFINISHED_STATES:
        words = f"the chain is {state}: a job could begin with the checkpoints as they are now"
        hint = f"end it first: relayrun cancel {run.path}"
        raise InputError(words, where=run.path, hint=hint)
    for line in restore.restore_copy(run, iteration):
        print(line)
    print(f"go on: relayrun resume {run.path}")
    return 0


def _identity(folder: Path) -> tuple[int, int] | None:
    """Device and inode of a folder, None if it does not exist."""
    found = stat_of(folder)
    return None if found is None else (found.st_dev, found.st_ino)


def _checkpoint_folder(name: str) -> tuple[Path, list[BrokenCheckpoint]]:
    """The named checkpoint, and newer incomplete ones. Raises InputError or RunDirError."""
    folder = Path(name).expanduser()
    if (folder / "metadata.json").is_file() or (folder / checksums.CHECKSUM_INDEX).is_file():
        return folder.absolute(), []
    named, iteration = split_run_and_iteration(name)
    run = find_run(named)
    line = checkpoint_records.Lineage(run)
    if iteration is None:
        newest = line.durable()
        if newest.path is None:
            raise InputError("this run has no checkpoint yet", where=run.path)
        beyond = newer_broken_checkpoints(run, line, newest)
        return Path(newest.path), [left for left in beyond if not left.quarantined and Path(left.path).is_dir()]
    commits = line.line()
    have = ", ".join(str(commit.iteration) for commit in commits if Path(commit.path).is_dir()) or "none"
    for commit in commits:
        if commit.iteration == iteration:
            if Path(commit.path).is_dir():
                return Path(commit.path), []
            words = f"the checkpoint of iteration {commit.iteration} is not there any more"
            hint = f"it has: {have}; `relayrun status` tells what lies in quarantine"
            raise InputError(words, where=commit.path, hint=hint)
    raise InputError(
        f"this run has no checkpoint of iteration {iteration}", where=run.checkpoints, hint=f"it has: {have}"
    )
