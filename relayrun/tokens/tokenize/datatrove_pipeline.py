"""The last step of a datatrove pipeline that ends in token shards."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from relayrun.errors import InputError, refuse_urls
from relayrun.tokens.readers.faults import BadLine, LineFaults
from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.shards.shard import ShardWriter, TokenizerRecord
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.libraries import Engine
from relayrun.tokens.tokenize.encode.tokenizer import DocumentFraming, load_tokenizer
from relayrun.tokens.tokenize.options import AppendEod, EngineName, OnError, TokenizeOptions, validate_options
from relayrun.tokens.tokenize.shard_folder import shard_name

log = logging.getLogger(__name__)


class MegatronTokenWriter(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Writes the documents of task r to `output_folder/{r:05d}_tokens.bin` and `.idx`, each ended by the EOS.

    Put it last in a datatrove pipeline, after any readers and filters. Empty documents are dropped and counted. The
    final names appear when the shard is whole; a task without documents writes no shard. `{r:05d}_tokens.record.json`
    names the tokenizer and the checksums of both files.

    Args:
        output_folder: a local folder; made if missing.
        tokenizer_name_or_path: the `tokenizer` of `TokenizeOptions`.
        eos_token, append_eod, keep_empty, cache_dir, batch_bytes: as in `TokenizeOptions`; None: its default.
        add_bos: its `bos`.
        engine: its `engine`; proven on the first batch of every process.
        on_error: "fail", or "skip-line": a document without a text, or with one that cannot be written as UTF-8, is
            left out and counted in the statistics. Files are the reader's.
        text_field: "text", or the name of a datatrove document's metadata that holds the text.
        batch_size: its `batch_documents`.
        path, model_identifier, tokenization_batch_size: other names of the first two and of batch_size.
    """

    name = "Megatron shards"
    type = "Writer"

    def __init__(
        self,
        output_folder: str | os.PathLike[str] | None = None,
        tokenizer_name_or_path: str | os.PathLike[str] | None = None,
        *,
        eos_token: str | None = None,
        append_eod: AppendEod | bool | None = None,
        add_bos: bool | None = None,
        keep_empty: bool | None = None,
        engine: EngineName | None = None,
        on_error: OnError | None = None,
        text_field: str | None = None,
        cache_dir: str | None = None,
        batch_size: int | None = None,
        batch_bytes: int | None = None,
        path: str | os.PathLike[str] | None = None,
        model_identifier: str | None = None,
        tokenization_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        if batch_size is not None or tokenization_batch_size is not None:
            batch_size = _one_of_two_names("batch_size", batch_size, "tokenization_batch_size", tokenization_batch_size)
        tokenizer = _one_of_two_names(
            "tokenizer_name_or_path", tokenizer_name_or_path, "model_identifier", model_identifier
        )
        given = {
            "tokenizer": os.fspath(tokenizer),
            "eos_token": eos_token,
            "append_eod": append_eod,
            "bos": add_bos,
            "keep_empty": keep_empty,
            "engine": engine,
            "on_error": on_error,
            "column": text_field,
            "cache_dir": cache_dir,
            "batch_documents": batch_size,
            "batch_bytes": batch_bytes,
        }
        self.output_folder = os.fspath(_one_of_two_names("output_folder", output_folder, "path", path))
        refuse_urls(self.output_folder)
        chosen = {name: value for name, value in given.items() if value is not None}
        self.options = validate_options(chosen, _ARGUMENT_NAMES)
        if self.options.skips_files and not self.options.skips_lines:
            raise InputError("on_error is 'fail' or 'skip-line' here: the reader of a pipeline decides about files")

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of task `rank`; datatrove calls this. Raises InputError for a document without a text."""
        # workers are processes: without this each of them would start a thread per core
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        batches = self._batches(data or ())
        first = next(batches, PackedTexts.of([]))
        engine, framing, made = _process_tokenizer(self.options, first)
        routed = engine.routed
        prefix = os.path.join(self.output_folder, shard_name(rank))
        shard = ShardWriter(prefix, np.dtype(framing.dtype).type, own_record=made)
        try:
            texts: PackedTexts | None = first
            while texts is not None:
                with self.track_time(unit="batch"):
                    ids, lengths = framing.apply(*engine.encode(texts))
                    shard.add(ids, lengths)
                self.stat_update("documents", value=len(lengths), unit="batch")
                self.stat_update("tokens", value=ids.size, unit="batch")
                texts = next(batches, None)
            shard.finish()
        except BaseException:
            shard.abort()
            raise
        self.stat_update("routed documents", value=engine.routed - routed, unit="task")

    def _batches(self, data: Iterable[Document]) -> Iterator[PackedTexts]:
        options = self.options
        texts: list[str] = []
        size = 0
        for document in data:
            text: Any = document.text if options.column == "text" else document.metadata.get(options.column)
            try:
                length = _utf8_length(text, options.column)
            except BadLine as bad:
                faults = LineFaults(skip=options.skips_lines)
                faults.add(bad, f"document {document.id}")
                self.stat_update(*(f"left out: {reason}" for reason in faults.counts))
                continue
            if not text and not options.keep_empty:
                self.stat_update("empty documents")
                continue
            if texts and (len(texts) >= options.batch_documents or size + length > options.batch_bytes):
                yield PackedTexts.of(texts)
                texts, size = [], 0
            texts.append(text)
            size += length
        if texts:
            yield PackedTexts.of(texts)


def _utf8_length(text: Any, column: str) -> int:
    if not isinstance(text, str):
        raise BadLine("not text", f"it has no text in {column!r}")
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        found = f"\\u{ord(text[error.start]):04x}"
        raise BadLine("lone surrogate", f"{column!r} holds a lone surrogate ({found})") from None


_ARGUMENT_NAMES = {name: name for name in TokenizeOptions.model_fields} | {
    "tokenizer": "tokenizer_name_or_path",
    "bos": "add_bos",
    "column": "text_field",
    "batch_documents": "batch_size",
}


def _one_of_two_names(name: str, value: Any, other: str, value_of_other: Any) -> Any:
    given = [each for each in (value, value_of_other) if each is not None]
    if len(given) != 1:
        raise TypeError(f"give {name}, or {other}, which is another name of it")
    return given[0]


_loaded: dict[object, tuple[Engine, DocumentFraming, TokenizerRecord]] = {}


def _process_tokenizer(options: TokenizeOptions, texts: PackedTexts) -> tuple[Engine, DocumentFraming, TokenizerRecord]:
    """Load, and prove by the first texts, once per process, however many tasks it runs; again if the file changes."""
    key = options, _file_stamp(options.tokenizer)
    if key not in _loaded:
        loaded, sample = load_tokenizer(options), next(texts.split(1_000_000, len(texts) or 1), texts)
        selection = select_engine(
            options.engine, lambda: loaded.tokenizer, sample, log.warning, definition=loaded.definition
        )
        made = TokenizerRecord(
            fingerprint=loaded.fingerprint,
            ids=loaded.ids_fingerprint,
            size=loaded.size,
            eos=loaded.eos_id,
            bos=loaded.bos_id,
        )
        framing = loaded.framing(keep_empty=options.keep_empty)
        _loaded.clear()
        _loaded[key] = selection.build(loaded.definition), framing, made
    return _loaded[key]


def _file_stamp(name_or_path: str) -> object:
    for file in (Path(name_or_path), Path(name_or_path) / "tokenizer.json"):
        if file.is_file():
            status = file.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
    return None
