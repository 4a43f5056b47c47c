"""A folder of shards: the record `tokenization.json`, and the progress of the tasks that write it.

    settings   what the shards were made with; a folder holds shards of one choice alone
    source     where the data set and a copy of the tokenizer lie
    parts      by shard: the files that it is to hold; files that join the dump later get shards of their own
    tokenizer  what a run compares with its own: fingerprint of what decides ids, size of the vocabulary
    shards     by finished shard: a TaskRecord

A task counts as done if its inputs are unchanged and its shard has the checksums noted here. So an interrupted run goes
on where it was, and a changed file or a damaged shard alone is tokenized again.

Each running task rewrites `.progress/SHARD.json` every ten seconds (or `RELAYRUN_PROGRESS_SECONDS`), and removes it at
the end. A file that has not changed for `STALE_SECONDS` belongs to a task that was killed, or that waits for its file
system.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from relayrun.errors import InputError
from relayrun.files import read_json, write_atomic
from relayrun.tokens.readers.inputs import MAX_EXAMPLES, InputFile, LineFaults
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.stores.urls import hash_file_ends, is_url, join_path, printable
from relayrun.tokens.tokenize.processes import file_lock, slurm_job_id

PROGRESS_FOLDER = ".progress"
PROGRESS_VARIABLE = "RELAYRUN_PROGRESS_SECONDS"
STALE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class RunningTask:
    """One task as it last said. Times are seconds since 1970."""

    shard: str
    node: str
    job: str
    """Slurm's id of the job; empty elsewhere."""
    started: float
    at: float
    documents: int
    tokens: int
    bytes_read: int
    """Bytes of the files that are done."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.at - self.started) if self.at > self.started else 0.0


class TaskProgress:
    """The file of one task. A disk that is full or slow to take it does not stop the task."""

    def __init__(self, output: str | os.PathLike[str], shard: str) -> None:
        self._path = Path(output, PROGRESS_FOLDER, f"{shard}.json")
        self._seconds = float(os.environ.get(PROGRESS_VARIABLE) or 10)
        self._next = 0.0
        self.bytes_read = 0
        """Bytes of the files that are done; the task counts them here."""
        self._last = RunningTask(
            shard=shard,
            node=os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
            job=slurm_job_id() or "",
            started=time.time(),
            at=time.time(),
            documents=0,
            tokens=0,
            bytes_read=0,
        )
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        self.say(documents=0, tokens=0)

    def say(self, *, documents: int, tokens: int) -> None:
        """Write, unless the last time was a moment ago. Cheap enough to be called for every batch."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._seconds
        record = asdict(self._last) | {
            "at": time.time(),
            "documents": documents,
            "tokens": tokens,
            "bytes_read": self.bytes_read,
        }
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps(record) + "\n", durable=False)

    def end(self) -> None:
        """The task is over."""
        with contextlib.suppress(OSError):
            self._path.unlink()


