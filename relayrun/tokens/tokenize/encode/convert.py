"""Tokenizers without a tokenizer.json: which folders transformers converts exactly, and what to do about the others."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

from relayrun.errors import InputError

_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+={0,2} [0-9]+\r?\n")
"""The first line of a tiktoken file: a token in base64, and its rank."""

_CONVERTIBLE_FILES = (
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tokenizer.model",
)
"""Files that a tokenizer of transformers is made from."""

_SAVE_COMMAND = (
    'python -c \'from transformers import AutoTokenizer as A; A.from_pretrained("IN").save_pretrained("OUT")\''
)


def check_convertible(folder: Path) -> None:
    """Raise InputError, saying what to do, unless transformers can make a tokenizer.json from what `folder` holds."""
    if not (folder / "tokenizer_config.json").is_file() and not (folder / "config.json").is_file():
        found = [name for name in _CONVERTIBLE_FILES if (folder / name).is_file()]
        raise InputError(
            "there is no tokenizer.json here"
            + (f"; {', '.join(found)} alone do not say how to split" if found else ""),
            where=folder,
            hint="give the folder with tokenizer_config.json, too: from it transformers converts the tokenizer",
        )
    for file in sorted([*folder.glob("*.model"), *folder.glob("*.tiktoken")]):
        refuse_unconvertible(file, in_folder=True)


def refuse_unconvertible(file: Path, *, in_folder: bool = False) -> None:
    """Raise InputError, saying what to do, for a tiktoken or SentencePiece file that cannot be converted exactly here.

    In a folder with its configuration a SentencePiece model can be, where its package is installed.
    """
    with open(file, "rb") as opened:
        first = opened.readline(1000)
    if _TIKTOKEN.fullmatch(first):
        # transformers would take the pattern of Llama 3 for every such file
        raise InputError(
            "this is a tiktoken file, which does not say how text is split into words; there is no tokenizer.json",
            where=file,
            hint="convert it with the pattern of its model, transformers.convert_slow_tokenizer.TikTokenConverter("
            "vocab_file=..., pattern=...).converted().save(...), or take a tokenizer.json of the same model",
        )
    if file.suffix == ".model" and not in_folder:
        raise InputError(
            "this is a model of SentencePiece, not a tokenizer.json",
            where=file,
            hint="give the folder that holds it and tokenizer_config.json",
        )
    if file.suffix == ".model" and importlib.util.find_spec("sentencepiece") is None:
        raise InputError(
            "there is no tokenizer.json, and to convert this model takes the package sentencepiece",
            where=file,
            hint=f"`pip install sentencepiece`, or convert it where it is installed: {_SAVE_COMMAND}",
        )
