"""Dumps of a data set: the preprocessing-metadata folder M, and the split of the files into dumps of about equal size.

    raw-dataset-link              -> the data set folder; its target may be a URL (`s3://bucket/web`), as text
    dumps/paths_file_{i}.txt      files of dump i, not tokenized yet: paths below the data set folder, one a line
    completed-dumps/              paths files of finished dumps
    tokenized-dir-link            -> OUTPUT/TOKENIZER_NAME/DATASET_NAME; if OUTPUT is a URL, the folder of its records
    s3/ or another scheme         records of dumps whose shards lie below a URL
    dedup-link                    -> the output folder of `relayrun dumps dedup`
    tokenize-T-D.csv              one row per finished dump
    inventory.jsonl               every file below the data set folder: taken, or why not
    dump-sizes.json               bytes of each dump's files when it was prepared
    jobs.jsonl                    Slurm ids of submitted jobs
    .lock                         exclusive while dumps are prepared or submitted, shared while a dump is tokenized

The split deals files largest first onto the lightest dump (Graham's LPT rule: the heaviest dump is at most 4/3 of the
optimum), with ties broken by number of files, then dump, then path, so that the same files give the same dumps whatever
the order of the directory listing. O(files log dumps).
"""

from __future__ import annotations

import contextlib
import fnmatch
import heapq
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from relayrun.control.scheduler.factory import slurm_scheduler
from relayrun.errors import InputError, RelayrunError, combined_error, on_interrupt, refuse_unwritable
from relayrun.files import (
    append_line,
    free_space,
    fsync_directory,
    names_in,
    read_json,
    read_json_lines,
    write_atomic,
    write_json,
)
from relayrun.leftovers import remove_leftovers
from relayrun.publishing import published_folder, work_folder
from relayrun.tokens.readers import inputs, inventory
from relayrun.tokens.readers.deal_files import deal_in_ranges
from relayrun.tokens.readers.file_ranges import file_of_range, range_bytes
from relayrun.tokens.stores import urls
from relayrun.tokens.stores.urls import printable
from relayrun.tokens.tokenize import shard_folder
from relayrun.tokens.tokenize.processes import file_lock

DEDUP_WORK = "_dedup"
"""Folder of the stages in the output folder of `relayrun dumps dedup`; the inventory leaves out such names."""
DEDUPLICATION = -1
"""In place of a dump: jobs of `relayrun dumps dedup`, which read all dumps."""
_PATHS_FILE = re.compile(r"paths_file_(0|[1-9][0-9]*)\.txt")


def replace_link(link: Path, target: str) -> None:
    """Make `link` point to `target` atomically. Raises InputError if `link` is not a link."""
    if link.exists() and not link.is_symlink():
        raise InputError("a link is to be made here, but there is a file or folder", where=link)
    with work_folder(link.parent) as folder:
        fresh = os.path.join(folder, "link")
        os.symlink(target, fresh)
        os.replace(fresh, link)
    fsync_directory(link.parent)


