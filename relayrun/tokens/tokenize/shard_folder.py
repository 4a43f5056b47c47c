"""A folder of shards: the record `tokenization.json`, and the progress of the tasks that write it.

    settings   settings of the shards; all shards of a folder share them
    source     place of the data set, of a copy of the tokenizer, and of the shards if they lie below a URL
    parts      by shard: its files, or ranges of large ones; files that join the dump later get shards of their own
    tokenizer  compared with a run's tokenizer: fingerprint of the ids, size of the vocabulary
    shards     by finished shard: a TaskRecord

A task is done if its inputs are unchanged and its shard has the recorded checksums. So an interrupted run continues,
and only a changed file or a damaged shard is tokenized again. Shards may lie below a URL: then the folder has the
record and the progress alone, a shard counts by the record, and a copy of it is put there when all shards are done.

Each running task rewrites `.progress/SHARD.json` every ten seconds (or `RELAYRUN_PROGRESS_SECONDS`), and removes it at
the end. A file older than `STALE_SECONDS` belongs to a task that was killed, or that waits for its file system.
"""

from __future__ import annotations

import contextlib
import fnmatch
import gzip
import itertools
import json
import logging
import os
import shutil
import socket
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash

from relayrun.errors import InputError
from relayrun.files import names_in, read_json, write_atomic
from relayrun.tokens.readers.deal_files import deal_in_ranges
from relayrun.tokens.readers.faults import MAX_EXAMPLES, LineFaults
from relayrun.tokens.readers.file_ranges import file_of_range, range_bytes, split_range
from relayrun.tokens.readers.inputs import MISSING_FILE, InputFile, stat_inputs
from relayrun.tokens.shards.prefixes import SHARD_SUFFIXES
from relayrun.tokens.shards.shard import FOLDER_RECORD
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.direct_io import file_checksum
from relayrun.tokens.stores.urls import hash_file_ends, is_url, join_path, printable
from relayrun.tokens.tokenize.processes import file_lock, slurm_job_id

PROGRESS_FOLDER = ".progress"
PROGRESS_VARIABLE = "RELAYRUN_PROGRESS_SECONDS"
STALE_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class RunningTask:
    """Last report of a task. Times are seconds since 1970."""

    shard: str
    node: str
    job: str
    """Slurm's id of the job; empty outside Slurm."""
    started: float
    at: float
    documents: int
    tokens: int
    bytes_read: int
    """Bytes of the finished files."""

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / (self.at - self.started) if self.at > self.started else 0.0


class TaskProgress:
    """The progress file of one task. A full or slow disk does not stop the task."""

    def __init__(self, output: str | os.PathLike[str], shard: str) -> None:
        self._path = Path(output, PROGRESS_FOLDER, f"{shard}.json")
        self._seconds = float(os.environ.get(PROGRESS_VARIABLE) or 10)
        self._next = 0.0
        self._ended = threading.Event()
        self.bytes_read = 0
        """Bytes of the finished files; the task updates it."""
        node = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._task = {"shard": shard, "node": node, "job": slurm_job_id() or "", "started": time.time()}
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(exist_ok=True)
        self.say(documents=0, tokens=0)

    def say(self, *, documents: int, tokens: int) -> None:
        """Write the progress, at most once per interval. Cheap enough for every batch."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + self._seconds
        counts = {"documents": documents, "tokens": tokens, "bytes_read": self.bytes_read}
        with contextlib.suppress(OSError):
            write_atomic(self._path, json.dumps({**self._task, "at": time.time(), **counts}) + "\n", durable=False)

    def repeat(self, record: TaskRecord) -> None:
        """Write the same again and again until `end`, while the task waits for a store."""
        while not self._ended.wait(self._seconds):
            self.say(documents=record.documents, tokens=record.tokens)

    def end(self) -> None:
        """Remove the progress file."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._path.unlink()


def read_progress(output: str | os.PathLike[str]) -> list[RunningTask]:
    """Return the last reports of the tasks of a folder of shards, including killed tasks."""
    found = []
    for path in sorted(Path(output, PROGRESS_FOLDER).glob("[!.]*.json")):
        with contextlib.suppress(OSError, ValueError, TypeError):  # removed meanwhile, or of another version
            found.append(RunningTask(**read_json(path)))
    return found


