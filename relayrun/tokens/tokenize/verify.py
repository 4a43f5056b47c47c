"""Verify shards against the files that they were made from, by a sample of documents or all; also whole finished dumps.

A shard's record (`tokenization.json` beside it) names its files and their place. The reference is `tokenizers` itself
(`Tokenizer.encode`, one document at a time for a sample), whatever engine made the shard.

A sample reads one file of a shard once, and compares some documents; the shard's bytes choose them, so that a shard has
always the same sample. `full` makes the shard again in a temporary folder and compares checksums: many times the work
of a fast engine. A finished dump with faults is opened again: the next submit makes its faulty shards anew.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import logging
import os
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np

from relayrun.errors import InputError, RelayrunError
from relayrun.files import read_json, write_json
from relayrun.progress import Progress, count
from relayrun.publishing import work_folder
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.faults import LineFaults
from relayrun.tokens.readers.inputs import MISSING_FILE, stat_inputs
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shards.checks import verify_shards
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.shards.shard import FOLDER_RECORD, Shard
from relayrun.tokens.stores import urls
from relayrun.tokens.tokenize.dumps import DumpsFolder
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.tokenizer import DocumentFraming, load_definition, load_tokenizer
from relayrun.tokens.tokenize.options import OnError, TokenizeOptions
from relayrun.tokens.tokenize.processes import run_tasks
from relayrun.tokens.tokenize.shard_folder import (
    FolderRecord,
    TaskRecord,
    exclusion_format,
    file_fault,
    is_unchanged,
    remove_from_record,
)
from relayrun.tokens.tokenize.shard_task import ShardTask, TokenizeContext, tokenize_shard
from relayrun.tokens.tokenize.steps import describe_steps

log = logging.getLogger(__name__)

SAMPLED_DOCUMENTS = 64
"""Documents of a shard that are compared."""

_MAX_SAMPLED_BYTES = 1_000_000
"""Bytes of a document of a sample: the reference needs a hundred times as much memory."""


@dataclass(frozen=True, kw_only=True)
class SourceComparison:
    """One shard against its files. `fault`: the difference; `note`: the reason why it was not compared."""

    prefix: str
    documents: int = 0
    """Compared documents."""
    undecoded: int = 0
    """Compared documents whose ids do not decode to their text."""
    fault: str | None = None
    note: str | None = None
    stale: bool = False
    """A file of the shard changed since; `note` names it."""


def compare_with_source(
    prefixes: Sequence[str],
    *,
    workers: int,
    full: bool = False,
    tokenizer: str | None = None,
    temp_dir: str | None = None,
    report: Callable[[SourceComparison], None] = lambda compared: None,
) -> list[SourceComparison]:
    """Compare shards with the files that they were made from; `report` gets each shard when it is done. `tokenizer`
    replaces a recorded copy that is gone. A shard that differs is removed from its record, so that the next run of its
    tokenization makes it again. Links to one shard count once; shards without a record are skipped."""
    real = {os.path.realpath(prefix + ".bin").removesuffix(".bin"): prefix for prefix in reversed(prefixes)}
    known = {prefix: name for prefix, name in real.items() if _folder_record(os.path.dirname(prefix)) is not None}
    done: list[SourceComparison] = []

    def on_done(prefix: str, compared: SourceComparison) -> None:
        done.append(compared)
        count(1)
        if compared.fault is not None:
            remove_from_record(os.path.dirname(prefix), os.path.basename(prefix))
        report(compared)

    task = functools.partial(_compare_shard, full=full, tokenizer=tokenizer, temp_dir=temp_dir)
    with Progress("comparing with the source", len(known), "shards"):
        run_tasks(task, sorted(known), max(workers, 1), on_done, where="the comparison with the source")
    return done


def print_comparison(compared: SourceComparison) -> None:
    """Print the fault of a shard, or the reason why it was not compared."""
    if compared.fault is not None:
        print(f"{compared.prefix}: {compared.fault}", flush=True)
    elif compared.note is not None:
        _warn_once(os.path.dirname(compared.prefix), compared.note)


@functools.cache
def _warn_once(folder: str, note: str) -> None:
    log.warning("%s: shards are not compared with their files: %s", folder, note)


def _folder_record(folder: str) -> FolderRecord | None:
    try:
        return _cached_folder_record(folder, os.stat(os.path.join(folder, FOLDER_RECORD)).st_mtime_ns)
    except (FileNotFoundError, InputError):
        return None


@functools.lru_cache(maxsize=64)
def _cached_folder_record(folder: str, changed: int) -> FolderRecord:
    return FolderRecord.read(folder)


def _compare_shard(prefix: str, *, full: bool, tokenizer: str | None, temp_dir: str | None) -> SourceComparison:
    folder, name = os.path.split(prefix)
    record = _folder_record(folder)
    task = record.tasks.get(name) if record is not None else None
    if record is None or task is None:
        return SourceComparison(prefix=prefix, note="its record does not know it")
    try:
        definition = _recorded_tokenizer(record, tokenizer)
        files = stat_inputs(record.dataset, [file[0] for file in task.inputs], missing_ok=True)
        for now, then, digest in zip(files, task.inputs, task.fingerprints, strict=True):
            if not is_unchanged(urls.join_path(record.dataset, now[0]), now, then, digest):
                gone = now[1:] == MISSING_FILE
                words = f"{urls.printable(now[0])} {'is gone' if gone else 'is not what it was'}"
                return SourceComparison(prefix=prefix, note=words, stale=not gone)
        source = _Source(record=record, task=task, definition=definition, shard=Shard.open(prefix))
        return source.compare_all(temp_dir) if full else source.compare_sample()
    except (RelayrunError, OSError) as error:
        return SourceComparison(prefix=prefix, note=urls.first_line(error))


def _recorded_tokenizer(record: FolderRecord, given: str | None) -> str:
    """Return the serialized tokenizer that made a folder's shards. Raises InputError if it is not available."""
    wanted = record.settings["tokenizer"]
    if given is not None:
        for special_text in (False, True):
            loaded = load_tokenizer(TokenizeOptions(tokenizer=given, append_eod="no", special_text=special_text))
            if loaded.fingerprint == wanted:
                return loaded.definition
    elif os.path.isfile(record.tokenizer):
        text = Path(record.tokenizer).read_text(encoding="utf-8")
        if hashlib.sha256(text.encode()).hexdigest() == wanted:
            return text
    words = "this is not the tokenizer that made the shards" if given else "the copy of their tokenizer is gone"
    raise InputError(words, where=given or record.tokenizer, hint="give the one that made them with --tokenizer")


