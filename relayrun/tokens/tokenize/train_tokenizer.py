"""Train a byte-level BPE tokenizer on the text of a data set; it encodes any text without loss."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from relayrun.errors import ConfigError, InputError
from relayrun.progress import Progress, count, has_terminal
from relayrun.publishing import InputFiles
from relayrun.tokens.readers.columns import read_column
from relayrun.tokens.readers.inputs import data_endings
from relayrun.tokens.readers.inventory import find_data_files
from relayrun.tokens.stores import urls
from relayrun.tokens.tokenize.encode.tokenizer_files import new_tokenizer_folder, write_tokenizer_folder
from relayrun.tokens.tokenize.options import TokenizeOptions

log = logging.getLogger(__name__)

BOS_TOKEN, EOS_TOKEN = "<|begin_of_text|>", "<|end_of_text|>"
SPECIAL_TOKENS = (BOS_TOKEN, EOS_TOKEN)
SAMPLE_CHARACTERS = 8_000_000
"""Characters of the training text."""
_LONGEST = 20_000
"""Characters taken from a document, so that no long document outweighs the others."""
_BATCH_BYTES = 1 << 20

DEFAULT_COLUMN: str = TokenizeOptions.default("column")


def train_tokenizer(
    folders: Sequence[str | os.PathLike[str]],
    output: Path,
    *,
    column: str = DEFAULT_COLUMN,
    vocabulary_size: int = 4096,
) -> Path:
    """Train a byte-level BPE on the data files below `folders` (local ones or URLs); return `output`.

    `output` becomes a folder that `transformers.AutoTokenizer.from_pretrained` opens: tokenizer.json and its two
    settings files, with BOS_TOKEN as id 0 and EOS_TOKEN as id 1. The tokenizer adds neither to a text. The training
    text is the first SAMPLE_CHARACTERS of the documents, an equal share a folder; the same files give the same
    tokenizer, whatever the number of threads (a test compares the bytes). Raises ConfigError if the vocabulary is too
    small for the 256 bytes, InputError if there is no text or `output` holds a tokenizer.
    """
    if vocabulary_size < 256 + len(SPECIAL_TOKENS):
        raise ConfigError(
            f"a byte-level vocabulary needs {256 + len(SPECIAL_TOKENS)} entries or more, not {vocabulary_size}"
        )
    roots = [urls.absolute_path(folder) for folder in folders]
    files = {root: [path for path, _ in find_data_files(root)] for root in roots}
    chosen = {"folders": roots, "column": column, "vocabulary_size": vocabulary_size}
    read = InputFiles((path for found in files.values() for path in found if not urls.is_url(path)), chosen)
    with new_tokenizer_folder(output, read) as made:
        if made is not None:
            _train(files, made, column=column, vocabulary_size=vocabulary_size)
    return output


def _train(files: Mapping[str, Sequence[str]], output: Path, *, column: str, vocabulary_size: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    sample: list[str] = []
    with Progress("reading", SAMPLE_CHARACTERS, "characters"):
        for folder, found in files.items():
            sample += _sample(folder, found, column, SAMPLE_CHARACTERS // len(files))
    log.info("training a vocabulary of %s entries", f"{vocabulary_size:,}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=has_terminal(),
    )
    tokenizer.train_from_iterator(sample, trainer)
    write_tokenizer_folder(output, tokenizer, {"bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN})


def _sample(folder: str, files: Sequence[str], column: str, characters: int) -> list[str]:
    """Return the beginnings of the first documents of a folder. Raises InputError if there is none."""
    sample = []
    for file in files:
        for texts in read_column(file, column, batch_bytes=_BATCH_BYTES):
            for text in filter(None, texts.to_pylist()):
                sample.append(text[:_LONGEST])
                characters -= len(sample[-1])
                count(len(sample[-1]))
                if characters <= 0:
                    return sample
    if not sample:
        raise InputError(f"no file with text below this folder ends in {data_endings()}", where=folder)
    return sample
