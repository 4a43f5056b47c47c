"""A Hugging Face tokenizer made ready for documents.

Ids are those of `tokenizers.Tokenizer.encode(text, add_special_tokens=False)` with `encode_special_tokens`
on: text that looks like a special token stays text, and no template (BOS) is put around a document.
Truncation and padding that a tokenizer.json may ask for are off.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from relayrun.errors import InputError
from relayrun.indexed import token_dtype

_USUAL_EOS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "<|endofdocument|>")


@dataclass(frozen=True, kw_only=True)
class DocumentTokenizer:
    """A tokenizer and what ends a document."""

    tokenizer: Tokenizer
    eos_token: str
    eos_id: int
    size: int
    """Entries with the added tokens, `len(tokenizer)`; not below the largest id + 1 where ids have holes."""

    @property
    def dtype(self) -> type[np.generic]:
        """Of the ids in a shard, by Megatron's rule."""
        return token_dtype(self.size)

    @property
    def fingerprint(self) -> str:
        """sha256 of the serialized tokenizer: equal for equal ids."""
        return hashlib.sha256(self.tokenizer.to_str().encode()).hexdigest()

    def encode(self, texts: Sequence[str]) -> tuple[npt.NDArray[np.generic], npt.NDArray[np.int32]]:
        """Ids of all `texts`, each followed by the EOS, shape [tokens], and the length of each, shape [texts]."""
        encodings = self.tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)
        lengths = np.fromiter((len(encoding) + 1 for encoding in encodings), np.int32, len(texts))
        ids = np.empty(int(lengths.sum(dtype=np.int64)), self.dtype)
        start = 0
        for encoding, length in zip(encodings, lengths.tolist(), strict=True):
            ids[start : start + length - 1] = encoding.ids
            ids[start + length - 1] = self.eos_id
            start += length
        return ids, lengths


def load_tokenizer(name_or_path: str, *, eos_token: str | None = None) -> DocumentTokenizer:
    """Load a tokenizer.json file, a folder that holds one, or a name on the Hugging Face hub.

    The EOS is `eos_token`, or what the configuration beside the tokenizer names, or the one usual name
    among its special tokens. Raises InputError if there is no such tokenizer, EOS or token.
    """
    path = Path(name_or_path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        tokenizer, size = _from_file(file), 0
        eos_token = eos_token or _configured_eos(file.parent) or _usual_eos(tokenizer, name_or_path)
    elif path.is_absolute() or name_or_path.startswith(".") or path.suffix == ".json":
        raise InputError("there is no such tokenizer file", where=file)
    else:
        tokenizer, size, configured = _from_transformers(name_or_path)
        eos_token = eos_token or configured or _usual_eos(tokenizer, name_or_path)
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    eos_id = tokenizer.token_to_id(eos_token)
    if eos_id is None:
        raise InputError(f"the tokenizer has no token {eos_token!r} to end documents with", where=name_or_path,
                         hint="name one of its tokens with --eos-token")  # fmt: skip
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    size = max(size, len(vocabulary), max(vocabulary.values()) + 1)
    return DocumentTokenizer(tokenizer=tokenizer, eos_token=eos_token, eos_id=eos_id, size=size)


def _from_file(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(file.read_text(encoding="utf-8"))
    except Exception as error:  # the library raises Exception itself
        raise InputError(f"not a tokenizer.json of the tokenizers library: {error}", where=file) from None


def _from_transformers(name: str) -> tuple[Tokenizer, int, str | None]:
    from transformers import AutoTokenizer  # seconds to import, and needed for hub names alone

    try:
        loaded: Any = AutoTokenizer.from_pretrained(name)
    except Exception as error:  # OSError, ValueError, ImportError, ... by what is missing
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"no such tokenizer: {reason}", where=name,
                         hint="give a tokenizer.json, a folder that holds one, or a name on the Hugging Face hub",
                         ) from None  # fmt: skip
    backend = getattr(loaded, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise InputError("this tokenizer has no fast version (no tokenizer.json)", where=name)
    return Tokenizer.from_str(backend.to_str()), len(loaded), loaded.eos_token


def _configured_eos(folder: Path) -> str | None:
    """`eos_token` as transformers writes it: text, or an object with its text in `content`."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        try:
            value = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token")
        except FileNotFoundError:
            continue
        except (ValueError, AttributeError):
            raise InputError("not a JSON object", where=folder / name) from None
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            return text
    return None


def _usual_eos(tokenizer: Tokenizer, where: str | os.PathLike[str]) -> str:
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special}
    found = [token for token in _USUAL_EOS if token in special]
    if len(found) == 1:
        return found[0]
    what = f"has several that could be it: {', '.join(found)}" if found else "names none"
    raise InputError(f"which token ends a document? The tokenizer {what}", where=where,
                     hint="name it with --eos-token")  # fmt: skip
