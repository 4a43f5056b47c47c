"""Files below URLs through failures that pass: what fails is tried again after a pause, from where it stood.

A store that answers slowly, closes a connection, or says 500 or 429, costs a pause and no shard of hours.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

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
    """Return what `call` returns; where it fails in a way that may pass, call it again after each of `PAUSES`.

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
        """Open it. Raises as `again` does."""
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
