"""A snapshot of the code at a submit, for `debug.backup_codebase`: all attempts run it, whatever the checkout becomes.

code/0001/          the files, below the same names
code/0001.sha256    of all of them: a later submit of the same code takes the same snapshot
code/0001.commit    the commit of the checkout
code/0001.diff      what was changed since
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relayrun.files import umask, write_atomic
from relayrun.rundir.run import Run

log = logging.getLogger(__name__)

LARGEST = 1 << 20
"""Bytes of a file that git does not know, above which it is taken for data and left out."""

PARTS = ("relayrun", "launchers", "scripts", "configs")
"""Folders and files that are copied where the code is no git checkout."""


def snapshot(run: Run, root: Path) -> Path:
    """Copy the code in `root`, uncommitted and new files included, and return the copy's folder."""
    run.code.mkdir(exist_ok=True)
    names = sorted(_names(root, run.path))
    digest = _digest(root, names)
    known = sorted(path for path in run.code.iterdir() if path.name.isdecimal())
    if known and _read(known[-1].with_suffix(".sha256")) == digest:
        return known[-1]
    target = run.code / f"{int(known[-1].name) + 1 if known else 1:04}"
    copied = Path(tempfile.mkdtemp(dir=run.code, prefix=".tmp-"))
    try:
        for name in names:
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copied / name, follow_symlinks=False)
        copied.chmod(copied.stat().st_mode & stat.S_ISGID | 0o777 & ~umask())  # a private one cannot be shared
        write_atomic(target.with_suffix(".commit"), _git(root, "rev-parse", "HEAD") or "unknown: no git checkout\n")
        difference = (_git(root, "diff", "HEAD") or "").encode(errors="surrogateescape")
        write_atomic(target.with_suffix(".diff"), difference)
        write_atomic(target.with_suffix(".sha256"), digest)
        os.rename(copied, target)
    except BaseException:
        shutil.rmtree(copied, ignore_errors=True)
        raise
    return target


def _names(root: Path, without: Path) -> Iterator[str]:
    """Files of the code, relative to `root`; nothing below the folder `without`."""
    tracked = _git(root, "ls-files", "-z")
    if tracked is None:
        for part in PARTS:
            for path in (root / part).rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    yield str(path.relative_to(root))
        return
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard") or ""
    for name in filter(None, tracked.split("\0")):
        if os.path.lexists(root / name) and not (root / name).is_dir():  # not deleted, no submodule
            yield name
    for name in filter(None, others.split("\0")):
        path = root / name
        if not path.is_file() or path.is_relative_to(without):
            continue
        if path.stat().st_size > LARGEST:
            log.warning("not in the snapshot, too large for code: %s", path)
        else:
            yield name


def _digest(root: Path, names: list[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        path = root / name
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        mode = os.stat(path, follow_symlinks=False).st_mode & 0o111
        digest.update(f"{name}\0{mode}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where there is no git or `root` is not the top of a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