@dataclass(frozen=True, kw_only=True)
class _Source:
    record: FolderRecord
    task: TaskRecord
    definition: str
    shard: Shard

    @property
    def framing(self) -> DocumentFraming:
        settings = self.record.settings
        return DocumentFraming(
            bos_id=settings["bos"],
            eod_id=settings["eos"],
            dtype=settings["token type"],
            keep_empty=settings["empty documents"] == "kept",
        )

    def compare_sample(self) -> SourceComparison:
        """Compare some documents of one file."""
        if "pipeline" in self.record.settings:
            note = "steps made its texts; compare all of it with --full"
            return SourceComparison(prefix=self.shard.prefix, note=note)
        counts, prefix = self.task.file_documents, self.shard.prefix
        full_files = [number for number, count in enumerate(counts) if count]
        generator = random.Random(self.task.xxh3_128.get("bin"))
        number = generator.choice(full_files)
        first, count = sum(counts[:number]), counts[number]
        wanted = sorted(generator.sample(range(count), min(SAMPLED_DOCUMENTS, count)))
        texts, found = self._chosen(number, set(wanted))
        if found != count:  # texts without ids: only tokenizing all texts tells which document is which
            return SourceComparison(
                prefix=prefix, note=f"{found:,} texts gave {count:,} documents; compare all of it with --full"
            )
        tokenizer, undecoded = _reference_tokenizer(self.definition), 0
        for place, text in sorted(texts.items()):
            ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids, np.uint32)
            undecoded += tokenizer.decode(ids.tolist(), skip_special_tokens=False) != text
            expected, _ = self.framing.apply(ids, np.array([len(ids)], np.int64))
            if not np.array_equal(expected, _document_ids(self.shard, first + place)):
                file = urls.printable(self.task.inputs[number][0])
                fault = f"document {first + place} has other ids than its text, document {place} of {file}"
                return SourceComparison(prefix=prefix, documents=len(texts), fault=fault)
        return SourceComparison(prefix=prefix, documents=len(texts), undecoded=undecoded)

    def _chosen(self, number: int, wanted: set[int]) -> tuple[dict[int, str], int]:
        """Return the texts of the documents `wanted` of a file, by number, and the file's number of documents."""
        texts: dict[int, str] = {}
        count = 0
        for piece in self._texts(number):
            if len(piece) or self.framing.keep_empty:
                if count in wanted and len(piece) <= _MAX_SAMPLED_BYTES:
                    texts[count] = str(piece, "utf-8")
                count += 1
        return texts, count

    def _texts(self, number: int) -> Iterator[memoryview]:
        path = urls.join_path(self.record.dataset, self.task.inputs[number][0])
        faults = LineFaults(skip=bool(self.task.bad_lines))
        column, size = self.record.settings["column"], TokenizeOptions.default("batch_bytes")
        for array in read_column(path, column, batch_bytes=size, scratch=tempfile.gettempdir(), faults=faults):
            yield from PackedTexts.from_arrow(array.drop_null()).views()

    def compare_all(self, temp_dir: str | None) -> SourceComparison:
        """Make the whole shard again and compare checksums."""
        known = {name: self.record.settings[name] for name in ("pipeline", "reader") if name in self.record.settings}
        pipeline = tuple({each["step"]: each["arguments"]} for each in known.get("pipeline", ()))
        reader = {known["reader"]["step"]: known["reader"]["arguments"]} if "reader" in known else None
        if known and describe_steps(pipeline, reader) != known:
            return SourceComparison(prefix=self.shard.prefix, note="its steps have other versions now")
        options = TokenizeOptions(
            tokenizer="",
            column=self.record.settings["column"],
            engine="huggingface",
            reader=reader,
            pipeline=pipeline,
            on_step_error="drop",  # with "fail" there would be no shard if a step had raised
            on_error=cast(OnError, self.task.on_error),
        )
        name = os.path.basename(self.shard.prefix)
        with work_folder(temp_dir) as folder:
            definition = Path(folder, "tokenizer.json")
            definition.write_text(self.definition, encoding="utf-8")
            tokenizer, sample = _reference_tokenizer(self.definition), PackedTexts.of([])
            job = TokenizeContext(
                dataset=self.record.dataset,
                output=str(folder),
                definition=str(definition),
                fingerprint=self.record.settings["tokenizer"],
                selection=select_engine("huggingface", tokenizer, sample, log.warning, definition=self.definition),
                framing=self.framing,
                options=options,
            )
            again = tokenize_shard(job, ShardTask(name=name, inputs=tuple(self.task.inputs)))
            fault = None
            if again.xxh3_128 != self.task.xxh3_128:
                fault = _first_difference(self.shard, again, os.path.join(folder, name))
        return SourceComparison(prefix=self.shard.prefix, documents=again.documents, fault=fault)


