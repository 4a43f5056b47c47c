"""Paths of data sets: a local folder or file, or a URL that fsspec knows (`s3://bucket/web`).

Credentials come from the environment, as the package of the scheme reads them. Local names are opened literally;
fsspec, which gives `::` and undecodable bytes a meaning of their own, is used for URLs alone.

A read below a URL that fails is retried after a pause, from the same position: a store that answers slowly, closes a
connection, or says 500 or 429, costs a pause and not a shard of hours.
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
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, TypeVar, cast

from relayrun.errors import InputError, RelayrunError
from relayrun.masking import mask_tokens

log = logging.getLogger(__name__)

RETRY_PAUSES: tuple[float, ...] = (1, 2, 4, 8, 16, 32, 60, 60, 60, 60)
"""Seconds between the tries of one read: about five minutes. A read that works begins the count anew."""

_READ_BYTES = 8 << 20
"""Bytes of a read, where all that is left is asked for."""

_PERMANENT_ERRORS = (
    FileNotFoundError,
    PermissionError,
    IsADirectoryError,
    ImportError,
    ValueError,
    NotImplementedError,
)
"""Errors that come again: no such file, no access, no package for the scheme, a wrong URL."""

_STORE_FULL_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors of a store that takes nothing more: a pause of seconds makes no room."""

_TRANSIENT_STATUSES = (408, 425, 429)
"""What passes among the 4xx of a server."""

T = TypeVar("T")


class StoreError(RelayrunError):
    """A store did not answer for as long as it was asked. No fault of a file: no choice leaves the file out for it."""


def retry_transient(call: Callable[[], T], url: str) -> T:
    """Return what `call` returns; where it fails in a way that may pass, call it again after each of `RETRY_PAUSES`.

    Raises what comes again as it came, and StoreError where the last try fails, too.
    """
    for number, pause in enumerate((*RETRY_PAUSES, None), start=1):
        try:
            return call()
        except Exception as error:
            reason = _transient_error(error)
            if reason is None:
                raise
            text = mask_tokens((str(reason).splitlines() or [""])[0] or type(reason).__name__)[0]
            if pause is None:
                raise StoreError(
                    f"the store does not answer: {text} (tried {number} times)",
                    where=url,
                    hint="run again: what is done is kept",
                ) from None
            log.warning("%s: %s; tried again in %g s (%d of %d)", url, text, pause, number, len(RETRY_PAUSES))
        time.sleep(pause)
    raise AssertionError("the last pause is None")


def _transient_error(error: Exception) -> Exception | None:
    """The error that may pass, or None.

    fsspec says of a web page that cannot be looked at, for whatever reason, that it is not found: the cause tells.
    """
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and isinstance(cause, Exception) and _is_connection_error(cause):
        return cause
    if isinstance(error, OSError) and error.errno in _STORE_FULL_CODES:
        return None
    if isinstance(error, (RelayrunError, *_PERMANENT_ERRORS)) or (
        400 <= _http_status(error) < 500 and _http_status(error) not in _TRANSIENT_STATUSES
    ):
        return None
    return error


def _is_connection_error(cause: Exception) -> bool:
    if isinstance(cause, _PERMANENT_ERRORS):
        return False
    if status := _http_status(cause):
        return status >= 500 or status in _TRANSIENT_STATUSES
    return isinstance(cause, OSError) or type(cause).__module__.split(".")[0] == "aiohttp"


def _is_refusal(error: Exception) -> bool:
    cause = error.__cause__ if isinstance(error, FileNotFoundError) else None  # so fsspec says it of a web page
    refused = isinstance(error, PermissionError) or _http_status(error) in _EXPIRED_STATUSES
    return refused or (cause is not None and _http_status(cause) in _EXPIRED_STATUSES)


def _http_status(error: BaseException) -> int:
    """The status of HTTP that an error of aiohttp, huggingface_hub, botocore or azure carries, or 0."""
    response: Any = getattr(error, "response", None)
    places = (error, "status"), (error, "status_code"), (response, "status_code")
    found = next((value for place, name in places if (value := getattr(place, name, None))), None)
    if found is None and isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return found if isinstance(found, int) else 0


_EXPIRED_STATUSES = (401, 403, 410)
"""What a store answers to a signed link, or a token, that has run out."""