def clear_progress(output: str | os.PathLike[str]) -> None:
    """Remove the reports of an earlier run."""
    shutil.rmtree(Path(output, PROGRESS_FOLDER), ignore_errors=True)


log = logging.getLogger(__name__)

RECORD_FORMAT = "relayrun tokenization, version 3"
_FILES = ("{}.idx", "{}.bin", "exclusions/{}.jsonl.gz", "exclusions/{}.parquet")
_WHOLE, _ENDS, _RANGE = "xxh3-128:", "ends:", "range:"
_BEGIN_AGAIN = "use another output folder, or delete this one to begin again"


@dataclass(frozen=True, kw_only=True)
class SkippedFile:
    """A file skipped with `--on-error skip-file` or `skip-line`."""

    file: str
    error: str
    reason: str = "unreadable"
    """In few words, for counting."""


@dataclass(kw_only=True)
class TaskRecord:
    """Result of one task; `tokens` is 0 if it has no shard."""

    inputs: list[InputFile]
    fingerprints: list[str] = field(default_factory=list)
    """The fingerprint of each input, see `file_content_hash`; empty for a skipped file."""
    rows: int = 0
    """Rows or lines with a text or a null."""
    documents: int = 0
    file_documents: list[int] = field(default_factory=list)
    """Documents of each input."""
    file_rows: list[int] = field(default_factory=list)
    """Rows or lines of each input, also those that gave no document."""
    tokens: int = 0
    largest_id: int | None = None
    """The largest id in the shard; None if the shard is empty."""
    empty_documents: int = 0
    null_documents: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    """Losses of the tokenizer by name; see `encode.losses`."""
    routed_documents: int = 0
    """Documents that went to the reference instead of the fast engine."""
    engine: str = ""
    engine_version: str = ""
    xxh3_128: dict[str, str] = field(default_factory=dict)
    """Checksums of the .bin and the .idx."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """By step: its documents in and out, and the dropped ones by reason."""
    exclusions: str = ""
    """Checksum of the file of dropped documents; empty without steps."""
    stored: dict[str, Sequence[int]] = field(default_factory=dict)
    """Bytes and modification time of each file of `files` below a URL; empty for a shard in the folder."""
    on_error: str = ""
    """Treatment of unreadable input, see `TokenizeOptions`."""
    skipped: list[SkippedFile] = field(default_factory=list)
    bad_lines: dict[str, int] = field(default_factory=dict)
    """Lines and rows skipped with `--on-error skip-line`, by reason."""
    bad_line_examples: list[str] = field(default_factory=list)
    """The first skipped lines, each with its place."""
    started: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0

    def files(self, shard: str, exclusions: str) -> dict[str, str]:
        """Return the checksums of the files of `shard`, in the order in which a store gets them: the .idx last.
        `exclusions`: the format of dropped documents."""
        found = {os.fspath(exclusion_file("", shard, exclusions)): self.exclusions} if self.exclusions else {}
        return found | {f"{shard}.{suffix}": self.xxh3_128[suffix] for suffix in sorted(self.xxh3_128)}

    def add_faults(self, faults: LineFaults) -> None:
        """Add the skipped lines of one more file."""
        if faults.counts:
            self.bad_lines = dict(Counter(self.bad_lines) + Counter(faults.counts))
            self.bad_line_examples = (self.bad_line_examples + faults.examples)[:MAX_EXAMPLES]


def describe_step_counts(tasks: Iterable[Sequence[Mapping[str, Any]]], tokens: int = 0) -> str:
    """Describe the documents in and out of each step of tasks with the same steps, and the share of the bytes that it
    leaves; empty without steps. `tokens`: of the shards; those behind each step are estimated by its bytes."""
    steps = [*zip(*tasks, strict=True)]
    totals = [
        sum((Counter({name: n for name, n in each.items() if isinstance(n, int)}) for each in of), Counter())
        for of in steps
    ]
    found, density = [], tokens / max(totals[-1]["bytes_out"], 1) if totals else 0
    for of, total in zip(steps, totals, strict=True):
        share = f"{total['bytes_out'] / total['bytes_in']:.0%} of the bytes" if total["bytes_in"] else ""
        share += f", about {total['bytes_out'] * density / 1e6:,.1f} Mtok" if share and density else ""
        found.append(f"{of[0]['step']} {total['in']:,} in, {total['out']:,} out" + (f" ({share})" if share else ""))
    return "; ".join(found)


def content_hash(content: bytes) -> str:
    """Return the fingerprint of a local file with this content."""
    return _WHOLE + xxhash.xxh3_128_hexdigest(content)


def file_content_hash(path: str) -> str:
    """Return a fingerprint of the bytes of a file.

    A local file: `xxh3-128:` and the checksum of all of it, read once more from memory. A range: `range:` and the
    checksum of its bytes, behind which its last row may end. Below a URL, to avoid a second fetch: `ends:` and the
    sha256 of the first and last 64 KiB of the file. Empty for an unreadable file and a pipe.
    """
    path, begin, end = split_range(path)
    if not is_url(path):
        with contextlib.suppress(OSError):
            kind = _RANGE if begin or end else _WHOLE
            return kind + file_checksum(path, begin, end) if os.path.isfile(path) else ""
        return ""
    try:
        return _ENDS + hash_file_ends(path)
    except (OSError, InputError):
        return ""


def is_unchanged(path: str, now: InputFile, then: InputFile, known: str) -> bool:
    """True if an input is the same as when it was read, with the fingerprint `known`. Equal size and equal time
    suffice. After another time all bytes must be equal, which a fingerprint of the ends (URLs) cannot prove."""
    if now[:2] != then[:2]:
        return False
    if now[2] != then[2]:
        return known.startswith(_WHOLE) and file_content_hash(path) == known
    return now[2] != 0 or not known.startswith(_ENDS) or file_content_hash(path) == known


class ShardFolder:
    """A folder of shards and its record. A single process writes it."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        settings: dict[str, Any],
        files: Sequence[InputFile],
        *,
        tokenizer: dict[str, Any],
        source: dict[str, str],
    ) -> None:
        """Open or begin the record. Raises InputError if the folder holds shards made with other settings.

        `settings["tasks"]`: new files are dealt onto at most so many shards. `tokenizer`: compared with a run's
        tokenizer. `source`: place of the data set and of a copy of the tokenizer, for later checks; both may move. Its
        `store`: the URL of the shards.
        """
        self._source = source
        self.store = source.get("store", "")
        self.path = Path(path)
        self.settings = settings
        self.tokenizer = tokenizer
        self._file = self.path / FOLDER_RECORD
        self.parts: dict[str, list[str]] = {}
        self.tasks: dict[str, TaskRecord] = {}
        known, hint = settings, _BEGIN_AGAIN
        with contextlib.suppress(FileNotFoundError):
            record = FolderRecord.read(self.path)
            known, self.parts, self.tasks = record.settings, record.parts, record.tasks
        different = sorted(name for name in settings.keys() | known.keys() if settings.get(name) != known.get(name))
        if self._dealt() - {file_of_range(file[0]) for file in files}:
            different.append("paths")
        self._there = set(names_in(self.path))
        if self.store:
            with contextlib.suppress(urls.MissingInput):
                self._there = {name for name, _ in urls.list_url(self.store)}
        shards = {name[:-4] for name in self._there if name.endswith(SHARD_SUFFIXES)}
        if self.store and shards and not self._file.exists():
            raise InputError("another metadata folder made the shards here", where=self.store, hint=hint)
        if different and shards:
            raise InputError(
                f"this folder holds shards of another choice of {', '.join(different)}", where=self.path, hint=hint
            )
        if different:
            self.parts, self.tasks = {}, {}
        self._deal(files)
        if strange := sorted(shards - set(self.parts)):
            words = f"this folder holds shards that are not of this run, for example {strange[0]}"
            raise InputError(words, where=self.path, hint=hint)

    def _dealt(self) -> set[str]:
        return {file_of_range(name) for part in self.parts.values() for name in part}

    def _deal(self, files: Sequence[InputFile]) -> None:
        """Deal every file without a part onto new parts: file i of them into part i mod `tasks`. If a file has the
        bytes of two parts, all are dealt in order, and cut; not before steps, which know a document by its row."""
        dealt, tasks, first = self._dealt(), self.settings["tasks"], len(self.parts)
        new = [file for file in files if file_of_range(file[0]) not in dealt]
        parts = [[file[0] for file in new[number::tasks]] for number in range(min(tasks, len(new)))]
        if "pipeline" not in self.settings:
            parts = deal_in_ranges(self._source["dataset"], new, tasks) or parts
        self.parts |= {shard_name(first + number): part for number, part in enumerate(parts)}

    def fault(self, name: str, inputs: Sequence[InputFile], dataset: str) -> str | None:
        """Return why shard `name` must be made (again); None if it is whole and made from exactly these inputs: its
        files are compared with the recorded checksums (`file_fault`)."""
        task = self.tasks.get(name)
        if task is None:
            return "not made yet"
        if [file[0] for file in task.inputs] != [file[0] for file in inputs]:
            return "it is to hold other files"
        for now, then, digest in zip(inputs, task.inputs, task.fingerprints, strict=True):
            if not is_unchanged(join_path(dataset, now[0]), now, then, digest):
                return f"{printable(now[0])} is not what it was"
        for file, checksum in task.files(name, exclusion_format(self.settings)).items():
            path = join_path(self.store or str(self.path), file)
            if (fault := file_fault(path, checksum, task.stored.get(file, ()))) is not None:
                return fault
        return None

    def drop(self, name: str) -> None:
        """Remove shard `name` from the record in memory and its files, the .idx first: a .bin alone is not a shard."""
        self.tasks.pop(name, None)
        for file in (FOLDER_RECORD, *(form.format(name) for form in _FILES)) if self.store else ():
            if file in self._there:
                urls.remove_url(join_path(self.store, file))
                self._there.discard(file)
        for form, end in itertools.product(_FILES, ("", ".tmp")):
            (self.path / f"{form.format(name)}{end}").unlink(missing_ok=True)

    def drop_temporary(self) -> None:
        """Remove the files of killed workers."""
        for name, form in itertools.product(self.parts, _FILES):
            (self.path / f"{form.format(name)}.tmp").unlink(missing_ok=True)

    def publish(self) -> None:
        """Put a copy of the record beside the shards of a URL, once all of them are there."""
        if self.store:
            urls.put_file(self._file, join_path(self.store, FOLDER_RECORD), file_checksum(self._file))

    def add(self, name: str, task: TaskRecord) -> None:
        """Record a finished task."""
        self.tasks[name] = task
        self.write()

    def write(self) -> None:
        """Write the record atomically."""
        record = {
            "format": RECORD_FORMAT,
            "settings": self.settings,
            "tokenizer": self.tokenizer,
            "source": self._source,
            "parts": self.parts,
            "shards": dict(sorted(self.tasks.items())),
        }
        # ASCII: JSON restores names that are not UTF-8. Without indent: each task writes this again for all files
        write_atomic(self._file, json.dumps(record, default=vars) + "\n")


