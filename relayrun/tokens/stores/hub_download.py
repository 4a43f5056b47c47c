"""Files of a data set of the Hugging Face hub, fetched once and compared with the hub's checksums.

huggingface_hub fetches, and resumes a file where an interrupted run stopped. A complete file gets its final name; then
its checksum is compared and noted in SHA256SUMS, which `sha256sum -c` reads. A file that is noted there and has its
size is neither fetched nor read again.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from relayrun.errors import InputError, RelayrunError
from relayrun.files import stat_of, write_atomic
from relayrun.tokens.stores.urls import first_line, retry_transient

log = logging.getLogger(__name__)

CHECKSUMS_FILE = "SHA256SUMS"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class HubFile:
    """A file of a data set, as the hub lists it."""

    path: str
    size: int
    digest: str
    """Hexadecimal: SHA-256 of a large file (Git LFS), else its SHA-1 as a Git blob."""
    large: bool

    def check(self, file: Path) -> str | None:
        """Return the SHA-256 of a file on disk; None if it is another file."""
        with file.open("rb") as data:
            found = own = hashlib.file_digest(data, "sha256").hexdigest()
        if not self.large:
            blob = f"blob {self.size}\0".encode() + file.read_bytes()
            own = hashlib.sha1(blob, usedforsecurity=False).hexdigest()
        return found if own == self.digest else None


def download_dataset(
    repository: str,
    include: Sequence[str],
    output: Path,
    *,
    revision: str = "main",
    at_once: int = 4,
    endpoint: str | None = None,
    report: Callable[[str], None] = print,
) -> int:
    """Fetch the files of a data set whose paths match one of the patterns; return their number.

    Files keep their paths below `output`. `at_once`: files fetched at a time. `report` gets a line per checked file.
    Raises InputError if the hub has no such data set, no file matches, a checksum differs, or the connection keeps
    failing; fetched files stay for the next run.
    """
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    commit, files = _retry(lambda: _list_files(api, repository, revision), repository)
    chosen = [file for file in files if any(fnmatch.fnmatchcase(file.path, pattern) for pattern in include)]
    if not chosen:
        folders = sorted({file.path.rpartition("/")[0] or "." for file in files})
        hint = f"its folders: {', '.join(folders[:8])}{' ...' if len(folders) > 8 else ''}"
        raise InputError(f"none of its {len(files):,} files fits {', '.join(include)}", where=repository, hint=hint)
    output.mkdir(parents=True, exist_ok=True)
    sums = _read_sums(output / CHECKSUMS_FILE)
    missing = [file for file in chosen if not _is_downloaded(file, output, sums)]
    left, total = sum(file.size for file in missing), sum(file.size for file in chosen)
    report(
        f"{repository} at {commit[:12]}: {len(chosen):,} files, {total / 1e9:,.2f} GB; {left / 1e9:,.2f} GB to fetch"
    )
    failed: list[RelayrunError] = []
    with ThreadPoolExecutor(max(1, at_once)) as pool:
        waiting = {pool.submit(_fetch_file, api, repository, commit, file, output): file for file in missing}
        for number, future in enumerate(as_completed(waiting), start=1):
            file = waiting[future]
            try:
                sums[file.path] = future.result()
            except RelayrunError as error:
                failed.append(error)
                continue
            lines = (f"{digest}  {name}\n" for name, digest in sorted(sums.items()))
            write_atomic(output / CHECKSUMS_FILE, "".join(lines))
            report(f"{number} of {len(missing)}: {file.path}, {file.size:,} bytes, checksum right")
    if failed:
        raise failed[0]
    return len(chosen)


def _list_files(api: Any, repository: str, revision: str) -> tuple[str, list[HubFile]]:
    from huggingface_hub.hf_api import RepoFile

    commit = str(api.repo_info(repository, repo_type="dataset", revision=revision).sha)
    entries = api.list_repo_tree(repository, repo_type="dataset", revision=commit, recursive=True)
    return commit, [
        HubFile(
            path=entry.path,
            size=entry.size,
            digest=entry.blob_id if entry.lfs is None else entry.lfs.sha256,
            large=entry.lfs is not None,
        )
        for entry in entries
        if isinstance(entry, RepoFile)
    ]


def _fetch_file(api: Any, repository: str, commit: str, file: HubFile, output: Path) -> str:
    """Fetch a file and return its SHA-256. A file with a wrong checksum is fetched once more."""
    place = {"repo_type": "dataset", "revision": commit, "local_dir": output}
    for force in (False, True):
        fetch = functools.partial(api.hf_hub_download, repository, file.path, **place, force_download=force)
        here = Path(_retry(fetch, f"{repository}/{file.path}"))
        if (found := file.check(here)) is not None:
            return found
        here.unlink()
        log.warning("%s: its checksum is wrong; %s", file.path, "given up" if force else "fetched once more")
    words = "this file arrived twice with a checksum that is not the hub's"
    hint = "run again later, or tell the owner of the data set"
    raise InputError(words, where=f"{repository}/{file.path}", hint=hint)


def _retry(call: Callable[[], T], where: str) -> T:
    """Return what a call of the hub returns, as `retry_transient` does. Raises InputError for what no retry cures."""
    from huggingface_hub import errors

    missing = errors.RepositoryNotFoundError, errors.RevisionNotFoundError

    def answer() -> T:
        try:
            return call()
        except (*missing, errors.HFValidationError, errors.OfflineModeIsEnabled) as error:
            hint = "look at its name and revision; a closed data set needs HF_TOKEN in the environment"
            if isinstance(error, errors.GatedRepoError):
                hint = "accept its terms on the hub's page, and set HF_TOKEN in the environment"
            raise InputError(f"the hub does not give this: {first_line(error)}", where=where, hint=hint) from None
        except Exception as error:  # OSError, and httpx's errors, which do not derive from it
            if isinstance(error, errors.EntryNotFoundError) and not isinstance(error, errors.LocalEntryNotFoundError):
                raise InputError("the hub lists this file and does not have it", where=where) from None
            # of this machine's file system: only its errors carry a number and a name
            if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
                raise InputError(f"cannot be written: {error}", where=error.filename or where) from None
            raise ConnectionError(first_line(error)) from None

    return retry_transient(answer, where)


def _is_downloaded(file: HubFile, output: Path, sums: dict[str, str]) -> bool:
    """True if the file was checked before: noted, present, and of the size that the hub lists."""
    noted = sums.get(file.path)
    if noted is None or (file.large and noted != file.digest):
        return False
    found = stat_of(output / file.path)
    return found is not None and found.st_size == file.size


def _read_sums(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    lines = (line.split("  ", 1) for line in path.read_text(encoding="utf-8").splitlines())
    return {name: digest for digest, name in lines}
