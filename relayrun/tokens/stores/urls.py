"""Paths of data sets: a local folder or file, or a URL that fsspec knows (`s3://bucket/web`).

Credentials come from the environment, as the package of the scheme reads them. Local names are opened literally;
fsspec, which interprets `::` and undecodable bytes, opens URLs only. A failed read below a URL is retried after a
pause, from the same position: a slow store, a closed connection, a 500 or 429 costs a pause and not a shard of hours.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import io
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, TypeVar, cast

from relayrun.errors import InputError, RelayrunError
from relayrun.masking import mask_tokens

log = logging.getLogger(__name__)

RETRY_PAUSES: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
"""Seconds between the tries of one read: about five minutes. A successful read resets the count."""

_READ_BYTES = 8 << 20
"""Bytes of a read when all remaining bytes are requested."""

_PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    ImportError,
    ValueError,
    NotImplementedError,
)
"""Errors that a retry cannot cure: missing file, no access, no package for the scheme, wrong URL."""

_STORE_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a store without space: a pause of seconds frees none."""

_TRANSIENT_4XX = (408, 425, 429)

T = TypeVar("T")

READER_CLOSED: ContextVar[threading.Event | None] = ContextVar("READER_CLOSED", default=None)
"""Set when the reader is closed that reads in this thread; its pauses end then."""


class StoreError(RelayrunError):
    """A store did not answer within the retries. The files are not at fault: `on_error` never skips them for it."""


def retry_transient(call: Callable[[], T], url: str, closed: threading.Event | None = None) -> T:
    """Return what `call` returns; after a transient failure, call it again after each of `RETRY_PAUSES`. Raises
    permanent errors unchanged, and StoreError when the last try fails or the reader is closed (`closed`, by default
    that of this thread)."""
    closed = closed or READER_CLOSED.get() or threading.Event()
    for number, pause in enumerate((*RETRY_PAUSES, None), start=1):
        try:
            return call()
        except Exception as error:
            reason = _transient_error(error)
            if reason is None:
                raise
            text = mask_tokens(first_line(reason))[0]
            if pause is None:
                words = f"the store does not answer: {text} (tried {number} times)"
                raise StoreError(words, where=url, hint="run again: what is done is kept") from None
            log.warning("%s: %s; tried again in %g s (%d of %d)", url, text, pause, number, len(RETRY_PAUSES))
        if closed.wait(pause):
            raise StoreError("the reader was closed before the store answered", where=url)
    raise AssertionError("the last pause is None")


