"""One task of a tokenization: from files to a shard, from Arrow's buffers to the .bin without an object per row.

A long document is encoded in pieces, so that its memory is that of a piece. BPE encodes each pre-token alone: a cut is
exact if no pre-token crosses it or ends elsewhere because of it. With the pre-tokenizers listed here this holds between
a newline and a letter if a letter also precedes the newline: no alternative of their patterns matches a newline and a
letter after it, and the white space run is the newline alone, whatever follows (`\\s+(?!\\S)` looks no further). A
Unicode normalizer never joins a newline to another character. Letters come from blocks on which all versions of
Unicode's tables agree. A tokenizer without merges gives every character its own ids and may be cut between any two.
Other tokenizers get the document whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from relayrun.errors import InputError, RelayrunError, combined_error
from relayrun.publishing import work_folder
from relayrun.tokens.readers.columns import texts_of_content
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.inputs import InputFile, stat_inputs
from relayrun.tokens.readers.texts import PackedTexts, release_pages
from relayrun.tokens.shards.shard import ShardWriter
from relayrun.tokens.stores.urls import MissingInput, first_line, is_url, join_path, printable, put_file
from relayrun.tokens.tokenize.encode.engines import EngineSelection
from relayrun.tokens.tokenize.encode.families import CL100K, O200K, PLAIN_BPE, QWEN2
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine, parse_without_vocabulary
from relayrun.tokens.tokenize.encode.losses import LOST_DOCUMENTS, LossCounter
from relayrun.tokens.tokenize.encode.tokenizer import DocumentFraming
from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.shard_folder import SkippedFile, TaskProgress, TaskRecord, content_hash, file_content_hash
from relayrun.tokens.tokenize.step_task import ShardSteps, read_texts

CUTTABLE_PATTERNS = frozenset({CL100K, QWEN2, O200K})
"""The patterns of Llama 3 and cl100k, Qwen 2, o200k; GPT-2's is ByteLevel with `use_regex`."""

_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0233\u0391-\u03a1\u03a3-\u03ce\u0410-\u044f\u05d0-\u05ea\u0621-\u063a"
    "\u0905-\u0939\u0e01-\u0e30\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_LINE_CUT = re.compile(f"[{_LETTERS}]\n(?=[{_LETTERS}])")
_WINDOW = 1 << 16

CutUnit = Literal["lines", "characters"]


def cut_unit(known: dict[str, Any], *, merges: bool) -> CutUnit | None:
    """Return the units between which documents of this tokenizer may be cut; None: they may not be cut. `known` is its
    tokenizer.json, with or without the vocabulary; `merges`: whether its BPE has any."""
    model, normalizer, before = known["model"], known.get("normalizer"), known.get("pre_tokenizer") or {}
    *splits, last = before.get("pretokenizers") or [before]
    added = [token for token in known.get("added_tokens", []) if not token["special"]]
    if (
        model.get("type") != "BPE"
        or last.get("type") != "ByteLevel"
        or last.get("add_prefix_space")
        or any(token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in added)
    ):
        return None
    odd = any(model.get(name) for name in (*PLAIN_BPE, "ignore_merges"))
    if not (merges or odd or splits or normalizer or added):
        return "characters"
    if normalizer and normalizer.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):
        return None
    exact = bool(last.get("use_regex", True)) if not splits else len(splits) == 1 and _is_cuttable(splits[0])
    return "lines" if exact else None


def _is_cuttable(split: dict[str, Any]) -> bool:
    return (
        split.get("type") == "Split"
        and split["pattern"].get("Regex") in CUTTABLE_PATTERNS
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
    )


def split_points(text: npt.NDArray[np.uint8], size: int, where: CutUnit = "lines") -> Iterator[int]:
    """Yield the ends of pieces of the UTF-8 `text`, of at least `size` bytes each; the last end is the text's."""
    find, end = {"lines": _next_line_cut, "characters": _next_character_cut}[where], 0
    while text.size - end > size and (after := find(text, end + size)) is not None:
        end = after
        yield end
    if end != text.size:
        yield text.size


def _next_character_cut(text: npt.NDArray[np.uint8], begin: int) -> int | None:
    """Return the first position from `begin` on where a character other than the first begins."""
    window = text[max(begin, 1) : begin + 5]
    heads = np.flatnonzero(window & 0xC0 != 0x80)
    return max(begin, 1) + int(heads[0]) if heads.size else None


