"""A snapshot of the code at a submit: all attempts run it, whatever becomes of the checkout or the installed package.

Of a checkout it is taken for `debug.backup_codebase`, of an installed package always: an upgrade replaces the package
while jobs wait. Either way it is laid out as a checkout, with launchers/ and configs/ beside the package.

code/0001/          the files, below the same names
code/0001.sha256    of all of them: a later submit of the same code takes the same snapshot
code/0001.commit    the commit of the checkout
code/0001.diff      what was changed since, for its owner alone
code/megatron-lm/   the same of the checkout of Megatron-LM that the ranks run, if any

Files that look like secrets by their name are left out, unless git knows them; files that hold a token are for their
owner alone; tokens in the difference are masked. Each is said. Nothing becomes wider than the umask.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from relayrun import __version__
from relayrun.control.rundir.run import Run
from relayrun.files import umask, write_atomic
from relayrun.masking import is_secret_name, mask_tokens
from relayrun.publishing import work_folder

log = logging.getLogger(__name__)

MAX_FILE_BYTES = 1 << 20
"""Bytes of a file that git does not know, above which it is taken for data and left out."""

SNAPSHOT_PARTS = ("relayrun", "launchers", "scripts", "configs")
"""Folders and files that are copied if the code is no git checkout."""


def snapshot_code(run: Run, root: Path) -> Path:
    """Copy the code in `root`, uncommitted and new files included, and return the copy's folder."""
    return _take_snapshot(run.code, root, _files(root, run.path))


def snapshot_of_checkout(run: Run, root: Path) -> Path:
    """Copy a checkout of another program, Megatron-LM, in the same way, and return the copy's folder. Where git does
    not say which files are code, all are taken that are no secrets and not large."""
    if (root / ".git").exists():
        names = _names(root, run.path)
    else:
        names = _new_code(root, run.path, (str(path.relative_to(root)) for path in _code(root)))
    folder = run.code / "megatron-lm"
    folder.mkdir(parents=True, exist_ok=True)
    return _take_snapshot(folder, root, {name: root / name for name in sorted(names)})


def _take_snapshot(folder: Path, root: Path, files: Mapping[str, Path]) -> Path:
    """Copy the files to the next number in `folder`; return the newest snapshot if it holds the same."""
    folder.mkdir(exist_ok=True)
    digest = _digest(files)
    known = sorted(path for path in folder.iterdir() if path.name.isdecimal())
    with contextlib.suppress(FileNotFoundError):
        if known and known[-1].with_suffix(".sha256").read_text(encoding="utf-8") == digest:
            return known[-1]
    target = folder / f"{int(known[-1].name) + 1 if known else 1:04}"
    with work_folder(folder) as copied:
        for name, source in files.items():
            (copied / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(source, copied / name)
        for folder_of_code in {path.parent for path in copied.rglob("*.py")}:  # Python would make it by a rank's umask
            (folder_of_code / "__pycache__").mkdir(exist_ok=True)
        copied.chmod(copied.stat().st_mode & stat.S_ISGID | 0o777 & ~umask())  # a private one cannot be shared
        installed = (root / "relayrun" / "share").is_dir()
        unknown = f"relayrun {__version__}, an installed package\n" if installed else "unknown: no git checkout\n"
        write_atomic(target.with_suffix(".commit"), _git(root, "rev-parse", "HEAD") or unknown)
        text, tokens = mask_tokens(_git(root, "diff", "HEAD") or "")
        if tokens:
            log.warning("masked in the difference to the commit: %s", ", ".join(sorted(set(tokens))))
        difference = text.encode(errors="surrogateescape")
        write_atomic(target.with_suffix(".diff"), difference, mode=0o600)
        write_atomic(target.with_suffix(".sha256"), digest)
        os.rename(copied, target)
    return target


def _copy(source: Path, target: Path) -> None:
    """Copy a file or a link; its mode is the source's less the umask, and 0o700 of that if it holds a token."""
    shutil.copy2(source, target, follow_symlinks=False)
    if target.is_symlink():
        return
    mode = stat.S_IMODE(target.stat().st_mode) & 0o777 & ~umask()
    if target.stat().st_size <= MAX_FILE_BYTES and (tokens := mask_tokens(target.read_text(encoding="latin-1"))[1]):
        log.warning("in the snapshot, readable by you alone: %s holds what looks like a %s", source, tokens[0])
        mode &= 0o700
    target.chmod(mode)


def _files(root: Path, without: Path) -> dict[str, Path]:
    """The files to copy, by their places in the snapshot, in order; nothing below the folder `without`."""
    installed = root / "relayrun" / "share"
    if not installed.is_dir():
        return {name: root / name for name in sorted(_names(root, without))}
    files = {str(path.relative_to(root)): path for path in _code(root / "relayrun") if installed not in path.parents}
    shared = {str(path.relative_to(installed)): path for path in _code(installed)}
    return dict(sorted((files | {name: shared[name] for name in shared if not name.startswith("docs/")}).items()))


def _code(folder: Path) -> Iterator[Path]:
    return (path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts)


def _names(root: Path, without: Path) -> Iterator[str]:
    """Files of the code, relative to `root`; nothing below the folder `without`, and no secrets."""
    tracked = _git(root, "ls-files", "-z")
    if tracked is None:
        names = (str(path.relative_to(root)) for part in SNAPSHOT_PARTS for path in _code(root / part))
        yield from (name for name in names if not _is_secret(root, name))
        return
    others = _git(root, "ls-files", "-z", "--others", "--exclude-standard") or ""
    for name in filter(None, tracked.split("\0")):
        if os.path.lexists(root / name) and not (root / name).is_dir():  # not deleted, no submodule
            yield name
    yield from _new_code(root, without, filter(None, others.split("\0")))


def _new_code(root: Path, without: Path, names: Iterable[str]) -> Iterator[str]:
    """Files that git does not know, of these: nothing below the folder `without`, no large file, and no secret."""
    for name in names:
        path = root / name
        if not path.is_file() or path.is_relative_to(without) or _is_secret(root, name):
            continue
        if path.stat().st_size > MAX_FILE_BYTES:
            log.warning("not in the snapshot, too large for code: %s", path)
        else:
            yield name


def _is_secret(root: Path, name: str) -> bool:
    if found := is_secret_name(name):
        log.warning("not in the snapshot, its name is that of a secret: %s", root / name)
    return found


def _digest(files: Mapping[str, Path]) -> str:
    digest = hashlib.sha256()
    for name, path in files.items():
        content = os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        mode = os.stat(path, follow_symlinks=False).st_mode & 0o111
        digest.update(f"{name}\0{mode}\0{len(content)}\0".encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def _git(root: Path, *arguments: str) -> str | None:
    """The output of git; None without git, or if `root` is not the top of a checkout."""
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.decode(errors="surrogateescape") if done.returncode == 0 else None
