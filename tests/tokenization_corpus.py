"""Small tokenizers and datasets for the tests of tokenization."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from relayrun.tokens.readers.inputs import DataFile, take_inventory
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.job_config import TokenizationSettings

EOS = "<|endoftext|>"

TEXTS = (
    "The quick brown fox jumps over the lazy dog.\n",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю",
    "敏捷的棕色狐狸跳过了懒狗。いろはにほへと ちりぬるを",
    "نص حكيم له سر قاطع وذو شأن عظيم",
    "👩‍👩‍👧‍👦 e\u0301 \u200d \ufeff zero\x00byte \r\n\ttabs",
    f"text that looks special: {EOS} <s> [PAD]",
    "def f(x):\n    return x ** 2  # code\n" * 20,
)


def train_tokenizer(file: Path, *, vocabulary: int = 400) -> Path:
    """A byte-level BPE with EOS, `<s>` and a template that puts `<s>` in front, and truncation, as some ship."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[EOS, "<s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(16)
    file.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(file))
    return file


def expected_ids(tokenizer_file: Path, texts: Sequence[str]) -> list[list[int]]:
    """What Hugging Face's tokenizers gives for each text, one by one, with the EOS behind it."""
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    eos = tokenizer.token_to_id(EOS)
    return [[*tokenizer.encode(text, add_special_tokens=False).ids, eos] for text in texts]


def write_parquet(file: Path | bytes, texts: Sequence[str | None], column: str = "text") -> None:
    """Several row groups, snappy."""
    table = pa.table({"id": list(range(len(texts))), column: pa.array(texts, pa.string())})
    with open(file, "wb") as out:
        pq.write_table(table, out, row_group_size=3)


def shard_documents(prefix: Path) -> list[list[int]]:
    """The ids of every document of a shard."""
    shard = Shard.open(prefix)
    starts = shard.offsets() // shard.dtype.itemsize
    ids = np.asarray(shard.ids())
    return [ids[start : start + length].tolist() for start, length in zip(starts, shard.lengths(), strict=True)]


def taken_files(folder: Path | str, **filters: list[str]) -> list[DataFile]:
    """The files that an inventory takes, copies too. Raises InputError for a file that it refuses."""
    inventory = take_inventory(folder, **filters)
    inventory.refuse()
    return list(inventory.taken)


def dump_settings(folder: Path, tokenizer: Path, **others: Any) -> TokenizationSettings:
    """Settings of dumps whose folders, of metadata, tokens and logs, lie in `folder`."""
    return TokenizationSettings(
        tokenizer=str(tokenizer),
        tokenizer_name="t",
        dataset_name="d",
        metadata_folder=str(folder / "meta"),
        output_folder=str(folder / "tokens"),
        logs=str(folder / "logs"),
        **others,
    )
