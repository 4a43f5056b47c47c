"""Keeps the newest checkpoints of a foreign program, and removes the older ones, where its settings ask for that."""

from __future__ import annotations

import os
import shutil
from itertools import islice
from pathlib import Path

from relayrun.rundir.lineage import Durable, Lineage, fault, is_own
from relayrun.rundir.run import Run

REMOVING = ".removing-"
"""Names of checkpoints begin so that are being removed: under its own name there is a whole one or none."""

LOOKED_AT = 100
"""So many of the run's newest checkpoints are looked at, and more with a large `keep_last`: age costs nothing."""


def remove_old(run: Run, *, keep_last: int) -> list[Path]:
    """Remove what this run has on record and on disk beyond its newest `keep_last` whole checkpoints; return the paths.

    What another run made, and what no attempt has on record, is left alone. What the program has removed itself counts
    for nothing. Of a link the link alone is removed. Raises OSError.
    """
    for leftover in run.checkpoints.glob(f"{REMOVING}*"):  # of a process that was killed
        _remove(leftover)
    kept: set[str] = set()
    old: list[Path] = []
    for counted in islice(Lineage(run).backwards(), 10 * keep_last + LOOKED_AT):
        commit = counted.commit
        if commit.path in kept or not is_own(run, Durable(iteration=commit.iteration, path=commit.path)):
            continue
        if len(kept) < keep_last:
            if fault(commit) is None:
                kept.add(commit.path)
        elif os.path.lexists(commit.path):
            old.append(Path(commit.path))
        else:  # what is older has been removed before
            break
    for path in old:
        doomed = path.with_name(f"{REMOVING}{path.name}")
        os.rename(path, doomed)
        _remove(doomed)
    return old


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
