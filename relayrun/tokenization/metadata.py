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
from collections.abc import Iterable, Iterator
from pathlib import Path

from relayrun.errors import InputError, RelayrunError
from relayrun.files import append_line, fsync_directory, read_json, read_lines, write_json
from relayrun.scheduler.slurm import Slurm
from relayrun.tokenization import stores
from relayrun.tokenization.locks import locked

_PATHS_FILE = re.compile(r"paths_file_(0|[1-9][0-9]*)\.txt")

InputFile = tuple[str, int, int]
"""Path below the dataset folder, bytes, time of change in ns."""


def printable(name: str) -> str:
    """A file name for the terminal: bytes that are not UTF-8 come out as `\\udcff`."""
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def read_paths_file(path: str | os.PathLike[str]) -> list[str]:
    """The paths of a paths file, in its order. Empty lines name no file and are skipped.

    Raises InputError for a missing file, an absolute path, a path given twice, or no path at all.
    """
    try:
        content = Path(path).read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise InputError("there is no such paths file", where=path, hint="prepare_dumps.py writes them") from None
    names: dict[str, None] = {}
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line:
            continue
        name = os.fsdecode(line)
        where = f"{path}:{number}"
        if b"\0" in line or os.path.isabs(name):
            raise InputError("a paths file holds paths below the dataset folder, one a line", where=where)
        if name in names:
            raise InputError(f"this path is listed twice: {printable(name)}", where=where)
        names[name] = None
    if not names:
        raise InputError("the paths file lists no file", where=path)
    return list(names)


def stat_inputs(dataset: str | os.PathLike[str], names: list[str]) -> list[InputFile]:
    """Size and time of change of `names` below `dataset`. Raises InputError naming what is missing.

    `dataset` may be a URL, see `stores.stat`.
    """
    if stores.is_url(dataset):
        return [(name, *stores.stat(stores.join(os.fspath(dataset), name))) for name in names]
    if not os.path.isdir(dataset):
        raise InputError("there is no such dataset folder", where=dataset)
    inputs: list[InputFile] = []
    for name in names:
        try:
            status = os.stat(os.path.join(dataset, name))
        except (FileNotFoundError, NotADirectoryError):
            raise InputError(
                "this file of the paths file is missing",
                where=printable(os.path.join(dataset, name)),
                hint="run prepare_dumps.py again if the dataset has changed",
            ) from None
        inputs.append((name, status.st_size, status.st_mtime_ns))
    return inputs


def paths_file_bytes(names: Iterable[str]) -> bytes:
    """The content of a paths file. Raises InputError for a name that holds a newline."""
    lines = []
    for name in names:
        if "\n" in name:
            raise InputError(
                "a file name with a newline cannot stand in a paths file",
                where=repr(name),
                hint="rename the file, or leave it out with --filter-out",
            )
        lines.append(os.fsencode(name) + b"\n")
    return b"".join(lines)


def replace_link(link: Path, target: str) -> None:
    """Make `link` point to `target`, in one step. Raises InputError if something else than a link is there."""
    if link.exists() and not link.is_symlink():
        raise InputError("a link is to be made here, but there is a file or folder", where=link)
    with tempfile.TemporaryDirectory(dir=link.parent, prefix=".tmp-") as folder:
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
        with contextlib.suppress(OSError):
            target = os.readlink(self.raw_link)
            if stores.is_url(target):
                return target
        return os.path.realpath(self.raw_link)

    def paths_file(self, index: int) -> Path:
        return self.dumps / f"paths_file_{index}.txt"

    def pending(self) -> list[int]:
        """Numbers of the dumps that are not tokenized yet, ascending."""
        return _numbers(self.dumps)

    def finished(self) -> list[int]:
        """Numbers of the dumps that are, ascending."""
        return _numbers(self.completed)

    def finish(self, index: int) -> None:
        """Move the paths file of dump `index` to the finished ones."""
        self.completed.mkdir(exist_ok=True)
        os.replace(self.paths_file(index), self.completed / f"paths_file_{index}.txt")
        fsync_directory(self.completed)
        fsync_directory(self.dumps)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Keep everybody else from preparing or submitting dumps of this folder. Raises RelayrunError if taken."""
        with locked(self.path / ".lock", wait=False) as held:
            if not held:
                raise RelayrunError(
                    "the dumps of this folder are being prepared or tokenized by another process",
                    where=self.path,
                    hint="wait until it has ended",
                )
            yield

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """While dumps are tokenized; several may be, but nobody prepares or submits meanwhile."""
        with locked(self.path / ".lock", shared=True):
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


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for match in map(_PATHS_FILE.fullmatch, names) if match)


def dump_size(paths_file: str | os.PathLike[str]) -> int:
    """Bytes of all files of a paths file in `dumps/` or `completed-dumps/`. Raises InputError if one is missing."""
    metadata = MetadataFolder(Path(os.path.abspath(paths_file)).parent.parent)
    return sum(size for _, size, _ in stat_inputs(metadata.dataset(), read_paths_file(paths_file)))
