"""The preprocessing-metadata folder M of a dataset: which dumps there are and which are done.

    raw-dataset-link              -> the dataset folder; its target may be a URL (`s3://bucket/web`), as text
    dumps/paths_file_{i}.txt      files of dump i, not tokenized yet: paths below the dataset folder, one a line
    completed-dumps/              where a finished dump's paths file goes
    tokenized-dir-link            -> OUTPUT/TOKENIZER_NAME/DATASET_NAME
    tokenize-T-D.csv              one row per finished dump
    dump-sizes.json               bytes of each dump's files when it was prepared
    jobs.jsonl                    Slurm ids of submitted jobs
    .lock                         held alone while dumps are prepared or submitted, shared while one is tokenized

A paths file is taken literally: a line is a path, blanks, quotes and undecodable bytes included
(`os.fsencode`), and only a newline ends it.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import InputError, RelayrunError
from relayrun.files import (
    append_line,
    fsync_directory,
    read_json,
    read_lines,
    remove_leftovers,
    temporary_prefix,
    write_json,
)
from relayrun.tokens.readers.inputs import read_paths_file, stat_inputs
from relayrun.tokens.stores import stores
from relayrun.tokens.tokenize.locks import file_lock

_PATHS_FILE = re.compile(r"paths_file_(0|[1-9][0-9]*)\.txt")


def replace_link(link: Path, target: str) -> None:
    """Make `link` point to `target`, in one step. Raises InputError if something else than a link is there."""
    if link.exists() and not link.is_symlink():
        raise InputError("a link is to be made here, but there is a file or folder", where=link)
    with tempfile.TemporaryDirectory(dir=link.parent, prefix=temporary_prefix()) as folder:
        fresh = os.path.join(folder, "link")
        os.symlink(target, fresh)
        os.replace(fresh, link)
    fsync_directory(link.parent)


class MetadataFolder:
    """The names inside M, and who may change it."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.dumps = self.path / "dumps"
        self.completed = self.path / "completed-dumps"
        self.raw_link = self.path / "raw-dataset-link"
        self.tokenized_link = self.path / "tokenized-dir-link"
        self._jobs = self.path / "jobs.jsonl"
        self._sizes = self.path / "dump-sizes.json"

    def dataset(self) -> str:
        """Where paths files start: a folder, links resolved, or a URL."""
        target = stores.resolve_url_link(self.raw_link)
        return target if stores.is_url(target) else os.path.realpath(target)

    def paths_file(self, index: int) -> Path:
        return self.dumps / f"paths_file_{index}.txt"

    def pending(self) -> list[int]:
        """Numbers of the dumps that are not tokenized yet, ascending."""
        return _dump_numbers(self.dumps)

    def finished(self) -> list[int]:
        """Numbers of the dumps that are, ascending."""
        return _dump_numbers(self.completed)

    def finish(self, index: int) -> None:
        """Move the paths file of dump `index` to the finished ones."""
        self.completed.mkdir(exist_ok=True)
        os.replace(self.paths_file(index), self.completed / f"paths_file_{index}.txt")
        fsync_directory(self.completed)
        fsync_directory(self.dumps)

    def reopen(self, index: int) -> None:
        """Move the paths file of finished dump `index` back: the next submit tokenizes it again, as far as needed."""
        self.dumps.mkdir(exist_ok=True)
        os.replace(self.completed / f"paths_file_{index}.txt", self.paths_file(index))
        fsync_directory(self.dumps)
        fsync_directory(self.completed)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep everybody else from preparing or submitting dumps of this folder. Raises RelayrunError if taken."""
        with file_lock(self.path / ".lock", wait=False) as held:
            if not held:
                raise RelayrunError(
                    "the dumps of this folder are being prepared or tokenized by another process",
                    where=self.path,
                    hint="wait until it has ended",
                )
            remove_leftovers(self.path)
            yield

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While dumps are tokenized; several may be, but nobody prepares or submits meanwhile."""
        with file_lock(self.path / ".lock", shared=True):
            yield

    def write_sizes(self, sizes: dict[int, int]) -> None:
        """Note the bytes of dumps, beside those that are noted."""
        write_json(self._sizes, {str(index): size for index, size in sorted((self.sizes() | sizes).items())})

    def sizes(self) -> dict[int, int]:
        """Bytes of the files of each dump, as far as they are noted."""
        with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):
            return {int(index): int(size) for index, size in read_json(self._sizes).items()}
        return {}

    def record_job(self, job_id: str, dump: int) -> None:
        """Remember that Slurm job `job_id` (an array element as `12_3`) tokenizes dump `dump`."""
        append_line(self._jobs, {"slurm_job_id": job_id, "dump": dump})

    def live_jobs(self) -> list[str]:
        """Ids of recorded jobs of unfinished dumps that are queued or running.

        Raises SchedulerError if there are such records and Slurm cannot be asked.
        """
        unfinished = set(self.pending())
        ids = [str(record["slurm_job_id"]) for record in read_lines(self._jobs) if record.get("dump") in unfinished]
        live = Slurm().live_ids() if ids else set()  # one question: there may be thousands of jobs
        return [job_id for job_id in dict.fromkeys(ids) if job_id in live]

    def refuse_live_jobs(self) -> None:
        """Raises RelayrunError while Slurm jobs of this folder are queued or running."""
        if live := self.live_jobs():
            names = ", ".join(live[:8]) + (f" and {len(live) - 8} others" if len(live) > 8 else "")
            raise RelayrunError(
                f"dumps of this folder are pending or running as Slurm jobs {names}",
                where=self.path,
                hint="wait for them, or cancel them with scancel",
            )


def _dump_numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_PATHS_FILE.fullmatch, names) if match)


def dump_size(paths_file: str | os.PathLike[str]) -> int:
    """Bytes of all files of a paths file in `dumps/` or `completed-dumps/`. Raises InputError if one is missing."""
    metadata = MetadataFolder(Path(os.path.abspath(paths_file)).parent.parent)
    return sum(size for _, size, _ in stat_inputs(metadata.dataset(), read_paths_file(paths_file)))
