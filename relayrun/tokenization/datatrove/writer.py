"""A datatrove step that turns documents into a Megatron shard."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from relayrun.errors import InputError
from relayrun.shards.indexed import ShardWriter
from relayrun.tokenization.encode.engines import Engine, EngineName, select
from relayrun.tokenization.encode.framing import Framing
from relayrun.tokenization.encode.tokenizer import AppendEod, load_tokenizer
from relayrun.tokenization.readers.texts import Texts
from relayrun.tokenization.record import shard_name


class MegatronTokenWriter(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Writes the documents of task r to `output_folder/{r:05d}_tokens.bin` and `.idx`, each ended by the EOS.

    Put it last in a datatrove pipeline, behind any readers and filters. Empty documents are dropped and
    counted. Nothing stands under the final names before the shard is whole, and there is no shard where
    there is no document.

    Args:
        output_folder: a local folder; made if missing.
        tokenizer_name_or_path: as for `load_tokenizer`.
        eos_token: ends every document; None takes the tokenizer's own.
        append_eod, add_bos, cache_dir: as for `load_tokenizer`; True and False are "yes" and "no".
        keep_empty: keep documents without text, as documents without tokens.
        engine: as for `select`; proven on the first batch of every process.
        text_field: "text", or the name of a datatrove document's metadata that holds the text.
        batch_size: most documents that are tokenized at a time.
        batch_bytes: most bytes of them in UTF-8, one longer document aside; bounds memory.
        path, model_identifier, tokenization_batch_size: other names of the first two and of batch_size.
    """

    name = "Megatron shards"
    type = "Writer"

    def __init__(
        self,
        output_folder: str | os.PathLike[str] | None = None,
        tokenizer_name_or_path: str | None = None,
        *,
        eos_token: str | None = None,
        append_eod: AppendEod | bool = "yes",
        add_bos: bool = False,
        keep_empty: bool = False,
        engine: EngineName = "auto",
        text_field: str = "text",
        cache_dir: str | None = None,
        batch_size: int | None = None,
        batch_bytes: int = 4_000_000,
        path: str | os.PathLike[str] | None = None,
        model_identifier: str | None = None,
        tokenization_batch_size: int | None = None,
    ) -> None:
        super().__init__()
        self.output_folder = os.fspath(_one("output_folder", output_folder, "path", path))
        self.tokenizer_name_or_path: str = _one(
            "tokenizer_name_or_path", tokenizer_name_or_path, "model_identifier", model_identifier
        )
        if isinstance(append_eod, bool):
            append_eod = "yes" if append_eod else "no"
        self.options = (eos_token, append_eod, add_bos, cache_dir)
        self.keep_empty = keep_empty
        self.engine = engine
        self.text_field = text_field
        self.batch_size: int = _one("batch_size", batch_size, "tokenization_batch_size", tokenization_batch_size, 1000)
        self.batch_bytes = batch_bytes

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        # workers are processes: without this each of them would start a thread per core
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        batches = self._batches(data or ())
        first = next(batches, Texts.of([]))
        source = self.tokenizer_name_or_path
        engine, framing = _tokenizer_of_this_process(
            source, self.options, self.engine, self.keep_empty, _stamp(source), _Sample(first)
        )
        routed = engine.routed
        shard = ShardWriter(os.path.join(self.output_folder, shard_name(rank)), np.dtype(framing.dtype).type)
        try:
            texts: Texts | None = first
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

    def _batches(self, data: Iterable[Document]) -> Iterator[Texts]:
        texts: list[str] = []
        size = 0
        for document in data:
            text: Any = document.text if self.text_field == "text" else document.metadata.get(self.text_field)
            if not isinstance(text, str):
                raise InputError(f"document {document.id} has no text in {self.text_field!r}")
            if not text and not self.keep_empty:
                self.stat_update("empty documents")
                continue
            length = len(text.encode())
            if texts and (len(texts) >= self.batch_size or size + length > self.batch_bytes):
                yield Texts.of(texts)
                texts, size = [], 0
            texts.append(text)
            size += length
        if texts:
            yield Texts.of(texts)


def _one(name: str, value: Any, other: str, value_of_other: Any, default: Any = None) -> Any:
    """The one of two names for the same that is given."""
    given = [each for each in (value, value_of_other) if each is not None]
    if len(given) > 1 or (not given and default is None):
        raise TypeError(f"give {name}, or {other}, which is another name of it")
    return given[0] if given else default


class _Sample:
    """Texts that do not count when arguments are compared."""

    def __init__(self, texts: Texts) -> None:
        self.texts = next(texts.split(1_000_000, len(texts) or 1), texts)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Sample)

    def __hash__(self) -> int:
        return 0


@functools.lru_cache(maxsize=2)
def _tokenizer_of_this_process(
    name_or_path: str, options: tuple[Any, ...], engine: EngineName, keep_empty: bool, stamp: object, sample: _Sample
) -> tuple[Engine, Framing]:
    """Loaded and proven once per process, however many tasks it runs; `stamp` changes when the file does."""
    eos_token, append_eod, add_bos, cache_dir = options
    loaded = load_tokenizer(
        name_or_path, eos_token=eos_token, append_eod=append_eod, add_bos=add_bos, cache_dir=cache_dir
    )
    selection = select(
        engine, loaded.tokenizer, sample.texts, lambda line: print(line, file=sys.stderr), definition=loaded.definition
    )
    return selection.build(loaded.definition), loaded.framing(keep_empty=keep_empty)


def _stamp(name_or_path: str) -> object:
    for file in (Path(name_or_path), Path(name_or_path) / "tokenizer.json"):
        if file.is_file():
            status = file.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
    return None