def _next_line_cut(text: npt.NDArray[np.uint8], begin: int) -> int | None:
    """Return the first position after `begin` where `text` may be cut."""
    for start in range(begin, text.size, _WINDOW - 16):  # windows overlap by the longest match
        window = text[start : start + _WINDOW].tobytes()
        inside = next((byte for byte in range(min(4, len(window))) if window[byte] & 0xC0 != 0x80), 0)
        string = window[inside:].decode("utf-8", "ignore")
        if found := _LINE_CUT.search(string):
            return start + inside + len(string[: found.end()].encode())
    return None


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

PIECE_BYTES = 500_000
"""Least bytes of a piece of a long document."""


@dataclass(frozen=True)
class ShardTask:
    """A task: the files of one shard."""

    name: str
    """Name of the shard, without suffix."""
    inputs: tuple[InputFile, ...]


@dataclass(frozen=True, kw_only=True)
class TokenizeContext:
    """Data that all tasks share; sent to every worker."""

    dataset: str
    """Folder or URL that the paths start at."""
    output: str
    store: str = ""
    """URL that gets the shards in place of the folder `output`, which gets the progress in any case."""
    definition: str
    """Path of the serialized tokenizer."""
    fingerprint: str
    """The tokenizer's: within the life of a process the file may have changed."""
    selection: EngineSelection
    framing: DocumentFraming
    options: TokenizeOptions


def tokenize_shard(job: TokenizeContext, part: ShardTask) -> TaskRecord:
    """Write the shard of `part`; its final name appears when it is whole. Raises InputError for all bad files at once:
    after the first one the others are still read."""
    progress = TaskProgress(job.output, part.name)
    try:
        if not job.store:
            return _write_shard(job, part, progress)
        if job.options.scratch_folder is not None:
            os.makedirs(job.options.scratch_folder, exist_ok=True)
        with work_folder(job.options.scratch_folder) as folder:
            record = _write_shard(replace(job, output=str(folder)), part, progress)
            threading.Thread(target=progress.repeat, args=(record,), daemon=True).start()
            for file, checksum in record.files(part.name, job.options.exclusions).items():
                record.stored[file] = put_file(folder / file, join_path(job.store, file), checksum)
            record.seconds = time.time() - record.started
            return record
    finally:
        progress.end()


def _write_shard(job: TokenizeContext, part: ShardTask, progress: TaskProgress) -> TaskRecord:
    started = time.time()
    engine = process_engine(job.definition, job.fingerprint, job.selection)
    routed = engine.routed
    record = TaskRecord(
        inputs=list(part.inputs),
        started=started,
        engine=job.selection.engine,
        engine_version=job.selection.version,
        on_error=job.options.on_error,
    )
    steps = ShardSteps(job.options, output=job.output, shard=part.name) if job.options.has_steps else None
    shard = ShardWriter(os.path.join(job.output, part.name), np.dtype(job.framing.dtype).type)
    bad: list[RelayrunError] = []
    done = alone = 0  # files before these numbers are in the shard, or are read alone
    try:
        for number, file in enumerate(part.inputs):
            if bad:  # read without tokenizing
                try:
                    faults = LineFaults(skip=job.options.skips_lines)
                    deque(read_texts(job.options, job.dataset, file[0], scratch=job.output, faults=faults), maxlen=0)
                except InputError as error:
                    bad.append(error)
                continue
            if number >= alone and steps is None and not is_url(job.dataset):
                few = part.inputs[number : number + _MOST_TOGETHER]
                added, tried = _add_small_files(job, few, engine, shard, record)
                done, alone = number + added, number + tried
                progress.bytes_read += sum(size for _, size, _ in few[:added])
                progress.say(documents=record.documents, tokens=shard.tokens)
            if number < done:
                continue
            mark, before = shard.mark(), dict(vars(record))  # lists change behind the file alone
            faults = LineFaults(skip=job.options.skips_lines) if steps is None else steps.begin_file(file[0])
            try:
                known = _tokenize_file(job, file, engine, shard, record, progress, faults, steps)
                record.add_faults(faults)
            except InputError as error:
                if not job.options.skips_files:
                    bad.append(error)
                    continue
                shard.rollback(mark)
                vars(record).update(before)
                if steps is not None:
                    steps.rollback()
                reason = "missing" if isinstance(error, MissingInput) else "unreadable"
                record.skipped.append(SkippedFile(file=file[0], error=str(error), reason=reason))
                known, faults = "", LineFaults()
            record.fingerprints.append(known)
            record.file_documents.append(record.documents - before["documents"])
            record.file_rows.append(record.rows - before["rows"] + sum(faults.counts.values()))
        if bad:
            raise combined_error(bad, "files failed")
        if steps is not None:
            record.steps, record.exclusions = steps.finish()
        shard.finish()
    except BaseException:
        shard.abort()
        if steps is not None:
            steps.close()
        raise
    record.tokens, record.xxh3_128, record.routed_documents = shard.tokens, shard.xxh3_128, engine.routed - routed
    record.largest_id = shard.largest_id if shard.tokens else None
    record.seconds = time.time() - started
    return record


