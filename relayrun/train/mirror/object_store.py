"""A second place below a URL that fsspec knows (`s3://bucket/ada`): files lie under their final names, unclaimed.

Such stores cannot rename a folder or append to a file. So a copy grows under its final name, and counts by its claim
alone, an object of its own (`relayrun.control.rundir.mirror` lists them). Transient failures are retried.
Credentials and options come from the environment, as fsspec and the package of the scheme read them.
"""

from __future__ import annotations

import contextlib
import glob
import json
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from relayrun.control.rundir.mirror import CheckpointCopy, MirrorOwner
from relayrun.control.rundir.records import CheckpointCommit, Record
from relayrun.errors import ConfigError, InputError, RelayrunError, RunDirError, missing_extra
from relayrun.masking import mask_tokens
from relayrun.tokens.stores.urls import (
    RemoteFile,
    StoreError,
    absolute_path,
    first_line,
    list_store_sizes,
    retry_transient,
)
from relayrun.train.checkpoint.checksums import FolderCheckpointFiles
from relayrun.train.mirror.destination import (
    CopyRateLimit,
    MirrorDestination,
    MirroredFiles,
    commit_identity,
    copy_name,
    read_pieces,
)

MOST_PARTS = 5000
"""Largest number of parts of a file; stores allow ten thousand."""
PART_BYTES = 64 << 20
"""Least bytes of a part."""

T = TypeVar("T")
R = TypeVar("R", bound=Record)


