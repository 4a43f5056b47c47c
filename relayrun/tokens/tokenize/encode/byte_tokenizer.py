"""A tokenizer without training: every byte of a text is a token, whose id is the byte.

The ids are those of the tokenizers of genome models (ASCII, with EOS 0, PAD 1, BOS 2 and UNK 3). Bytes 0 to 3, whose
ids the special tokens have, become UNK; no text of letters holds them.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from relayrun.errors import InputError, refuse_urls
from relayrun.files import exclusive_maker, write_atomic, write_json

BYTE_SPECIAL_TOKENS = {"eos_token": "<EOS>", "pad_token": "<PAD>", "bos_token": "<BOS>", "unk_token": "<UNK>"}
"""Special tokens by what transformers calls them, in the order of their ids."""


def write_byte_tokenizer(output: Path) -> Path:
    """Write the tokenizer as a folder that `transformers.AutoTokenizer.from_pretrained` opens; return `output`.

    It puts nothing around a text. Raises InputError if `output` holds a tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    ids = {token: number for number, token in enumerate(BYTE_SPECIAL_TOKENS.values())}
    known = {letter: byte for byte, letter in enumerate(byte_letters()) if byte >= len(ids)}
    tokenizer = Tokenizer(models.BPE(ids | known, [], unk_token=BYTE_SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*ids])
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    with hold_tokenizer_folder(output):
        output.mkdir(parents=True, exist_ok=True)
        write_json(output / "special_tokens_map.json", BYTE_SPECIAL_TOKENS)
        write_json(output / "tokenizer_config.json", settings | BYTE_SPECIAL_TOKENS)
        write_atomic(output / "tokenizer.json", tokenizer.to_str(pretty=True))
    return output


@contextlib.contextmanager
def hold_tokenizer_folder(output: Path) -> Iterator[None]:
    """Keep other processes from making a tokenizer in this folder. Raises InputError where it holds or gets one."""
    refuse_urls(output)
    with exclusive_maker(Path(os.path.realpath(output))) as held:
        if not held:
            raise InputError("another process makes a tokenizer here", where=output, hint="choose another folder")
        if (output / "tokenizer.json").exists():
            raise InputError("there is a tokenizer", where=output, hint="move it away, or choose another folder")
        yield


def byte_letters() -> list[str]:
    """The letter that stands for each byte in a byte-level vocabulary: itself where it can be seen (GPT-2's table)."""
    seen = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in seen else next(others)) for byte in range(256)]