def _tokenize_file(
    job: TokenizeContext,
    file: InputFile,
    engine: Engine,
    shard: ShardWriter,
    record: TaskRecord,
    progress: TaskProgress,
    faults: LineFaults,
    steps: ShardSteps | None,
) -> str:
    """Add the documents of a file to the shard; return its fingerprint. Raises InputError."""
    path, first = join_path(job.dataset, file[0]), record.rows
    arrays = read_texts(job.options, job.dataset, file[0], scratch=job.output, faults=faults)
    seen = arrays if steps is None else map(steps.rows.end_array, arrays)
    for texts in _text_batches(_gather_arrays(seen, job), job, record, steps):
        is_long = texts.used.size > job.options.batch_bytes
        where = _cut_unit_of_file(job.definition, job.fingerprint) if is_long else None
        if where is not None:  # a batch of a single long text
            kept = int(_tokenize_long(texts, where, job.framing, engine, shard))
            _count_documents(job, texts, (np.empty(0, np.uint32), np.array([kept], np.int64)), kept, record)
        else:
            where_first = f"{printable(path)}, text {record.rows - first + 1}"
            texts, encoded = _encode(engine, texts, faults, where_first)
            _add_documents(job, texts, encoded, shard, record)
        progress.say(documents=record.documents, tokens=shard.tokens)
        del texts  # frees a long text before the next one is read
    progress.bytes_read += file[1]
    if steps is not None:
        record.null_documents += steps.rows.nulls
        record.rows = first + steps.row - sum(faults.counts.values())
    known = file_content_hash(path)  # right after reading, while its bytes are in memory
    if stat_inputs(job.dataset, [file[0]]) != [file]:
        raise InputError("this file was changed while it was read", where=printable(path), hint="run again")
    return known


def _add_documents(
    job: TokenizeContext, texts: PackedTexts, encoded: Encoded, shard: ShardWriter, record: TaskRecord
) -> None:
    ids, lengths = job.framing.apply(*encoded, shard.reserve)
    shard.add(ids, lengths)
    _count_documents(job, texts, encoded, len(lengths), record)


def _count_documents(job: TokenizeContext, texts: PackedTexts, encoded: Encoded, kept: int, record: TaskRecord) -> None:
    losses = _loss_counter(job.definition, job.fingerprint).count(texts, encoded)
    if losses:
        record.losses = dict(losses + Counter(record.losses))
    record.documents += kept
    record.empty_documents += max(0, len(texts) - kept - losses[LOST_DOCUMENTS])  # 0: they are kept
    record.rows += len(texts)


_SMALL_BYTES, _MOST_TOGETHER = 64_000, 4096
"""Bytes of a file that is encoded with others: a call of an engine costs as much as 50 kB of text; and such files."""


def _add_small_files(
    job: TokenizeContext, files: Sequence[InputFile], engine: Engine, shard: ShardWriter, record: TaskRecord
) -> tuple[int, int]:
    """Add the first of these local files, as many as fit into a batch, encoded together; each is opened and read once.
    Return their number, 0 if the tokenizer does not know a text, and the number of files to read alone unless they are
    added: these and the next one, whose own turn says what is wrong."""
    options, room, top = job.options, job.options.batch_bytes, join_path(job.dataset, "")
    texts, ends, rows, known = list[bytes](), [0], list[int](), list[str]()
    for name, size, changed in files:
        path = top + name
        if not 0 < size <= _SMALL_BYTES:  # 0: a pipe can be read only once
            break
        try:
            with open(path, "rb", buffering=0) as file:
                content, status = file.read(size + 1), os.fstat(file.fileno())
            found = texts_of_content(content, path, options.column, most=options.batch_bytes, scratch=job.output)
        except Exception:
            break
        new = [text for text in found if text is not None]
        room -= sum(map(len, new))
        many = len(texts) + len(new) > options.batch_documents
        if many or room < 0 or status.st_mtime_ns != changed or not status.st_size == len(content) == size:
            break
        texts += new
        ends.append(len(texts))
        rows.append(len(found))
        known.append(content_hash(content))
    packed, routed = PackedTexts.join(texts), engine.routed
    try:
        encoded = engine.encode(packed)
    except Exception:
        engine.routed = routed
        return 0, len(rows) + 1
    _add_documents(job, packed, encoded, shard, record)
    record.null_documents += sum(rows) - len(texts)
    record.rows += sum(rows) - len(texts)
    kept = np.append(0, np.cumsum((encoded[1] > 0) | job.framing.keep_empty))
    record.file_documents += np.diff(kept[ends]).tolist()
    record.file_rows += rows
    record.fingerprints += known
    return len(rows), len(rows) + 1