def _first_difference(shard: Shard, again: TaskRecord, prefix: str) -> str:
    if not again.tokens:
        return "its files hold no document"
    other = Shard.open(prefix)
    for number in range(min(shard.documents, other.documents)):
        if not np.array_equal(_document_ids(shard, number), _document_ids(other, number)):
            return f"document {number} has other ids than its text"
    return f"it has {shard.documents:,} documents, its files have {other.documents:,}"


def _document_ids(shard: Shard, number: int) -> Any:
    first, last = (int(each) for each in shard.bounds()[number : number + 2]) if number < shard.documents else (0, 0)
    if first == last:
        return np.empty(0, shard.dtype)
    count = int(shard.lengths()[first:last].sum())
    return np.fromfile(shard.prefix + ".bin", shard.dtype, count, offset=int(shard.offsets()[first]))


_reference_tokenizer = functools.lru_cache(maxsize=2)(load_definition)


@dataclass(frozen=True, kw_only=True)
class DumpCheckResult:
    """One finished dump and the faults of its shards."""

    index: int
    shards: int
    documents: int
    """Documents that were tokenized again from their files."""
    undecoded: int = 0
    """Compared documents whose ids do not decode to their text."""
    faults: tuple[str, ...]
    closed: str | None = None
    """Reason for which a dump with faults could not be opened again."""

    def summary(self) -> str:
        """Return one line for the terminal, and one for each fault."""
        lines = [f"dump {self.index}: {fault}" for fault in self.faults]
        end = "opened again: submit, and what is wrong is made anew" if self.faults else "no fault"
        if self.faults and self.closed is not None:
            end = f"stays finished ({self.closed})"
        head = f"dump {self.index}: {self.shards:,} shards, {self.documents:,} documents tokenized again"
        head += f" ({self.undecoded:,} do not decode to their text)" if self.undecoded else ""
        return "\n".join([*lines, f"{head}: {end}"])


def verify_dumps(
    metadata_folder: str | os.PathLike[str],
    *,
    workers: int,
    full: bool = False,
    temp_dir: str | None = None,
    report: Callable[[DumpCheckResult], None] = lambda verified: None,
) -> list[DumpCheckResult]:
    """Check the shards of every finished dump by their checksums, and a sample of documents (`full`: all) by their
    files; for a URL in place of the folder the shards there, by the records beside them. The paths file of a dump with
    faults moves back to `dumps/`, so that the next submit makes its faulty shards again and keeps the others. Raises
    InputError if no dump is finished."""
    if urls.is_url(metadata_folder):
        return _verify_url(urls.absolute_path(metadata_folder), report, full, workers, temp_dir)
    metadata = DumpsFolder(metadata_folder)
    if not metadata.finished():
        raise InputError("no dump is finished here", where=metadata.path, hint="`relayrun dumps status` tells more")
    done = []
    for index in metadata.finished():
        verified = _verify_dump(metadata.shards(index), index, full, workers, temp_dir)
        if verified.faults:
            try:
                with metadata.hold():
                    metadata.reopen(index)
            except RelayrunError as error:
                verified = replace(verified, closed=f"{error.message}: verify it again later")
        report(verified)
        done.append(verified)
    return done