class DumpsFolder:
    """The paths inside M, and the lock on changes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(os.path.abspath(path))
        self.dumps = self.path / "dumps"
        self.completed = self.path / "completed-dumps"
        self.raw_link = self.path / "raw-dataset-link"
        self.tokenized_link = self.path / "tokenized-dir-link"
        self.dedup_link = self.path / "dedup-link"
        self.inventory = self.path / "inventory.jsonl"
        self._jobs = self.path / "jobs.jsonl"
        self._sizes = self.path / "dump-sizes.json"

    def dataset(self) -> str:
        """Return the folder of the data set, links resolved, or its URL."""
        target = urls.resolve_url_link(self.raw_link)
        return target if urls.is_url(target) else os.path.realpath(target)

    def paths_file(self, index: int) -> Path:
        return self.dumps / f"paths_file_{index}.txt"

    def paths_files(self) -> list[Path]:
        """Return the paths files of all dumps, the finished ones last. Raises InputError if there are no dumps."""
        pending = [self.paths_file(index) for index in self.pending()]
        found = pending + [self.completed / f"paths_file_{index}.txt" for index in self.finished()]
        if not found:
            raise InputError("there are no dumps here", where=self.path, hint="`relayrun dumps prepare` makes them")
        return found

    def shards(self, index: int) -> Path:
        """Return the folder of the shards of dump `index`."""
        return self.tokenized_link.resolve() / f"dump-{index}"

    def pending(self) -> list[int]:
        """Return the numbers of the dumps to tokenize, ascending."""
        return _dump_numbers(self.dumps)

    def finished(self) -> list[int]:
        """Return the numbers of the finished dumps, ascending."""
        return _dump_numbers(self.completed)

    def finish(self, index: int) -> None:
        """Move the paths file of dump `index` to the finished ones."""
        self._move_paths_file(index, self.dumps, self.completed)

    def reopen(self, index: int) -> None:
        """Move the paths file of finished dump `index` back: the next submit tokenizes its missing shards."""
        self._move_paths_file(index, self.completed, self.dumps)

    def _move_paths_file(self, index: int, source: Path, target: Path) -> None:
        target.mkdir(exist_ok=True)
        os.replace(source / f"paths_file_{index}.txt", target / f"paths_file_{index}.txt")
        fsync_directory(target)
        fsync_directory(source)

    @contextlib.contextmanager
    def hold(self) -> Iterator[None]:
        """Lock this folder while its dumps are prepared or submitted. Raises RelayrunError if the lock is taken."""
        with file_lock(self.path / ".lock", wait=False) as held:
            if not held:
                words = "the dumps of this folder are being prepared or tokenized by another process"
                raise RelayrunError(words, where=self.path, hint="wait until it has ended")
            remove_leftovers(self.path)
            yield

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Share the lock while dumps are tokenized: nobody prepares or submits dumps meanwhile."""
        with file_lock(self.path / ".lock", shared=True):
            yield

    def write_sizes(self, sizes: dict[int, int]) -> None:
        write_json(self._sizes, {str(index): size for index, size in sorted((self.sizes() | sizes).items())})

    def sizes(self) -> dict[int, int]:
        """Return the noted bytes of the files of each dump."""
        with contextlib.suppress(FileNotFoundError, ValueError, AttributeError):
            return {int(index): int(size) for index, size in read_json(self._sizes).items()}
        return {}

    def record_job(self, job_id: str, dump: int) -> None:
        """Record that Slurm job `job_id` (an array element as `12_3`) tokenizes dump `dump`, or `DEDUPLICATION`."""
        append_line(self._jobs, {"slurm_job_id": job_id, "dump": dump})

    def live_jobs(self) -> list[str]:
        """Return recorded pending or running jobs of unfinished dumps and of deduplication. Raises SchedulerError if
        Slurm cannot tell."""
        unfinished = {*self.pending(), DEDUPLICATION}
        ids = [
            str(record["slurm_job_id"]) for record in read_json_lines(self._jobs) if record.get("dump") in unfinished
        ]
        live = slurm_scheduler().live_ids() if ids else set()  # one query for thousands of jobs
        return [job_id for job_id in dict.fromkeys(ids) if job_id in live]

    def refuse_live_jobs(self) -> None:
        """Raise RelayrunError while Slurm jobs of this folder are pending or running."""
        if live := self.live_jobs():
            names = ", ".join(live[:8]) + (f" and {len(live) - 8} others" if len(live) > 8 else "")
            words = f"dumps of this folder are pending or running as Slurm jobs {names}"
            raise RelayrunError(words, where=self.path, hint="wait for them, or cancel them with scancel")


def _dump_numbers(folder: Path) -> list[int]:
    return sorted(int(match[1]) for match in map(_PATHS_FILE.fullmatch, names_in(folder)) if match)