def _encode(engine: Engine, texts: PackedTexts, faults: LineFaults, where: str) -> tuple[PackedTexts, Encoded]:
    """Return the texts that the tokenizer can encode, and their ids; `faults` gets the others. `where`: the first."""
    try:
        return texts, engine.encode(texts)
    except Exception as error:
        if type(error) is not Exception:  # not one of the tokenizers library
            raise
    place, first = where.rsplit(" ", 1)
    good = np.ones(len(texts), np.bool_)
    for number, text in enumerate(texts.views()):
        try:
            engine.encode(PackedTexts.join([text]))
        except Exception as error:
            good[number] = False
            words = f"the tokenizer does not know this text, and has no token for that: {first_line(error)}"
            hint = "take a tokenizer that covers it, or give this one an unknown token"
            faults.add(BadLine("not known to the tokenizer", words, hint=hint), f"{place} {int(first) + number}")
    texts = texts.take(good)
    return texts, engine.encode(texts)


@functools.lru_cache(maxsize=1)
def _loss_counter(definition: str, fingerprint: str) -> LossCounter:
    return LossCounter(Path(definition).read_text(encoding="utf-8"))


def _tokenize_long(
    text: PackedTexts, where: CutUnit, framing: DocumentFraming, engine: Engine, shard: ShardWriter
) -> bool:
    """Encode one text in pieces, framed as `DocumentFraming` does. True if the shard got a document."""
    routed, begin, before = engine.routed, 0, shard.tokens
    for end in split_points(text.used, PIECE_BYTES, where):
        piece = PackedTexts(data=text.used, offsets=np.array([begin, end], np.int64))
        ids = engine.encode(piece)[0]
        if ids.size and shard.tokens == before and framing.bos_id is not None:
            shard.append([framing.bos_id])
        shard.append(ids)
        release_pages(piece.used)
        begin = end
    engine.routed = min(engine.routed, routed + 1)
    full = shard.tokens > before
    if full and framing.eod_id is not None:
        shard.append([framing.eod_id])
    if full or framing.keep_empty:
        shard.end_document()
    return full or framing.keep_empty


def _gather_arrays(arrays: Iterator[pa.Array], job: TokenizeContext) -> Iterator[pa.Array]:
    waiting: list[pa.Array] = []
    size = rows = 0
    for array in arrays:
        if waiting and (
            size + array.nbytes > job.options.batch_bytes or rows + len(array) > job.options.batch_documents
        ):
            yield _take_arrays(waiting)
            size = rows = 0
        waiting.append(array)
        size, rows = size + array.nbytes, rows + len(array)
        del array  # frees a long document before the next one is read
        if size > job.options.batch_bytes:
            yield _take_arrays(waiting)
            size = rows = 0
    if waiting:
        yield _take_arrays(waiting)


def _take_arrays(arrays: list[pa.Array]) -> pa.Array:
    array = arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)
    arrays.clear()
    return array


def _text_batches(
    arrays: Iterator[pa.Array], job: TokenizeContext, record: TaskRecord, steps: ShardSteps | None
) -> Iterator[PackedTexts]:
    for array in arrays:
        if steps is None and array.null_count:
            record.null_documents += array.null_count
            record.rows += array.null_count
            array = array.drop_null()
        texts = PackedTexts.from_arrow(array) if steps is None else steps.apply(array)
        batches = texts.split(job.options.batch_bytes, job.options.batch_documents)
        del array, texts
        yield from batches
        del batches


@functools.lru_cache(maxsize=1)
def _cut_unit_of_file(definition: str, fingerprint: str) -> CutUnit | None:
    text = Path(definition).read_text(encoding="utf-8")
    return cut_unit(parse_without_vocabulary(text), merges=not text.endswith('"merges":[]}}'))


@functools.lru_cache(maxsize=1)
def process_engine(definition: str, fingerprint: str, selection: EngineSelection) -> Engine:
    """Load once per worker, however many tasks it runs."""
    engine = selection.build(Path(definition).read_text(encoding="utf-8"))
    # loading, and reading the sample, take several times the memory they leave; a worker would keep it for life
    pa.default_memory_pool().release_unused()
    with contextlib.suppress(AttributeError):  # other C libraries have no such functions
        libc = ctypes.CDLL(None)
        libc.malloc_trim(0)
        # keep the memory of a batch for the next one: the kernel would have to clear it again (mallopt(3))
        libc.mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(_M_TRIM_THRESHOLD, 64 << 20)
    return engine