@dataclass(frozen=True, kw_only=True)
class FolderRecord:
    """The record of a folder of shards, for reading."""

    settings: dict[str, Any]
    parts: dict[str, list[str]]
    tasks: dict[str, TaskRecord]
    dataset: str
    """Folder or URL that the paths of the inputs start at."""
    tokenizer: str
    """Path of a copy of the serialized tokenizer."""
    store: str
    """URL of the shards; empty if they lie in the folder."""

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> FolderRecord:
        """Raises FileNotFoundError for a missing record, InputError for an invalid one."""
        file = Path(folder, FOLDER_RECORD)
        try:
            record = read_json(file)
            if record["format"] != RECORD_FORMAT:
                words = "the record of tokenization here is of another version"
                raise InputError(words, where=file, hint=_BEGIN_AGAIN)
            return cls(
                settings=record["settings"],
                parts=record["parts"],
                tasks={name: _task_from_json(task) for name, task in record["shards"].items()},
                dataset=record["source"]["dataset"],
                tokenizer=record["source"]["tokenizer"],
                store=record["source"].get("store", ""),
            )
        except (ValueError, KeyError, TypeError, AttributeError):
            raise InputError("not a record of tokenization", where=file, hint=_BEGIN_AGAIN) from None


def has_shards(folder: Path) -> bool:
    """True if a folder has shards, or a record of a URL, where a shard may be that is not on record yet."""
    with contextlib.suppress(FileNotFoundError, InputError):
        return bool(FolderRecord.read(folder).store) or any(folder.glob("*.bin"))
    return any(folder.glob("*.bin"))