def dump_size(paths_file: str | os.PathLike[str]) -> int:
    """Return the bytes of all files of a paths file of a metadata folder. Raises InputError for a missing file."""
    metadata = DumpsFolder(Path(os.path.abspath(paths_file)).parent.parent)
    return sum(size for _, size, _ in inputs.stat_inputs(metadata.dataset(), inputs.read_paths_file(paths_file)))


log = logging.getLogger(__name__)

BYTES_PER_DUMP = 150_000_000_000
"""Default size of a dump: about an hour of a large node."""


@dataclass(frozen=True, kw_only=True)
class Dump:
    """One unit of tokenization. `files` are ordered largest first, or by path where large ones are cut into ranges."""

    index: int
    files: tuple[inputs.DataFile, ...]

    @classmethod
    def of(cls, index: int, names: Sequence[str], sizes: Mapping[str, int]) -> Dump:
        """Return a dump of these files and ranges; `sizes`: the bytes by file."""
        pairs = [(name, range_bytes(name, sizes[file_of_range(name)])) for name in names]
        return cls(index=index, files=tuple(inputs.DataFile(path=name, size=size) for name, size in pairs))

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)


def split_files(
    files: Sequence[inputs.DataFile], n_dumps: int, *, first_index: int = 0, dataset: str = ""
) -> list[Dump]:
    """Deal `files` below `dataset` onto `n_dumps` dumps, numbered from `first_index`: at most one per file, or in order
    and cut into ranges if one of them has the bytes of two dumps."""
    sizes = {file.path: file.size for file in sorted(files, key=lambda file: os.fsencode(file.path))}
    if dataset and (ranges := deal_in_ranges(dataset, [(*pair, 0) for pair in sizes.items()], n_dumps)):
        return [Dump.of(first_index + number, names, sizes) for number, names in enumerate(ranges)]
    count = min(n_dumps, len(files))
    parts: list[list[inputs.DataFile]] = [[] for _ in range(count)]
    heap = [(0, 0, part) for part in range(count)]  # (bytes, files, part): files of 0 bytes are spread too
    for file in sorted(files, key=lambda file: (-file.size, os.fsencode(file.path))):
        size, number, part = heap[0]
        parts[part].append(file)
        heapq.heapreplace(heap, (size + file.size, number + 1, part))
    return [Dump(index=first_index + part, files=tuple(kept)) for part, kept in enumerate(parts)]