class ObjectStoreDestination(MirrorDestination):
    """The second place of one run below a URL. `pace`: limit of the reads from it."""

    where: str

    def __init__(self, url: str, pace: CopyRateLimit) -> None:
        self.where = absolute_path(url)
        self._pace = pace
        self._gave_up: StoreError | None = None

    def owner(self) -> MirrorOwner | None:
        return self._record("mirror.json", MirrorOwner)

    def prepare(self, owner: MirrorOwner) -> None:
        try:
            self._write("mirror.json", asdict(owner))
        except FileNotFoundError:
            above = self.where.rsplit("/", 2)[0]
            raise RunDirError("there is no such bucket or folder", where=above, hint="make it") from None

    def copies(self) -> dict[str, CheckpointCopy]:
        return {name: copy for name, copy in self._claims.items() if copy.gone is None}

    def take_back(self, copy: CheckpointCopy, why: str) -> None:
        self._claim(replace(copy, time=time.time(), gone=why))

    def fault(self, copy: CheckpointCopy) -> str | None:
        found = self._sizes(copy.name)
        for name, size in copy.files.items():
            if name not in found:
                return f"{name} is missing" if found else "missing"
            if found[name] != size:
                return f"{name} has {found[name]} bytes, not {size}"
        return None

    def files(self, copy: CheckpointCopy) -> MirroredFiles:
        return StoredFiles(f"{self.where}/{copy.name}", self._sizes(copy.name), self._pace)

    def stage(self, commit: CheckpointCommit, pace: CopyRateLimit) -> MirroredFiles:
        """Send the missing and incomplete files of a checkpoint. Raises CopyFailed, StoreError."""
        name, source = copy_name(commit), FolderCheckpointFiles(Path(commit.path))
        if self._read(_marker(name)) != json.loads(json.dumps(commit_identity(commit))):
            self._remove(name)
            self._write(_marker(name), commit_identity(commit))
        there = self._sizes(name)
        for file in there.keys() - commit.files.keys():
            self._remove(_below(name, file))
        for file, size in commit.files.items():
            if there.get(file) != size:
                self._ask(partial(self._send, source, name, file, size, pace), name)
        return StoredFiles(f"{self.where}/{name}", self._sizes(name), self._pace)

    def unstage(self, commit: CheckpointCommit) -> None:
        self._remove(_marker(copy_name(commit)))
        self._remove(copy_name(commit))

    def publish(self, copy: CheckpointCopy) -> None:
        self._claim(copy)
        self._remove(_marker(copy.name))

    def set_aside(self, copy: CheckpointCopy) -> None:
        names = (copy.name if number == 1 else f"{copy.name}-{number}" for number in count(1))
        target = next(f"damaged/{name}" for name in names if not self._sizes(f"damaged/{name}"))
        for file in self._sizes(copy.name):
            source, to = self._path(_below(copy.name, file)), self._path(_below(target, file))
            self._ask(partial(self._in_folder, to, partial(self._fs.cp_file, source, to)), copy.name)
        self.remove(copy.name)

    def remove(self, name: str) -> None:
        """Remove the files of a withdrawn copy, then its claim."""
        self._remove(name)
        self._remove(_claim(name))
        self._claims.pop(name, None)

    def tidy(self, names: set[str], missing: set[str]) -> None:
        withdrawn = self._claims.keys() - self.copies().keys()
        there = set(self._names("")) | withdrawn
        for name in ((names & there) | withdrawn) - self.copies().keys() - missing:
            self.remove(name)
        for marker in self._names("copying"):
            if marker.removesuffix(".json") not in missing:
                self._remove(f"copying/{marker}")

    @cached_property
    def _claims(self) -> dict[str, CheckpointCopy]:
        """Return every claim, withdrawn ones included; read once, since no other process writes meanwhile."""
        found = (self._record(f"copies/{name}", CheckpointCopy) for name in sorted(self._sizes("copies")))
        return {copy.name: copy for copy in found if copy is not None}

    def _claim(self, copy: CheckpointCopy) -> None:
        self._write(_claim(copy.name), asdict(copy))
        self._claims[copy.name] = copy

    @cached_property
    def _fs(self) -> Any:
        return _open(self.where)[0]

    def _path(self, name: str) -> str:
        root = self._fs._strip_protocol(self.where)
        return f"{root}/{name}" if name else str(root)

    def _ask(self, call: Callable[[], T], name: str) -> T:
        """Return the result of `call`, with the retries of `retry_transient`; a silent store is not asked again. Raises
        FileNotFoundError, StoreError, and RelayrunError of `call`."""
        if self._gave_up is not None:
            raise self._gave_up
        url = f"{self.where}/{name}"
        try:
            return retry_transient(call, url)
        except StoreError as error:
            self._gave_up = error
            raise
        except (RelayrunError, FileNotFoundError):
            raise
        except Exception as error:  # each package has its own
            raise _refused(error, url) from None

    def _record(self, name: str, kind: type[R]) -> R | None:
        try:
            value = self._read(name)
            return None if value is None else kind.of(value)
        except (ValueError, TypeError) as error:
            hint = "remove it: what it tells of is copied again"
            raise RunDirError(f"unreadable record: {error}", where=f"{self.where}/{name}", hint=hint) from None

    def _read(self, name: str) -> Any:
        """Return the JSON of a small object; None if it is missing. Raises ValueError if it is torn."""
        try:
            return json.loads(self._ask(lambda: self._fs.cat_file(self._path(name)), name))
        except FileNotFoundError:
            return None

    def _write(self, name: str, value: object) -> None:
        data, path = json.dumps(value, indent=1).encode(), self._path(name)
        self._ask(partial(self._in_folder, path, partial(self._fs.pipe_file, path, data)), name)

    def _sizes(self, name: str) -> dict[str, int]:
        """Return the bytes of every file below a name, by its name there; a file itself has the name `.`."""
        found: dict[str, int] = self._listed(name, list_store_sizes, {})
        return {file or ".": size for file, size in found.items()}

    def _names(self, name: str) -> list[str]:
        found: list[str] = self._listed(name, lambda fs, path: fs.ls(path, detail=False), [])
        return [str(path).rstrip("/").rsplit("/", 1)[-1] for path in found]

    def _listed(self, name: str, look: Callable[[Any, str], T], empty: T) -> T:
        """Return the result of `look` at a path, without fsspec's cache; `empty` if nothing is there."""

        def fresh() -> T:
            self._fs.invalidate_cache()
            return look(self._fs, self._path(name))

        try:
            return self._ask(fresh, name)
        except FileNotFoundError:
            return empty

    def _remove(self, name: str) -> None:
        path = _no_pattern(self._fs, self._path(name))
        with contextlib.suppress(FileNotFoundError):
            self._ask(partial(self._fs.rm, path, recursive=True), name)

    def _in_folder(self, path: str, write: Callable[[], T]) -> T:
        """Write a file; if the store has folders, make its folder, but none above the run's own two."""
        try:
            return write()
        except FileNotFoundError:
            if not self._fs.isdir(self._path("").rsplit("/", 2)[0]):
                raise
            self._fs.makedirs(path.rsplit("/", 1)[0], exist_ok=True)
            return write()

    def _send(self, source: MirroredFiles, name: str, file: str, size: int, pace: CopyRateLimit) -> None:
        """Send one file from its beginning. Raises CopyFailed, and any error of the store."""
        path, part = self._path(_below(name, file)), max(PART_BYTES, -(-size // MOST_PARTS))
        out = self._in_folder(path, lambda: self._fs.open(path, "wb", block_size=part))
        try:
            for piece in read_pieces(source, file, size, pace):
                out.write(piece)
        except BaseException:
            _abandon(out)
            raise
        out.close()


@dataclass(frozen=True)
class StoredFiles:
    """The files of a copy below a URL, as `MirroredFiles`; reads count for the pace."""

    where: str
    _sizes: dict[str, int]
    _pace: CopyRateLimit

    def names(self) -> list[str]:
        return sorted({name.partition("/")[0] for name in self._sizes})

    def size(self, name: str) -> int:
        """Return the bytes of a file. Raises FileNotFoundError."""
        if name not in self._sizes:
            raise FileNotFoundError(f"{self.where}/{name}")
        return self._sizes[name]

    def sizes(self) -> dict[str, int]:
        return self._sizes

    def open(self, name: str) -> BinaryIO:
        """Open a file to read its bytes. Raises StoreError if the store does not answer, or refuses."""
        url = self.where if name == "." else f"{self.where}/{name}"
        try:
            return cast(BinaryIO, _PacedFile(url, self._pace))
        except (RelayrunError, FileNotFoundError):
            raise
        except Exception as error:
            raise _refused(error, url) from None


class _PacedFile(RemoteFile):
    """A file of a copy, read at a limited pace."""

    def __init__(self, url: str, pace: CopyRateLimit) -> None:
        super().__init__(url)
        self._pace = pace

    def read(self, size: int | None = -1) -> bytes:
        data = super().read(size)
        self._pace.spend(len(data))
        return data


def try_object_store_access(url: str, setting: str) -> None:
    """Raise ConfigError unless a file can be written, read and removed below a URL. `setting`: names the URL."""
    where = f"{setting}: {url}"
    data = secrets.token_bytes(16)
    try:
        fs, root = _open(absolute_path(url))
        path = _no_pattern(fs, f"{root}/.relayrun-{secrets.token_hex(8)}")
        fs.pipe_file(path, data)
        found = fs.cat_file(path)
        fs.rm(path)
    except RelayrunError as error:
        raise ConfigError(error.message, where=where, hint=error.hint) from None
    except FileNotFoundError:
        raise ConfigError("there is no such bucket or folder", where=where, hint="make it") from None
    except Exception as error:  # each package has its own
        raise ConfigError(f"it cannot be written: {_line(error)}", where=where, hint=_ACCESS) from None
    if found != data:
        raise ConfigError("it gives back other bytes than were written", where=where)


_ACCESS = "credentials and options come from the environment, as fsspec's package of the scheme reads them"


def _open(url: str) -> tuple[Any, str]:
    """Return the store of a URL, and its path there. Raises InputError without fsspec or its package of the scheme."""
    try:
        import fsspec

        return cast("tuple[Any, str]", fsspec.core.url_to_fs(url))
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error)) is not None:
            raise missing from None
        raise InputError(f"fsspec has no package for it: {error}", where=url, hint="install it") from None
    except (ImportError, ValueError) as error:
        hint = "install fsspec's package of the scheme"
        raise InputError(f"fsspec cannot open this: {_line(error)}", where=url, hint=hint) from None


def _no_pattern(fs: Any, path: str) -> str:
    """Return the path itself. Raises InputError if fsspec would take it for a pattern, and remove every match."""
    if glob.has_magic(path) and "file" not in fs.protocol:
        raise InputError(
            "fsspec takes *, ? and [ in a name for a pattern, and would remove other copies",
            where=path,
            hint="rename it",
        )
    return path


def _refused(error: Exception, url: str) -> StoreError:
    hint = "look at your access, and at the room that is left, then run again"
    return StoreError(f"the store refuses this: {_line(error)}", where=url, hint=hint)


def _line(error: Exception) -> str:
    return mask_tokens(getattr(error, "strerror", None) or first_line(error))[0]


def _abandon(out: Any) -> None:
    """Drop a half-sent file, so that the store does not publish it."""
    with contextlib.suppress(Exception):
        out.discard()
    with contextlib.suppress(Exception):
        if hasattr(out, "autocommit"):
            out.closed = True  # or fsspec would finish it when it is collected
        else:
            out.close()


def _below(name: str, file: str) -> str:
    return name if file == "." else f"{name}/{file}"


def _claim(name: str) -> str:
    return f"copies/{name}.json"


def _marker(name: str) -> str:
    return f"copying/{name}.json"