def read_progress(output: str | os.PathLike[str]) -> list[RunningTask]:
    """What the tasks of a folder of shards last said, those that were killed included."""
    found = []
    for path in sorted(Path(output, PROGRESS_FOLDER).glob("[!.]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # gone, or of another version
            found.append(RunningTask(**read_json(path)))
    return found


def clear_progress(output: str | os.PathLike[str]) -> None:
    """Forget the tasks of an earlier run."""
    shutil.rmtree(Path(output, PROGRESS_FOLDER), ignore_errors=True)


log = logging.getLogger(__name__)

RECORD_FILE = "tokenization.json"
RECORD_FORMAT = "relayrun tokenization, version 3"
_WHOLE, _ENDS = "xxh3-128:", "ends:"


@dataclass(frozen=True, kw_only=True)
class SkippedFile:
    """A file that was left out, with `--on-error skip-file` or `skip-line`."""

    file: str
    error: str
    reason: str = "unreadable"
    """In few words: such files are counted together."""


@dataclass(kw_only=True)
class TaskRecord:
    """One task; `tokens` is 0 where it has no shard."""

    inputs: list[InputFile]
    fingerprints: list[str] = field(default_factory=list)
    """The fingerprint of each input, see `file_fingerprint`; empty for one that was left out."""
    documents: int = 0
    file_documents: list[int] = field(default_factory=list)
    """Documents of each input."""
    tokens: int = 0
    largest_id: int | None = None
    """The largest id in the shard; None where it is empty, and in records of earlier versions."""
    empty_documents: int = 0
    null_documents: int = 0
    routed_documents: int = 0
    """Documents that another engine took over from a faster one."""
    engine: str = ""
    engine_version: str = ""
    xxh3_128: dict[str, str] = field(default_factory=dict)
    """Checksums of the .bin and the .idx."""
    on_error: str = ""
    """What became of what cannot be read; empty in records of earlier versions."""
    skipped: list[SkippedFile] = field(default_factory=list)
    bad_lines: dict[str, int] = field(default_factory=dict)
    """Lines and rows that were left out, with `--on-error skip-line`, by reason."""
    bad_line_examples: list[str] = field(default_factory=list)
    """The first of them, each with its place."""
    started: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0

    def counts(self) -> tuple[int, int, int]:
        """What `restore` takes back: documents of all three kinds."""
        return self.documents, self.empty_documents, self.null_documents

    def restore(self, counts: tuple[int, int, int]) -> None:
        self.documents, self.empty_documents, self.null_documents = counts

    def add_faults(self, faults: LineFaults) -> None:
        """Note the lines of one more file that were left out."""
        self.bad_lines = dict(Counter(self.bad_lines) + Counter(faults.counts))
        self.bad_line_examples = (self.bad_line_examples + faults.examples)[:MAX_EXAMPLES]


def file_fingerprint(path: str) -> str:
    """What identifies the bytes of a file.

    A local file: `xxh3-128:` and the checksum of all of it, read once more from memory. Below a URL, where that would
    fetch it twice: `ends:` and the sha256 of its first and last 64 KiB. Empty: it cannot be read, or is a pipe.
    """
    if not is_url(path):
        with contextlib.suppress(OSError):
            return _WHOLE + file_checksum(path) if os.path.isfile(path) else ""
        return ""
    try:
        return _ENDS + hash_file_ends(path)
    except (OSError, InputError):
        return ""


def is_unchanged(path: str, now: InputFile, then: InputFile, known: str) -> bool:
    """Whether an input is what it was when it was read, with the fingerprint `known`.

    Size and time of change alone are looked at where the time is known and the same. Where it is another one, all bytes
    must be the same: fingerprints of the ends alone, of URLs and of earlier versions, cannot tell that.
    """
    if now[:2] != then[:2]:
        return False
    if now[2] != then[2]:
        return known.startswith(_WHOLE) and file_fingerprint(path) == known
    no_time = now[2] == 0 and known.startswith(_ENDS)
    return not no_time or file_fingerprint(path) == known


class ShardFolder:
    """A folder of shards and its record. One process writes it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: dict[str, Any],
        files: Sequence[str],
        *,
        tokenizer: dict[str, Any] | None = None,
        source: dict[str, str] | None = None,
    ) -> None:
        """Open or begin the record. Raises InputError if the folder holds shards made in another way.

        `settings["tasks"]` is the most shards that new files are dealt onto. `tokenizer`: what a run compares.
        `source`: where the dataset and a copy of the tokenizer lie, for who checks the shards later; they may move.
        """
        self._source = source
        self.path = Path(path)
        self.settings = settings
        self.tokenizer = tokenizer or {}
        self._file = self.path / RECORD_FILE
        self.parts: dict[str, list[str]] = {}
        self.tasks: dict[str, TaskRecord] = {}
        hint = "use another output folder, or delete this one to begin again"
        known: dict[str, Any] = {}
        try:
            record = read_json(self._file)
            if record.get("format") != RECORD_FORMAT:
                raise InputError("the record of tokenization here is of another version", where=self._file, hint=hint)
            known = record["settings"]
            self.parts = record["parts"]
            self.tasks = {name: _task_from_json(task) for name, task in record["shards"].items()}
        except FileNotFoundError:
            known = settings
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("not a record of tokenization", where=self._file, hint=hint) from None
        different = sorted(name for name in settings.keys() | known.keys() if settings.get(name) != known.get(name))
        if {name for part in self.parts.values() for name in part} - set(files):
            different.append("paths")
        shards = {file.name.rsplit(".", 1)[0] for suffix in ("bin", "idx") for file in self.path.glob(f"*.{suffix}")}
        if different and shards:
            raise InputError(
                f"this folder holds shards of another choice of {', '.join(different)}", where=self.path, hint=hint
            )
        if different:
            self.parts, self.tasks = {}, {}
        self._deal(files)
        if strange := sorted(shards - set(self.parts)):
            raise InputError(
                f"this folder holds shards that are not of this run, for example {strange[0]}",
                where=self.path,
                hint=hint,
            )

    def _deal(self, files: Sequence[str]) -> None:
        """Give every file that is in no part yet a place in a new one: file i of them in part i mod `tasks`."""
        dealt = {name for part in self.parts.values() for name in part}
        new = [name for name in files if name not in dealt]
        count, first = min(self.settings["tasks"], len(new)), len(self.parts)
        for number in range(count):
            self.parts[shard_name(first + number)] = new[number::count]

    def fault(self, name: str, inputs: Sequence[InputFile], dataset: str) -> str | None:
        """Why shard `name` must be made (again); None where it is made of exactly these inputs, and whole.

        Its files are read in full: a checksum that is not that of the record is a fault.
        """
        task = self.tasks.get(name)
        if task is None:
            return "not made yet"
        if [file[0] for file in task.inputs] != [file[0] for file in inputs]:
            return "it is to hold other files"
        known = [*task.fingerprints, *[""] * (len(inputs) - len(task.fingerprints))]
        for now, then, digest in zip(inputs, task.inputs, known, strict=True):
            if not is_unchanged(join_path(dataset, now[0]), now, then, digest):
                return f"{printable(now[0])} is not what it was"
        if task.tokens == 0:
            return None
        try:
            if Shard.open(self.path / name).tokens != task.tokens:
                return "it has another number of tokens than its record says"
        except InputError as error:
            return error.message
        for suffix, digest in task.xxh3_128.items():
            if file_checksum(self.path / f"{name}.{suffix}") != digest:
                return f"its .{suffix} is not what its record says (xxh3-128)"
        return None

    def drop(self, name: str) -> None:
        """Remove what there is of shard `name`, the .idx first: a .bin alone is no shard."""
        for suffix in (".idx", ".bin", ".idx.tmp", ".bin.tmp"):
            (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def drop_temporary(self) -> None:
        """Remove what killed workers left."""
        for name in self.parts:
            for suffix in (".idx.tmp", ".bin.tmp"):
                (self.path / f"{name}{suffix}").unlink(missing_ok=True)

    def add(self, name: str, task: TaskRecord) -> None:
        """Note a finished task."""
        self.tasks[name] = task
        self.write()

    def write(self) -> None:
        """Write the record; whole, or as it was."""
        record = {
            "format": RECORD_FORMAT,
            "settings": self.settings,
            "tokenizer": self.tokenizer,
            "source": self._source,
            "parts": self.parts,
            "shards": {name: asdict(self.tasks[name]) for name in sorted(self.tasks)},
        }
        # ASCII: names that are not UTF-8 come back from JSON as they were
        write_atomic(self._file, json.dumps(record, indent=1) + "\n")


@dataclass(frozen=True, kw_only=True)
class FolderRecord:
    """The record of a folder of shards, for who looks at it."""

    settings: dict[str, Any]
    tasks: dict[str, TaskRecord]
    dataset: str | None
    """Where the paths of the inputs start; None in records of earlier versions."""
    tokenizer: str | None
    """Where a copy of the serialized tokenizer was put."""

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> FolderRecord:
        """Raises FileNotFoundError where there is none, InputError for a file that is no record."""
        file = Path(folder, RECORD_FILE)
        try:
            record = read_json(file)
            source = record.get("source") or {}
            return cls(
                settings=record["settings"],
                tasks={name: _task_from_json(task) for name, task in record["shards"].items()},
                dataset=source.get("dataset"),
                tokenizer=source.get("tokenizer"),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("not a record of tokenization", where=file) from None


def remove_from_record(folder: str | os.PathLike[str], name: str) -> None:
    """Take shard `name` out of the record of a folder, so that the next run makes it again. Warns if it cannot."""
    try:
        with file_lock(Path(folder, ".lock"), wait=False) as held:
            if not held:
                raise OSError("another process writes shards here")
            record = read_json(Path(folder, RECORD_FILE))
            del record["shards"][name]
            write_atomic(Path(folder, RECORD_FILE), json.dumps(record, indent=1) + "\n")
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: %s cannot be struck from the record: %s", folder, name, error)


def shard_name(rank: int) -> str:
    """Name of the shard of task `rank`, without suffix."""
    return f"{rank:05d}_tokens"


def _task_from_json(values: dict[str, Any]) -> TaskRecord:
    inputs = [(str(name), int(size), int(changed)) for name, size, changed in values["inputs"]]
    skipped = [SkippedFile(**file) for file in values["skipped"]]
    return TaskRecord(**{**values, "inputs": inputs, "skipped": skipped})