@on_interrupt(lambda: "the dumps of before stand, or the new ones; the same command goes on")
def prepare_dumps(
    dataset_folder: str | os.PathLike[str],
    metadata_folder: str | os.PathLike[str],
    *,
    filter_in: Sequence[str] = (),
    filter_out: Sequence[str] = (),
    n_dumps: int | None = None,
    all_splits: bool = False,
    endings: Sequence[str] = (),
) -> list[Dump]:
    """Write the inventory, and the paths files of all files that are in no finished dump; return these dumps, numbered
    after the finished ones. All of `dumps/` is replaced at once. Raises InputError for refused files and if no file is
    left, RelayrunError while jobs of this folder live, or if a half-tokenized dump would change under its output."""
    if n_dumps is not None and n_dumps < 1:
        raise InputError("the number of dumps must be at least 1", where="--n-dumps")
    dataset = urls.absolute_path(dataset_folder)
    metadata = DumpsFolder(metadata_folder)
    files_there = inputs.take_inventory(dataset, filter_in=filter_in, filter_out=filter_out, endings=endings)
    _refuse_incomplete(dataset, [file.path for file in files_there.left_out])
    files_there = inventory.check_sets(dataset, files_there, filter_in=filter_in, all_splits=all_splits)
    refuse_unwritable(metadata.path)
    metadata.path.mkdir(parents=True, exist_ok=True)
    with metadata.hold():
        metadata.refuse_live_jobs()
        finished = metadata.finished()
        if finished and metadata.raw_link.is_symlink() and os.readlink(metadata.raw_link) != dataset:
            words = f"finished dumps of this folder belong to {os.readlink(metadata.raw_link)}"
            raise InputError(words, where=metadata.path, hint="use one metadata folder per dataset")
        begun = _begun_dumps(metadata, dataset, files_there)
        done = {file_of_range(name) for dump in begun.values() for name in dump.names}
        files_there, twins = inventory.leave_out_twins(dataset, files_there, done)
        found = files_there.taken
        inventory.write_inventory(metadata.inventory, dataset, files_there, twins)
        inventory.log_inventory(files_there, twins)
        files_there.refuse()
        again = {index: dump for index, dump in begun.items() if dump.again}
        files = [file for file in found if file.path not in done]
        if not files and not again:
            why = f"all {len(found)} files are in finished dumps" if found else "no file fits"
            hint = f"files end in {', '.join(endings) or inputs.data_endings()}; look at the filters"
            raise InputError(f"nothing to tokenize: {why}", where=dataset, hint=hint)
        sizes = {file.path: file.size for file in found}
        dumps = [Dump.of(index, dump.names, sizes) for index, dump in again.items()]
        number = n_dumps or sum(file.size for file in files) // BYTES_PER_DUMP + 1
        place = "" if endings else dataset  # a reader of datatrove reads whole files
        dumps += split_files(files, number, first_index=max(begun, default=-1) + 1, dataset=place)
        contents = {dump.index: inputs.paths_file_bytes(file.path for file in dump.files) for dump in dumps}
        replace_link(metadata.raw_link, dataset)
        metadata.write_sizes({dump.index: dump.size for dump in dumps})
        with published_folder(metadata.dumps, replaces=_check_paths_files) as fresh:
            for index, content in contents.items():
                write_atomic(fresh / f"paths_file_{index}.txt", content)
        for index, dump in again.items():  # last: until then the next prepare finds the same
            if dump.gone:
                shard_folder.remove_from_record(metadata.shards(index), inputs=dump.gone)
            (metadata.completed / f"paths_file_{index}.txt").unlink(missing_ok=True)
    return dumps


def _refuse_incomplete(dataset: str, names: Sequence[str]) -> None:
    """Raise InputError if a dataset is the output of a deduplication whose documents are not all there."""
    if f"{DEDUP_WORK}/settings.json" in names:
        with urls.open_input(urls.join_path(dataset, f"{DEDUP_WORK}/settings.json")) as file:
            if json.load(file)["stages"]["kept"] > len(fnmatch.filter(names, f"{DEDUP_WORK}/records/kept-*.json")):
                hint = "`relayrun dumps dedup` goes on with it"
                raise InputError("this deduplication is not complete", where=dataset, hint=hint)


class _BegunDump(NamedTuple):
    """A dump with shards."""

    names: list[str]
    """Its files, without those that are gone."""
    gone: list[str]
    again: bool
    """It is to be submitted: it is pending, or files changed or are gone."""


