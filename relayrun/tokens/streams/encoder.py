"""The tokenizer of a run, as the ranks use it on text: with the fastest engine that is proven to be exact."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cached_property

from relayrun.tokens.readers.texts import Texts
from relayrun.tokens.shards.manifest import FileEntry, Manifest
from relayrun.tokens.streams.run_tokenizer import load_run_tokenizer
from relayrun.tokens.tokenize.encode.engines import select_engine
from relayrun.tokens.tokenize.encode.libraries import Encoded, Engine
from relayrun.tokens.tokenize.fused import sample_texts

log = logging.getLogger(__name__)

PROOF_BYTES = 200_000
"""Text of the data set on which a fast engine must prove itself."""


class StreamEncoder:
    """Texts to ids. The tokenizer and its engine are loaded when the first text comes."""

    def __init__(self, tokenizer: str, manifest: Manifest, files: Sequence[FileEntry], column: str) -> None:
        """`tokenizer`: the setting data.tokenizer; `files`, `column`: where the proof takes its texts from."""
        self._name = tokenizer
        self._manifest = manifest
        self._paths = [file.path for file in files]
        self._column = column

    def __call__(self, texts: Texts) -> Encoded:
        """Ids of the texts, and how many each has. Raises FatalTrainingError if the tokenizer is another one now."""
        return self._engine.encode(texts)

    @cached_property
    def _engine(self) -> Engine:
        tokenizer = load_run_tokenizer(self._name, self._manifest)
        texts = sample_texts(self._column, self._paths, most_bytes=PROOF_BYTES)
        chosen = select_engine("auto", lambda: tokenizer.tokenizer, texts, log.warning, definition=tokenizer.definition)
        return chosen.build(tokenizer.definition, lambda: tokenizer.tokenizer)