def file_fault(path: str, checksum: str, known: Sequence[int] = ()) -> str | None:
    """Return why a file of a shard, local or at a URL, is not that of its record; None if it is. It is read unless it
    has the bytes and the modification time `known`."""
    try:
        same = any(known[1:]) and [*known] == [*urls.stat_file(path)]
        found = checksum if same else urls.content_checksum(path)
    except (FileNotFoundError, urls.MissingInput):
        return f"{path} is gone"
    return None if found == checksum else f"{path} is not what its record says (xxh3-128)"


def remove_from_record(folder: str | os.PathLike[str], *names: str, inputs: Collection[str] = ()) -> None:
    """Remove shards `names` from the record of a folder, and `inputs` with the shards that hold them, so that the next
    run makes these shards again. Warns if it cannot."""
    try:
        with file_lock(Path(folder, ".lock"), wait=False) as held:
            if not held:
                raise OSError("another process writes shards here")
            record = read_json(Path(folder, FOLDER_RECORD))
            for shard, files in record["parts"].items():
                record["parts"][shard] = [name for name in files if file_of_range(name) not in inputs]
                if shard in names or len(record["parts"][shard]) < len(files):
                    record["shards"].pop(shard, None)
            write_atomic(Path(folder, FOLDER_RECORD), json.dumps(record, indent=1) + "\n")
    except (OSError, ValueError, KeyError) as error:
        log.warning("%s: %s cannot be struck from the record: %s", folder, ", ".join([*names, *inputs]), error)


