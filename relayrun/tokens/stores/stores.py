"""Where a dataset lies: a local folder, or below a URL that fsspec knows (`s3://bucket/web`).

Credentials come from the environment, as the package of the scheme reads them. Local names are opened literally;
fsspec, which gives `::` and undecodable bytes a meaning of their own, is used for URLs alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, BinaryIO, cast

from relayrun.errors import InputError, RelayrunError
from relayrun.tokens.stores.remote import RemoteFile, retry_transient

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
    """Bytes of the file at a URL, and its time of change as `time_of` tells it. Raises InputError."""
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