def _begun_dumps(metadata: DumpsFolder, dataset: str, there: inputs.Inventory) -> dict[int, _BegunDump]:
    """Return the finished dumps, those with shards, and those with other ranges of their files, compared with their
    files by the record; name what changed.
    Raises RelayrunError if a file of a dump that is to be submitted is left out now."""
    taken, finished = {file.path for file in there.taken}, metadata.finished()
    sizes = {file.path: file.size for file in there.taken} | {file.path: file.size for file in there.left_out}
    found: dict[int, _BegunDump] = {}
    listed = {index: inputs.read_paths_file(metadata.completed / f"paths_file_{index}.txt") for index in finished}
    waiting = {index: inputs.read_paths_file(metadata.paths_file(index)) for index in metadata.pending()}
    listed |= {index: names for index, names in waiting.items() if shard_folder.has_shards(metadata.shards(index))}
    cut = {file_of_range(name) for names in listed.values() for name in names if file_of_range(name) != name}
    listed |= {index: names for index, names in waiting.items() if not cut.isdisjoint(map(file_of_range, names))}
    for index, names in sorted(listed.items()):
        pending, folder = index not in finished, metadata.shards(index)
        changed, gone = shard_folder.stale_inputs(folder, dataset, sizes)
        if len(gone) == len(names):
            log.warning("dump %d: all its files are gone: its shards stay", index)
            changed, gone = [], []
        for what, files in (("changed", changed), ("are gone", gone)):
            if files:
                words = "dump %d: %s of its files %s since it was tokenized, and their shards are made again: %s"
                log.warning(words, index, f"{len(files):,}", what, inventory.first_names(files))
        names = [name for name in names if file_of_range(name) not in gone]
        found[index] = _BegunDump(names, gone, again=pending or bool(changed or gone))
        if found[index].again and (left_out := [name for name in names if file_of_range(name) not in taken]):
            words = f"{len(left_out):,} of its files would be left out now; the first is {printable(left_out[0])}"
            hint = "give the options of before, or delete the folder of its shards and its paths file"
            raise RelayrunError(f"dump {index} is tokenized in part, and {words}", where=folder, hint=hint)
    return found


def _check_paths_files(dumps: Path) -> None:
    """Raise InputError if `dumps/` holds anything but paths files."""
    if others := [name for name in os.listdir(dumps) if not _PATHS_FILE.fullmatch(name)]:
        words = f"this folder, which is made anew, holds something that is no paths file: {others[0]}"
        raise InputError(words, where=dumps.parent / "dumps", hint="move it away")


def print_dumps(dumps: Sequence[Dump], *, seconds_per_gb: float) -> None:
    """Print files, GB (10^9 bytes) and estimated hours of every dump, and the totals."""
    files = [file for dump in dumps for file in dump.files]
    rows = [(f"dump {dump.index}", len(dump.files), dump.size) for dump in dumps]
    rows.append(("total", len(files), sum(file.size for file in files)))
    print(f"{'':<12} {'files':>9} {'GB':>12} {'hours':>8}")
    for name, count, size in rows:
        print(f"{name:<12} {count:>9,} {size / 1e9:>12,.3f} {size / 1e9 * seconds_per_gb / 3600:>8,.2f}")


def merged_prefix(dataset: Path, dump: str) -> Path:
    return dataset.with_name(f"{dataset.name}-merge") / f"{dump}-merged"


def unmerged_dumps(dataset: Path) -> list[str]:
    """Return the names of the dumps that are not merged yet. Raises RelayrunError for torn shards, for different
    tokenizers or token types, and for lack of space."""
    from relayrun.tokens.shards.merge import inspect_inputs, refuse_stale_merge  # on demand: numpy
    from relayrun.tokens.shards.prefixes import find_prefixes

    dumps = sorted(path.name for path in dataset.glob("dump-*") if path.is_dir())
    if not dumps:
        hint = "give the folder that holds dump-0, dump-1, ..."
        raise InputError("there is no dump in this folder", where=dataset, hint=hint)
    names: list[str] = []
    errors: list[RelayrunError] = []
    size = 0
    for name in dumps:
        output = merged_prefix(dataset, name)
        try:
            prefixes = find_prefixes([dataset / name], listed=True)
            if output.with_name(f"{output.name}.idx").exists():
                refuse_stale_merge(output, prefixes)
                log.info("%s: merged already", name)
                continue
            names.append(name)
            size += inspect_inputs(prefixes, output).bytes
        except InputError as error:
            errors.append(error)
    if errors:
        raise combined_error(errors, "dumps cannot be merged")
    if names and (free := free_space(merged_prefix(dataset, names[0]))) < size:
        words = f"the merged shards take {size / 1e9:,.1f} GB, and {free / 1e9:,.1f} GB are free"
        hint = "make room; or make that folder a link to one on another file system"
        raise InputError(words, where=merged_prefix(dataset, names[0]).parent, hint=hint)
    return names
