"""A datatrove step that turns documents into a Megatron shard."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from relayrun.indexed import ShardWriter
from relayrun.tokenization.tokenizer import DocumentTokenizer, load_tokenizer


def shard_name(rank: int) -> str:
    """Name of the shard of task `rank`, without suffix."""
    return f"{rank:05d}_tokens"


class MegatronTokenWriter(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Writes the documents of task r to `output_folder/{r:05d}_tokens.bin` and `.idx`, each ended by the EOS.

    Put it last in a datatrove pipeline, behind any readers and filters. Empty documents are dropped and
    counted. Nothing stands under the final names before the shard is whole, and there is no shard where
    there is no document.

    Args:
        output_folder: a local folder; made if missing.
        tokenizer_name_or_path: as for `load_tokenizer`.
        eos_token: ends every document; None takes the tokenizer's own.
        batch_size: most documents that are tokenized at a time.
        batch_characters: most characters of them, one longer document aside; bounds memory.
    """

    name = "Megatron shards"
    type = "Writer"

    def __init__(
        self,
        output_folder: str | os.PathLike[str],
        tokenizer_name_or_path: str,
        *,
        eos_token: str | None = None,
        batch_size: int = 1000,
        batch_characters: int = 4_000_000,
    ) -> None:
        super().__init__()
        self.output_folder = os.fspath(output_folder)
        self.tokenizer_name_or_path = tokenizer_name_or_path
        self.eos_token = eos_token
        self.batch_size = batch_size
        self.batch_characters = batch_characters

    def run(self, data: Iterable[Document] | None, rank: int = 0, world_size: int = 1) -> None:
        # workers are processes: without this each of them would start a thread per core
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        tokenizer = _tokenizer_of_this_process(
            self.tokenizer_name_or_path, self.eos_token, _stamp(self.tokenizer_name_or_path)
        )
        shard = ShardWriter(os.path.join(self.output_folder, shard_name(rank)), tokenizer.dtype)
        try:
            for texts in self._batches(data or ()):
                with self.track_time(unit="batch"):
                    ids, lengths = tokenizer.encode(texts)
                    shard.add(ids, lengths)
                self.stat_update("documents", value=len(texts), unit="batch")
                self.stat_update("tokens", value=ids.size, unit="batch")
            shard.finish()
        except BaseException:
            shard.abort()
            raise

    def _batches(self, data: Iterable[Document]) -> Iterator[list[str]]:
        texts: list[str] = []
        characters = 0
        for document in data:
            if not document.text:
                self.stat_update("empty documents")
                continue
            if texts and (len(texts) >= self.batch_size or characters + len(document.text) > self.batch_characters):
                yield texts
                texts, characters = [], 0
            texts.append(document.text)
            characters += len(document.text)
        if texts:
            yield texts


@functools.lru_cache(maxsize=2)
def _tokenizer_of_this_process(name_or_path: str, eos_token: str | None, stamp: object) -> DocumentTokenizer:
    """Loaded once per process, however many tasks it runs; `stamp` changes when the file does."""
    return load_tokenizer(name_or_path, eos_token=eos_token)


def _stamp(name_or_path: str) -> object:
    for file in (Path(name_or_path), Path(name_or_path) / "tokenizer.json"):
        if file.is_file():
            status = file.stat()
            return status.st_ino, status.st_size, status.st_mtime_ns
    return None