def _transient_error(error: Exception) -> Exception | None:
    """Return the transient error, or None. fsspec raises FileNotFoundError for any page that it cannot reach."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _is_connection_error(cause):
        return cause
    if isinstance(error, OSError) and error.errno in _STORE_FULL_CODES:
        return None
    if isinstance(error, (RelayrunError, *_PERMANENT_ERRORS)) or (
        400 <= _http_status(error) < 500 and _http_status(error) not in _TRANSIENT_4XX
    ):
        return None
    return error


def _is_connection_error(cause: Exception) -> bool:
    if isinstance(cause, _PERMANENT_ERRORS):
        return False
    if status := _http_status(cause):
        return status >= 500 or status in _TRANSIENT_4XX
    return isinstance(cause, OSError) or type(cause).__module__.split(".")[0] == "aiohttp"


def _is_refusal(error: Exception) -> bool:
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None  # fsspec's error for a web page
    refused = isinstance(error, PermissionError) or _http_status(error) in _EXPIRED_STATUSES
    return refused or (cause is not None and _http_status(cause) in _EXPIRED_STATUSES)


def _http_status(error: BaseException) -> int:
    """Return the HTTP status of an error of aiohttp, huggingface_hub, botocore or azure, or 0."""
    response: Any = getattr(error, "response", None)
    places = (error, "status"), (error, "status_code"), (response, "status_code")
    found = next((value for place, name in places if (value := getattr(place, name, None))), None)
    if found is None and isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return found if isinstance(found, int) else 0


_EXPIRED_STATUSES = (401, 403, 410)
"""Statuses of a store for an expired signed link or token."""


class RemoteFile(io.BufferedIOBase):
    """A file below a URL, for reading. A failed read is retried on a newly opened file at the same position.

    A read that is refused after a successful one is retried, too: links and tokens expire, and a store's package
    fetches new ones when it opens a file. If the retry is refused, StoreError is raised.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._at = 0
        self._streams = False
        self._allowed = False
        self._file: Any = None
        self._reader_closed = READER_CLOSED.get()  # Arrow may read in a thread of its own
        with self._refusals():
            self._file = retry_transient(self._open, url)
        self._size: int | None = getattr(self._file, "size", None)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self._size is not None

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Set the position; the bytes before it need not be fetched."""
        if whence == io.SEEK_END and self._size is None:
            raise io.UnsupportedOperation("the server does not tell the size of this file")
        self._at = offset + (0, self._at, self._size or 0)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, fewer only at the end of the file; None or -1: all remaining bytes."""
        pieces: list[bytes] = []
        left = float("inf") if size is None or size < 0 else size
        while left > 0:
            try_it = functools.partial(self._read, int(min(left, _READ_BYTES)))
            with self._refusals():
                piece = retry_transient(try_it, self._url, self._reader_closed)
            if not piece:
                break
            self._at += len(piece)
            left -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> None:
        """Close the connection."""
        self._drop()
        super().close()

    def _read(self, size: int) -> bytes:
        try:
            if self._file is None:
                self._file = self._open()
            if self._file.tell() != self._at:
                self._go_to(self._at)
            data = bytes(self._file.read(size))
            if not data and self._size is not None and self._at < self._size:
                raise OSError(f"the connection ended at {self._at:,} of {self._size:,} bytes")
            self._allowed = True
            return data
        except ValueError as error:
            self._drop()
            if self._streams:
                raise OSError(str(error)) from None
            self._streams = True  # a web server without ranges: one stream from the beginning
            return self._read(size)
        except Exception as error:
            self._drop()
            if self._allowed and _is_refusal(error):
                self._allowed = False  # one more try, on a file that is opened with valid credentials
                return self._read(size)
            raise

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Name the URL in the errors of packages that do not derive from OSError."""
        try:
            yield
        except Exception as error:
            if _http_status(error) == 404 and not isinstance(error, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._url) from None
            if not _is_refusal(error):
                raise
            words = f"the store refuses this: {first_line(error.__cause__ or error)}"
            raise StoreError(words, where=self._url, hint="look at your access, then run again") from None

    def _open(self) -> Any:
        import fsspec

        options = {"block_size": 0} if self._streams else {}
        if self._at and not self._allowed:  # neither the refused connection nor its token
            options["skip_instance_cache"] = True
        file = fsspec.open(self._url, "rb", **options).open()
        if self._at and getattr(file, "size", None) not in (None, self._size):
            raise InputError("this file was changed while it was read", where=self._url, hint="run again")
        return file

    def _go_to(self, place: int) -> None:
        try:
            self._file.seek(place)
        except ValueError:  # a stream: skip the bytes that were read already
            if self._file.tell() > place:
                self._file = self._open()
            while (left := place - self._file.tell()) > 0 and self._file.read(min(left, _READ_BYTES)):
                pass

    def _drop(self) -> None:
        with contextlib.suppress(Exception):  # the connection itself may have failed
            if self._file is not None:
                self._file.close()
        self._file = None


_END_BYTES = 1 << 16
_MOST_LINKS = 40
"""Links followed one after another, as in Linux."""


class MissingInput(InputError):
    """A file of a data set is missing."""


def is_url(place: str | os.PathLike[str]) -> bool:
    """True if a path carries a scheme. An absolute local path never holds `//`."""
    return "://" in os.fspath(place)


def resolve_url_link(folder: str | os.PathLike[str]) -> str:
    """Return the folder as given, or the URL that it links to, also through other links (`raw-dataset-link`)."""
    given = os.fspath(folder)
    link = given.rstrip("/")
    with contextlib.suppress(OSError):  # not a link, or missing
        for _ in range(_MOST_LINKS):
            target = os.readlink(link)
            if is_url(target):
                return target
            link = os.path.join(os.path.dirname(link), target)
    return given


def absolute_path(folder: str | os.PathLike[str]) -> str:
    """Return an absolute local path, or a URL without trailing slashes; links to URLs are resolved. Raises InputError
    for a URL with a password, which would be written into files."""
    folder = resolve_url_link(folder)
    if not is_url(folder):
        return os.path.abspath(folder)
    scheme, _, rest = folder.partition("://")
    if re.match(r"[^/]*:[^/]*@", rest):
        hint = "give credentials in the environment"
        raise InputError("a URL with a password in it would be written into files", where=f"{scheme}://...", hint=hint)
    if scheme in ("file", "local"):
        rest = os.path.abspath(rest)  # fsspec would read it from the working directory
    return f"{scheme}://{rest.rstrip('/')}"


def join_path(folder: str, name: str) -> str:
    return f"{absolute_path(folder)}/{name}" if is_url(folder) else os.path.join(folder, name)


def open_input(path: str) -> BinaryIO:
    """Open a file for reading bytes; reads below a URL are retried. Raises OSError and ImportError."""
    return cast(BinaryIO, RemoteFile(path)) if is_url(path) else open(path, "rb")


def hash_file_ends(path: str) -> str:
    """Return the SHA-256, hexadecimal, of the first and last 64 KiB of a file. Raises InputError and OSError."""
    with open_input(path) as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        file.seek(max(0, file.seek(0, os.SEEK_END) - _END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def list_url(url: str) -> list[tuple[str, int]]:
    """List all files below a URL: paths below it, and bytes. Raises InputError for an unknown scheme or a missing
    package, for lack of access to any folder, and for an empty URL."""
    with _open_store(url, missing="there is no such dataset folder") as (store, root):
        files = _walk_store(store, root)
        found = [(info["name"].removeprefix(root).lstrip("/"), _store_size(store, info)) for info in files]
    if not found:
        raise MissingInput("there is no file below this", where=url)
    return found


def stat_url(url: str) -> tuple[int, int]:
    """Return bytes and modification time (`modified_time`) of the file at a URL. Raises InputError."""
    with _open_store(url, missing="this file of the paths file is missing") as (store, path):
        info = retry_transient(lambda: store.info(path), url)
        return _store_size(store, info), modified_time(info)


def stat_file(path: str) -> tuple[int, int]:
    """Return bytes and modification time (ns) of a file, local or at a URL. Raises MissingInput, and as `stat_url`."""
    if is_url(path):
        return stat_url(path)
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        hint = "run `relayrun dumps prepare` again if the dataset has changed"
        raise MissingInput("this file of the paths file is missing", where=printable(path), hint=hint) from None
    return status.st_size, status.st_mtime_ns


def try_store(url: str) -> None:
    """Write a file below a URL, read it back and remove it. Raises StoreError, and InputError if the store refuses
    this. A killed call leaves the file, and the next one removes it."""
    probe = join_path(url, ".relayrun-probe")
    with tempfile.NamedTemporaryFile() as file:
        put_file(file.name, probe, content_checksum(file.name))
    remove_url(probe)


def put_file(file: str | os.PathLike[str], url: str, checksum: str) -> tuple[int, int]:
    """Put a local file with this checksum at a URL, and read it back in full; return its bytes and modification time
    there. Raises StoreError, and InputError if the store refuses this."""

    def put() -> None:
        store.put_file(os.fspath(file), path)
        if store.info(path)["size"] != os.path.getsize(file) or content_checksum(url) != checksum:
            raise OSError("the store gives back other bytes than were written")

    with _open_store(url) as (store, path):
        retry_transient(put, url)
    return stat_url(url)


def fetch_file(url: str, file: str | os.PathLike[str]) -> None:
    """Copy the file at a URL to a local path. Raises StoreError and OSError."""
    with open_input(url) as remote, open(file, "wb") as local:
        shutil.copyfileobj(remote, local, _READ_BYTES)


def content_checksum(path: str) -> str:
    """Return the xxh3-128 of a file, local or at a URL, read in full. Raises StoreError and OSError."""
    from relayrun.tokens.stores.direct_io import open_file_checksum  # on demand: numpy, which may start threads

    with open_input(path) as file:
        return open_file_checksum(file)


def remove_url(url: str) -> None:
    """Remove the file at a URL; it may be gone. Raises InputError and StoreError."""
    with _open_store(url) as (store, path), contextlib.suppress(FileNotFoundError):
        retry_transient(lambda: store.rm_file(path), url)


def modified_time(info: Mapping[str, Any]) -> int:
    """Return a file's modification time in ns; 0 if the store does not tell it. A tag of the version (a web server; the
    Hugging Face hub, whose tag is the hash of the content) gives a number in place of the time."""
    for key in ("mtime", "LastModified", "updated", "created", "Last-Modified"):
        changed = info.get(key)
        for read in (datetime.fromisoformat, parsedate_to_datetime):
            with contextlib.suppress(ValueError):
                changed = read(changed) if isinstance(changed, str) else changed
        if isinstance(changed, datetime):
            changed = changed.timestamp()
        if isinstance(changed, (int, float)):
            return round(float(changed) * 1e9)
    tag = info.get("ETag") or info.get("blob_id")
    return int.from_bytes(hashlib.sha256(str(tag).encode()).digest()[:7]) if tag else 0


def _walk_store(store: Any, root: str) -> Iterator[dict[str, Any]]:
    from fsspec.asyn import AsyncFileSystem
    from fsspec.spec import AbstractFileSystem

    own = type(store).find is not AbstractFileSystem.find
    if own or getattr(type(store), "_find", AsyncFileSystem._find) is not AsyncFileSystem._find:
        yield from store.find(root, detail=True).values()  # an object store lists all files at once
        return
    folders = [root]
    while folders:  # not the generic `find`, which skips unreadable folders
        folder = folders.pop()
        for info in store.ls(folder, detail=True):
            if info["type"] == "directory":
                folders += [info["name"]] if info["name"].rstrip("/") != folder.rstrip("/") else []
            elif info["type"] == "file" or info.get("islink"):
                yield info


def _store_size(store: Any, info: dict[str, Any]) -> int:
    size = info.get("size")
    if size is None:  # missing in a listing of web pages
        size = store.info(info["name"]).get("size")
    if size is None:
        raise InputError("the server does not tell the size of this file", where=info["name"])
    return int(size)


@contextlib.contextmanager
def _open_store(url: str, *, missing: str = "there is no such bucket or folder") -> Iterator[tuple[Any, str]]:
    """Yield fsspec's store of a URL and the path there; explain the errors of its package. `missing`: for a 404."""
    try:
        import fsspec

        yield fsspec.core.url_to_fs(url)
    except RelayrunError:
        raise
    except FileNotFoundError:
        raise MissingInput(missing, where=url) from None
    except ImportError as error:
        from fsspec.registry import known_implementations

        scheme = url.partition("://")[0]
        package = str(known_implementations.get(scheme, {}).get("class", "")).partition(".")[0]
        package = f"'fsspec[{scheme}]'" if package in ("", "fsspec") else package
        words = f"the package of this scheme cannot be imported: {first_line(error)}"
        raise InputError(words, where=url, hint=f"pip install {package}") from None
    except Exception as error:  # unknown scheme, no access: each package has its own errors
        hint = "install fsspec's package of the scheme, and set its credentials"
        raise InputError(f"fsspec cannot use this: {first_line(error)}", where=url, hint=hint) from None


def printable(name: str) -> str:
    """Return a file name for the terminal: bytes that are not UTF-8 become `\\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0] or type(error).__name__
