"""The tokenizer of a run in the ranks, checked against the one with which the run began."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from relayrun.config.sections.data import DataSection
from relayrun.errors import ConfigError, FatalTrainingError
from relayrun.tokens.shards.manifest import Manifest
from relayrun.tokens.tokenize.encode.tokenizer import DocumentTokenizer, load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions


def load_run_tokenizer(name: str, manifest: Manifest) -> DocumentTokenizer:
    """Load `data.tokenizer`. Raises FatalTrainingError if its ids changed since the start, InputError if missing."""
    tokenizer = load_tokenizer(TokenizeOptions(tokenizer=name))
    if tokenizer.ids_fingerprint != manifest.tokenizer_ids:
        words = "data.tokenizer is not what it was when the run began: its ids would mean other text"
        raise FatalTrainingError(words, where=name, hint="put it back")
    return tokenizer


def character_token_ids(characters: str, tokenizer: DocumentTokenizer) -> npt.NDArray[np.int64]:
    """Return the token ids of the characters in `data.mask_tokens_except`, int64 [distinct characters]. Raises
    ConfigError for a character that is not exactly one token."""
    found = []
    for character in dict.fromkeys(characters):
        ids = tokenizer.tokenizer.encode(character, add_special_tokens=False).ids
        # an unknown character is one token, too
        if len(ids) != 1 or tokenizer.tokenizer.decode(ids, skip_special_tokens=False) != character:
            words = f"the character {character!r} is no token of this tokenizer"
            hint = "name characters that are tokens, or take a tokenizer of bytes: relayrun dumps tokenizer --bytes"
            raise ConfigError(words, where="data.mask_tokens_except", hint=hint)
        found += ids
    return np.array(found, np.int64)


def counted_token_ids(data: DataSection, manifest: Manifest) -> npt.NDArray[np.int64] | None:
    """Return the ids of the tokens whose losses count, int64; None: all. Raises like both functions above."""
    if data.mask_tokens_except is None:
        return None
    return character_token_ids(data.mask_tokens_except, load_run_tokenizer(data.tokenizer, manifest))
