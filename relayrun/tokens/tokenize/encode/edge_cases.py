"""Texts that tokenizers disagree about: the fixed part of every engine's proof."""

from __future__ import annotations

import functools

import numpy as np
from tokenizers import Tokenizer

from relayrun.tokens.tokenize.encode.characters import unicode_categories

_SPACES = " \t\n\r\v\f\x1c\x85\u00a0\u1680\u2000\u2003\u2028\u2029\u202f\u205f\u3000\u200b\ufeff"
_JOINERS = "\u200d\u0301\u0327\u20dd\ufe0f\u093f\u0e33\u1160\U000e0061\U0001f3fd"
_WORDS = (
    "don't I'LL we'Ve 'S 'ſ 'ſt can’t",
    "x1234567890y ٠١٢٣٤ ½²³ⅷ 12.5e-3",
    "ǅungla İstanbul ŉ ß ẞ ﬁ Å Å é é",
    "한국어 각 漢字かな交じり文 ไทย हिन्दी தமிழ்",
    "👩‍👩‍👧‍👦🏳️‍🌈🇩🇪",
    "a\0b\x7f\x80\x9f",
    "<|im_start|> [INST] </s> <s>",
    "snake_case CamelCase HTTPServer2XX __init__ ===>>> \\n ''' \"\"\"",
    "\u0300leading \u0e31 mark",
)


def edge_cases(tokenizer: Tokenizer) -> list[str]:
    """White space in every order, marks, digits, long runs, text of special tokens, and many characters."""
    texts = ["", *_WORDS]
    texts += [f"{first}{second}a{second}{first}\n{first}." for first in _SPACES for second in _SPACES]
    texts += [f"a{mark} {mark}b{mark}{mark}1{mark}\n{mark}'s" for mark in _JOINERS]
    texts += [
        piece * count
        for piece in ("a", " ", "\n", "\r\n", "0", "é", "漢", "\u0301", "ab ", "--")
        for count in (2, 3, 5000)
    ]
    for token in list(tokenizer.get_added_tokens_decoder().values())[:40]:
        content = token.content
        texts += [content, f"a{content}b", f" {content} {content}\n", content[:-1], content + content[1:]]
    return texts + _character_texts()


@functools.cache
def _character_texts() -> list[str]:
    """Every assigned character but letters in a few contexts, and some of the letters; 32 of them a text."""
    category, point = unicode_categories(0, 0x34000), np.arange(0x34000)
    letters = np.isin(category, (b"Lo", b"Ll", b"Lu"))
    every = np.select([point < 0x530, point < 0x3000], [1, 4], 64)
    wanted = ~np.isin(category, (b"Cs", b"Co", b"Cn")) & (~letters | (point % every == 0))
    kept = [*map(chr, np.flatnonzero(wanted).tolist())]
    return ["".join(f"{mark}a{mark} {mark}1" for mark in kept[start : start + 32]) for start in range(0, len(kept), 32)]