def stale_inputs(folder: str | os.PathLike[str], dataset: str, sizes: Mapping[str, int]) -> tuple[list[str], list[str]]:
    """Return the files of the shards of `folder` that changed since they were read, and those that are gone; none
    without a record. Local files are compared by `is_unchanged`; below a URL by `sizes`, the bytes by path."""
    try:
        record = FolderRecord.read(folder)
    except (FileNotFoundError, InputError):
        return [], []
    known = [pair for task in record.tasks.values() for pair in zip(task.inputs, task.fingerprints, strict=True)]
    if is_url(dataset):
        now = [
            (name, range_bytes(name, sizes.get(file := file_of_range(name), 0)), changed if file in sizes else -1)
            for (name, _, changed), _ in known
        ]
    else:
        now = stat_inputs(dataset, [then[0] for then, _ in known], missing_ok=True)
    changed, gone = dict[str, None](), dict[str, None]()
    for there, (then, digest) in zip(now, known, strict=True):
        if there[1:] == MISSING_FILE != then[1:]:
            gone[file_of_range(then[0])] = None
        elif there != then and not is_unchanged(join_path(dataset, then[0]), there, then, digest):
            changed[file_of_range(then[0])] = None
    return [*changed], [*gone]


def exclusion_format(settings: Mapping[str, Any]) -> str:
    """Return the format of dropped documents in a folder with these recorded settings, which name it if there are
    steps."""
    return str(settings.get("exclusions", "jsonl.gz"))


def exclusion_file(folder: str | os.PathLike[str], shard: str, form: str) -> Path:
    """Return the file of the documents that steps dropped from a shard."""
    return Path(folder, "exclusions", f"{shard}.{form}")


def read_exclusions(folder: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield shard and record of the documents that steps dropped, of all folders of shards below a folder or a URL."""
    below = (
        [join_path(folder, name) for name, _ in urls.list_url(folder)]
        if is_url(folder)
        else map(str, Path(folder).rglob("*"))
    )
    for file in sorted(fnmatch.filter(below, "*/exclusions/*.*[!p]")):  # not .tmp
        with urls.open_input(file) as raw:
            if file.endswith(".parquet"):
                from pyarrow.parquet import ParquetFile  # on demand: most have none

                for batch in ParquetFile(raw).iter_batches(100):
                    rows = [row | {"scores": json.loads(row["scores"])} for row in batch.to_pylist()]
                    yield from ((Path(file).stem, row) for row in rows)
            else:
                with gzip.open(raw, "rt", encoding="utf-8") as lines:
                    yield from ((Path(file).name.removesuffix(".jsonl.gz"), json.loads(line)) for line in lines)


def shard_name(rank: int) -> str:
    """Return the name of the shard of task `rank`, without suffix."""
    return f"{rank:05d}_tokens"


def _task_from_json(values: dict[str, Any]) -> TaskRecord:
    inputs = [(str(name), int(size), int(changed)) for name, size, changed in values["inputs"]]
    skipped = [SkippedFile(**file) for file in values["skipped"]]
    return TaskRecord(**{**values, "inputs": inputs, "skipped": skipped})