def _verify_url(url: str, report: Callable[[DumpCheckResult], None], *how: Any) -> list[DumpCheckResult]:
    done = []
    records = [name for name, _ in urls.list_url(url) if os.path.basename(name) == FOLDER_RECORD]
    if not records:
        raise InputError("no dump is finished here", where=url, hint="`relayrun dumps status` tells more")
    for number, name in enumerate(sorted(records)):
        store = urls.absolute_path(urls.join_path(url, os.path.dirname(name)))
        with work_folder(how[-1]) as folder:
            urls.fetch_file(urls.join_path(store, FOLDER_RECORD), folder / FOLDER_RECORD)
            values = read_json(folder / FOLDER_RECORD)
            values["source"]["store"] = store  # they may have been copied
            write_json(folder / FOLDER_RECORD, values)
            index = store.rpartition("/dump-")[2]
            verified = _verify_dump(folder, int(index) if index.isdecimal() else number, *how)
        done.append(replace(verified, closed="verify its metadata folder to have it made again"))
        report(done[-1])
    return done


def _verify_dump(folder: Path, index: int, full: bool, workers: int, temp_dir: str | None) -> DumpCheckResult:
    try:
        record = FolderRecord.read(folder)
        if record.store:
            return _verify_stored(folder, record, index, full, workers, temp_dir)
        prefixes = find_prefixes([folder])
    except (InputError, FileNotFoundError) as error:  # missing shards, or half a shard
        return DumpCheckResult(index=index, shards=0, documents=0, faults=(urls.first_line(error),))
    there = {os.path.basename(prefix) for prefix in prefixes}
    faults = [f"{name} is gone" for name, task in record.tasks.items() if task.tokens and name not in there]
    checked = verify_shards(prefixes, eod=record.settings["eos"], threads=workers)
    faults += [f"{each.prefix}: {fault}" for each in checked for fault in each.faults]
    compared = compare_with_source(
        [each.prefix for each in checked if not each.faults],
        full=full,
        workers=workers,
        temp_dir=temp_dir,
        report=lambda each: print_comparison(each) if each.fault is None and not each.stale else None,
    )
    faults += [f"{each.prefix}: {each.fault}" for each in compared if each.fault is not None]
    faults += [f"{each.prefix} is stale: {each.note}" for each in compared if each.stale]
    documents, undecoded = sum(each.documents for each in compared), sum(each.undecoded for each in compared)
    shards, found = len(checked), tuple(faults)
    return DumpCheckResult(index=index, shards=shards, documents=documents, undecoded=undecoded, faults=found)


def _verify_stored(
    folder: Path, record: FolderRecord, index: int, full: bool, workers: int, temp_dir: str | None
) -> DumpCheckResult:
    """Verify shards below a URL, by copies of their files."""
    done: dict[str, DumpCheckResult] = {}
    task = functools.partial(_verify_copy, folder, index, full, temp_dir)
    run_tasks(task, [*record.tasks], max(workers, 1), done.__setitem__, where=record.store)
    if faulty := [name for name, each in done.items() if each.faults]:
        remove_from_record(folder, *faulty)
    sums = {name: sum(getattr(each, name) for each in done.values()) for name in ("shards", "documents", "undecoded")}
    return DumpCheckResult(index=index, faults=tuple(fault for each in done.values() for fault in each.faults), **sums)


def _verify_copy(folder: Path, index: int, full: bool, temp_dir: str | None, name: str) -> DumpCheckResult:
    record, values = FolderRecord.read(folder), read_json(folder / FOLDER_RECORD)
    files = record.tasks[name].files(name, exclusion_format(record.settings))
    store = values["source"].pop("store")
    values["shards"] = {name: values["shards"][name]}
    with work_folder(temp_dir) as copy:
        Path(copy, "exclusions").mkdir()
        for file in files:
            with contextlib.suppress(FileNotFoundError):
                urls.fetch_file(urls.join_path(store, file), copy / file)
        faults = [file_fault(str(copy / file), checksum) for file, checksum in files.items()]
        found = DumpCheckResult(index=index, shards=0, documents=0, faults=tuple(filter(None, faults)))
        if record.tasks[name].tokens and not found.faults:
            write_json(copy / FOLDER_RECORD, values)
            found = _verify_dump(copy, index, full, 1, temp_dir)
        return replace(found, faults=tuple(fault.replace(str(copy), store) for fault in found.faults))
