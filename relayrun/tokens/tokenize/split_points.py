"""Where a long document may be cut: the ids of its pieces, one behind the other, are those of the whole.

BPE looks at one pre-token at a time, so a cut is exact where no pre-token reaches over it and none ends elsewhere
because of it. With the pre-tokenizers listed here that holds between a newline and a letter where a letter stands
before the newline, too: no alternative of theirs matches a newline and a letter behind it, and the white space run
is the newline alone, whatever follows (`\\s+(?!\\S)` looks no further than that). A Unicode normaliser never joins a
newline to anything. Letters are taken from blocks that every version of Unicode's tables agrees about.
A tokenizer without merges gives every character ids of its own: it may be cut between any two.
So a document needs the memory of a piece, however long it is; other tokenizers get it whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from relayrun.tokens.tokenize.encode.families import CL100K, O200K, PLAIN_BPE, QWEN2

CUTTABLE_PATTERNS = frozenset({CL100K, QWEN2, O200K})
"""The patterns of Llama 3 and cl100k, Qwen 2, o200k; GPT-2's is known as ByteLevel with `use_regex`."""

_LETTERS = (
    "A-Za-z\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u0233\u0391-\u03a1\u03a3-\u03ce\u0410-\u044f\u05d0-\u05ea\u0621-\u063a"
    "\u0905-\u0939\u0e01-\u0e30\u3041-\u3094\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3"
)
_LINE_CUT = re.compile(f"[{_LETTERS}]\n(?=[{_LETTERS}])")
_WINDOW = 1 << 16


CutUnit = Literal["lines", "characters"]


def cut_unit(known: dict[str, Any], *, merges: bool) -> CutUnit | None:
    """What documents of this tokenizer may be cut between; None: nothing.

    `known` is its tokenizer.json, without the vocabulary perhaps; `merges`: whether its BPE has any.
    """
    model, normalizer, before = known["model"], known.get("normalizer"), known.get("pre_tokenizer") or {}
    *splits, last = before.get("pretokenizers") or [before]
    added = [token for token in known.get("added_tokens", []) if not token["special"]]
    if (
        model.get("type") != "BPE"
        or last.get("type") != "ByteLevel"
        or last.get("add_prefix_space")
        or any(token["lstrip"] or token["rstrip"] or "\n" in token["content"] for token in added)
    ):
        return None
    odd = any(model.get(name) for name in (*PLAIN_BPE, "ignore_merges"))
    if not (merges or odd or splits or normalizer or added):
        return "characters"
    if normalizer and normalizer.get("type") not in ("NFC", "NFD", "NFKC", "NFKD"):
        return None
    exact = bool(last.get("use_regex", True)) if not splits else len(splits) == 1 and _is_cuttable(splits[0])
    return "lines" if exact else None


def _is_cuttable(split: dict[str, Any]) -> bool:
    return (
        split.get("type") == "Split"
        and split["pattern"].get("Regex") in CUTTABLE_PATTERNS
        and split.get("behavior") == "Isolated"
        and not split.get("invert")
    )


def split_points(text: npt.NDArray[np.uint8], size: int, where: CutUnit = "lines") -> Iterator[int]:
    """Where pieces of the UTF-8 `text` end: each begins at least `size` bytes before; the last end is the text's."""
    find, end = {"lines": _next_line_cut, "characters": _next_character_cut}[where], 0
    while text.size - end > size and (after := find(text, end + size)) is not None:
        end = after
        yield end
    if end != text.size:
        yield text.size


def _next_character_cut(text: npt.NDArray[np.uint8], begin: int) -> int | None:
    """The first place from `begin` where a character begins, behind the first one."""
    window = text[max(begin, 1) : begin + 5]
    heads = np.flatnonzero(window & 0xC0 != 0x80)
    return max(begin, 1) + int(heads[0]) if heads.size else None


def _next_line_cut(text: npt.NDArray[np.uint8], begin: int) -> int | None:
    """The first place behind `begin` where `text` may be cut."""
    for start in range(begin, text.size, _WINDOW - 16):  # windows overlap by the longest place
        window = text[start : start + _WINDOW].tobytes()
        inside = next((byte for byte in range(min(4, len(window))) if window[byte] & 0xC0 != 0x80), 0)
        string = window[inside:].decode("utf-8", "ignore")
        if found := _LINE_CUT.search(string):
            return start + inside + len(string[: found.end()].encode())
    return None
