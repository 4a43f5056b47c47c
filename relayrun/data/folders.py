"""A folder that appears at once: built under a hidden name beside its place, then renamed into it.

A kill leaves the old folder, the new one, or (between two renames) none, never a mix of both. What a
killed run left aside is removed by the next run beside it; `find_prefixes` never looks into it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from relayrun.files import fsync_directory

ASIDE = ".relayrun-aside-"


@contextlib.contextmanager
def replaced_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; on leaving without an error it replaces `final`.

    The caller has made sure that what stands at `final` may be deleted. Links in the path of `final`
    are followed, so that a link to a folder keeps pointing to it. Raises OSError as it comes.
    """
    final = Path(os.path.realpath(final))
    final.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(final.parent)
    building = final.parent / f"{ASIDE}{secrets.token_hex(8)}"
    building.mkdir()
    lock = os.open(building, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: leftovers stay until removed by hand
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield building
            fsync_directory(building)
            _swap(building, final)
        except BaseException:
            shutil.rmtree(building, ignore_errors=True)
            raise
    finally:
        os.close(lock)


def _swap(building: Path, final: Path) -> None:
    """Rename `building` to `final`, then delete what stood there."""
    old = final.parent / f"{ASIDE}{secrets.token_hex(8)}"
    with contextlib.suppress(FileNotFoundError):
        os.rename(final, old)
    try:
        os.rename(building, final)
    except BaseException:
        with contextlib.suppress(OSError):
            os.rename(old, final)
        raise
    fsync_directory(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(parent: Path) -> None:
    """Delete folders of killed runs: those that nobody holds a lock on."""
    for entry in list(os.scandir(parent)):
        if not entry.name.startswith(ASIDE) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):
            lock = os.open(entry.path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(entry.path)
            finally:
                os.close(lock)