class RemoteFile(io.RawIOBase):
    """A file below a URL, to read. A read that fails is tried again on a file that is opened anew at the same place.

    So is one that is refused although the one before was not: links and tokens run out, and a store's package gets new
    ones where it opens a file. Where that is refused, too, it is a StoreError.
    """

    def __init__(self, url: str) -> None:
        """Open it. Raises as `retry_transient` does."""
        self._url = url
        self._at = 0
        self._streams = False
        self._allowed = False
        self._file: Any = None
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
        """Read on from another place, which need not be fetched for that."""
        if whence == io.SEEK_END and self._size is None:
            raise io.UnsupportedOperation("the server does not tell the size of this file")
        self._at = offset + (0, self._at, self._size or 0)[whence]
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes, fewer only at the end of the file; None or -1: all that is left."""
        pieces: list[bytes] = []
        left = float("inf") if size is None or size < 0 else size
        while left > 0:
            try_it = functools.partial(self._read, int(min(left, _READ_BYTES)))
            with self._refusals():
                piece = retry_transient(try_it, self._url)
            if not piece:
                break
            self._at += len(piece)
            left -= len(piece)
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def readinto(self, buffer: Any) -> int:
        """Fill `buffer`, or less of it at the end of the file; return how many bytes that are."""
        view = memoryview(buffer).cast("B")
        data = self.read(len(view))
        view[: len(data)] = data
        return len(data)

    def close(self) -> None:
        """Let go of the connection."""
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
            self._streams = True  # a server of web pages without ranges: from the begin, as one stream
            return self._read(size)
        except Exception as error:
            self._drop()
            if self._allowed and _is_refusal(error):
                self._allowed = False  # one more try, on a file that is opened with what is valid now
                return self._read(size)
            raise

    @contextlib.contextmanager
    def _refusals(self) -> Iterator[None]:
        """Name the URL in errors of packages that are no OSError."""
        try:
            yield
        except Exception as error:
            if _http_status(error) == 404 and not isinstance(error, FileNotFoundError):
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self._url) from None
            if not _is_refusal(error):
                raise
            reason = error.__cause__ or error
            text = (str(reason).splitlines() or [""])[0] or type(reason).__name__
            raise StoreError(
                f"the store refuses this: {text}", where=self._url, hint="look at your access, then run again"
            ) from None

    def _open(self) -> Any:
        import fsspec

        options = {"block_size": 0} if self._streams else {}
        if self._at and not self._allowed:  # not the connection that was refused, nor its token
            options["skip_instance_cache"] = True
        file = fsspec.open(self._url, "rb", **options).open()
        if self._at and getattr(file, "size", None) not in (None, self._size):
            raise InputError("this file was changed while it was read", where=self._url, hint="run again")
        return file

    def _go_to(self, place: int) -> None:
        try:
            self._file.seek(place)
        except ValueError:  # of a stream: what is read already comes once more
            if self._file.tell() > place:
                self._file = self._open()
            while (left := place - self._file.tell()) > 0 and self._file.read(min(left, _READ_BYTES)):
                pass

    def _drop(self) -> None:
        with contextlib.suppress(Exception):  # it may be the connection that has failed
            if self._file is not None:
                self._file.close()
        self._file = None


_END_BYTES = 1 << 16
_MOST_LINKS = 40
"""Links that are followed from one to the next, as Linux does."""


class MissingInput(InputError):
    """A file of a dataset is not there."""


def is_url(place: str | os.PathLike[str]) -> bool:
    """Whether a folder or file carries a scheme. No absolute local path does: it holds no `//`."""
    return "://" in os.fspath(place)


def resolve_url_link(folder: str | os.PathLike[str]) -> str:
    """The folder as it is given, or the URL to which a link leads, `raw-dataset-link` of `prepare_dumps.py`.

    A link may lead there through other links.
    """
    given = os.fspath(folder)
    link = given.rstrip("/")
    with contextlib.suppress(OSError):  # it is no link, or not there
        for _ in range(_MOST_LINKS):
            target = os.readlink(link)
            if is_url(target):
                return target
            link = os.path.join(os.path.dirname(link), target)
    return given


def absolute_path(folder: str | os.PathLike[str]) -> str:
    """A local folder from the root of the file system; a URL without slashes at its end, also of a link to one.

    Raises InputError for a URL with a password, which would be written into files.
    """
    folder = resolve_url_link(folder)
    if not is_url(folder):
        return os.path.abspath(folder)
    scheme, _, rest = folder.partition("://")
    if re.match(r"[^/]*:[^/]*@", rest):
        raise InputError(
            "a URL with a password in it would be written into files",
            where=f"{scheme}://...",
            hint="give credentials in the environment",
        )
    if scheme in ("file", "local"):
        rest = os.path.abspath(rest)  # fsspec would read it from the working directory
    return f"{scheme}://{rest.rstrip('/')}"


def join_path(folder: str, name: str) -> str:
    """The path of a file below a folder."""
    return f"{absolute_path(folder)}/{name}" if is_url(folder) else os.path.join(folder, name)


def open_input(path: str) -> BinaryIO:
    """Open a file to read its bytes; below a URL, reads that fail are tried again. Raises OSError and ImportError."""
    return cast(BinaryIO, RemoteFile(path)) if is_url(path) else open(path, "rb")


def hash_file_ends(path: str) -> str:
    """SHA-256, hexadecimal, of the first and last 64 KiB of a file. Raises InputError and OSError."""
    with open_input(path) as file:
        digest = hashlib.sha256(file.read(_END_BYTES))
        end = file.seek(0, os.SEEK_END)
        file.seek(max(0, end - _END_BYTES))
        digest.update(file.read())
    return digest.hexdigest()


def list_url(url: str) -> list[tuple[str, int]]:
    """All files below a URL: their paths below it, and their bytes.

    Raises InputError where the scheme is not known or its package not installed, for lack of access to any folder,
    and where there is nothing.
    """
    with _explain_store_errors(url, missing="there is no such dataset folder"):
        import fsspec

        store, root = fsspec.core.url_to_fs(url)
        found = list(list_store_sizes(store, root).items())
    if not found:
        raise InputError("there is no file below this", where=url)
    return found


def list_store_sizes(store: Any, root: str) -> dict[str, int]:
    """Bytes of all files below a path of fsspec's `store`, by their paths below it; of a file itself by no name.

    Raises what the store raises, for lack of access to any folder too.
    """
    return {info["name"].removeprefix(root).lstrip("/"): _store_size(store, info) for info in _walk_store(store, root)}


def stat_url(url: str) -> tuple[int, int]:
    """Bytes of the file at a URL, and its time of change as `modified_time` tells it. Raises InputError."""
    with _explain_store_errors(url, missing="this file of the paths file is missing"):
        import fsspec

        store, path = fsspec.core.url_to_fs(url)
        info = retry_transient(lambda: store.info(path), url)
        return _store_size(store, info), modified_time(info)


def modified_time(info: Mapping[str, Any]) -> int:
    """When a file of a store changed, in ns, from what its store tells; 0 where it tells nothing.

    A store that tells no time, but a tag of the version, has a number made of that tag in its place: a server of web
    pages, and the hub of Hugging Face, whose tag is the hash of the content.
    """
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
        yield from store.find(root, detail=True).values()  # a store of objects lists them all at once
        return
    folders = [root]
    while folders:  # not the general `find`: it leaves out folders that cannot be read
        folder = folders.pop()
        for info in store.ls(folder, detail=True):
            if info["type"] == "directory":
                folders += [info["name"]] if info["name"].rstrip("/") != folder.rstrip("/") else []
            elif info["type"] == "file" or info.get("islink"):
                yield info


def _store_size(store: Any, info: dict[str, Any]) -> int:
    size = info.get("size")
    if size is None:  # not in a listing of web pages
        size = store.info(info["name"]).get("size")
    if size is None:
        raise InputError("the server does not tell the size of this file", where=info["name"])
    return int(size)


@contextlib.contextmanager
def _explain_store_errors(url: str, *, missing: str) -> Iterator[None]:
    try:
        yield
    except RelayrunError:
        raise
    except FileNotFoundError:
        raise MissingInput(missing, where=url) from None
    except ImportError as error:
        raise InputError(
            f"the package of this scheme cannot be imported: {(str(error).splitlines() or [''])[0]}",
            where=url,
            hint=f"pip install {_scheme_package(url.partition('://')[0])}",
        ) from None
    except Exception as error:  # an unknown scheme, no access: each package has its own
        lines = str(error).splitlines() or [type(error).__name__]
        raise InputError(
            f"fsspec cannot look at this: {lines[0]}",
            where=url,
            hint="install fsspec's package of the scheme, and set its credentials",
        ) from None


def _scheme_package(scheme: str) -> str:
    """What is to be installed for a scheme."""
    from fsspec.registry import known_implementations

    package = str(known_implementations.get(scheme, {}).get("class", "")).partition(".")[0]
    return f"'fsspec[{scheme}]'" if package in ("", "fsspec") else package


def printable(name: str) -> str:
    """A file name for the terminal: bytes that are not UTF-8 come out as `\\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")
