"""Families of tokenizers that a fast engine may encode: its engine, changes of its definition, and excluded texts.

`plan_engine` compares the parts of a tokenizer.json that decide ids (normalizer, pre-tokenizer, options of the model)
literally with the forms listed here, never by name or likeness; the reference encodes unlisted forms. Decision 0029
(decision 0029) proves each form; `tests/property/test_published.py` tries every form on 40,000 texts and on every
character of Unicode.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from relayrun.tokens.tokenize.encode.libraries import FastEngineName, parse_without_vocabulary, vocabulary_and_merges
from relayrun.tokens.tokenize.encode.tokenizer_files import byte_letters

Json = dict[str, Any]
UnicodeForm = Literal["NFC", "NFD", "NFKC", "NFKD"]

PLAIN_BPE = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback", "fuse_unk")
"""Options that a plain BPE model does not set."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = _CONTRACTIONS + r"|" + _WORD + r"\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _SPACES
QWEN2 = CL100K.replace("{1,3}", "")
O200K = "|".join(
    (
        _WORD + _UPPER + "*" + _LOWER + "+" + _CONTRACTIONS + "?",
        _WORD + _UPPER + "+" + _LOWER + "*" + _CONTRACTIONS + "?",
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _SPACES,
    )
)
TEKKEN = O200K.replace(_CONTRACTIONS + "?", "").replace("{1,3}", "")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)


BYTE_LEVEL = {
    (GPT2,): "GPT-2",
    (CL100K,): "Llama 3, cl100k",
    (QWEN2,): "Qwen",
    (O200K,): "o200k",
    (TEKKEN,): "Tekken",
    DEEPSEEK: "DeepSeek",
}
"""Names of the families of byte-level BPE by their split patterns."""
DIGITS_FAMILY = "StarCoder, Digits"
SENTENCEPIECE_FAMILY = "Llama 2, Mistral, Gemma"
BYTES_FAMILY = "a token for each byte"
FAMILIES: dict[str, FastEngineName] = {
    **dict.fromkeys([*BYTE_LEVEL.values(), DIGITS_FAMILY, SENTENCEPIECE_FAMILY], "gigatoken"),
    BYTES_FAMILY: "bytes",
}
"""The engine of each form of tokenizers, by the form's name in the documentation's table."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """Plan of an engine for the texts of one tokenizer."""

    family: str
    engine: FastEngineName
    changes: tuple[tuple[str, str], ...]
    """Changed parts of the definition for the engine: name and JSON."""
    normalize: UnicodeForm | None = None
    """Texts that are not in this form pass through the tokenizer's own normalizer first."""
    digits: Literal["each", "runs"] | None = None
    """The pre-tokenizer isolates every digit, or every run of digits, before its pattern applies to the rest."""
    plain: tuple[str, ...] = ()
    """Texts of added tokens that route a text to the reference."""
    cut: tuple[tuple[str, int], ...] = ()
    """Text and id of added tokens that are cut out of a text first."""
    special: tuple[str, ...] = ()
    """Texts of special tokens, which are not cut but protect the bytes they cover."""


def plan_engine(definition: str) -> EnginePlan | None:
    """Return the plan for a serialized tokenizer, as `Tokenizer.to_str` writes it; None for an unlisted form."""
    known = parse_without_vocabulary(definition)
    model = known["model"]
    if model.get("type") != "BPE":
        return None
    in_pieces = bool(model.get("byte_fallback"))
    entries, merges = vocabulary_and_merges(definition)
    if not in_pieces and merges.startswith("]"):
        return _bytes(known, definition)
    plan = _pieces(known) if in_pieces else _byte_level(known)
    if plan is None:
        return None
    if not has_every_byte(entries, in_pieces=in_pieces):
        return None
    if in_pieces:
        return None if _merges_bytes(merges) else plan
    foreign = _foreign(entries)
    return None if foreign is None else dataclasses.replace(plan, plain=plan.plain + foreign)


_LETTERS = tuple(byte_letters())
_NEVER = {*map(chr, (0xC0, 0xC1, *range(0xF5, 0x100)))}
BYTE_LETTERS = tuple(letter for letter in _LETTERS if letter not in _NEVER)
"""`ByteLevel`'s letters for the bytes that occur in UTF-8: it may drop a letter that the vocabulary lacks."""
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_TWO_BYTES = np.zeros((256, 256), np.bool_)
"""True for each two bytes of UTF-8 that are a letter of `ByteLevel`, by lead and second byte."""
for _letter in _LETTERS:
    if ord(_letter) > 0x7F:
        _TWO_BYTES[tuple(_letter.encode())] = True
_ONE_BYTE = bytes(range(0x21, 0x7F))


def has_every_byte(entries: str, *, in_pieces: bool) -> bool:
    """Return whether a vocabulary has the tokens of all bytes: `ByteLevel`'s letters, or pieces like `<0x0A>`."""
    begun = "," + entries  # a name follows a comma: after an escaped quote it would be the end of another name
    letters = _BYTE_PIECES if in_pieces else BYTE_LETTERS
    return all(f",{json.dumps(letter, ensure_ascii=False)}:" in begun for letter in letters)


def _foreign(entries: str) -> tuple[str, ...] | None:
    """Return the entries of a byte-level vocabulary that are not spelled in bytes; None if unclear.

    `tokenizers` never finds them in a text. gigatoken reads their letters as text and finds them: the reference encodes
    such a text. Special tokens stand in many vocabularies, and some of them hold other letters (`<｜User｜>`).
    """
    data = entries.encode()
    escapes = data.replace(rb"\\", b"").replace(rb"\"", b"")
    if b"\\" not in escapes:
        rest = np.frombuffer(data.translate(None, _ONE_BYTE), np.uint8)
        if rest.size % 2 == 0 and _TWO_BYTES[rest[::2], rest[1::2]].all():
            return ()
    names = [name for name in json.loads("{" + entries + "}") if not _LETTER_SET.issuperset(name)]
    unclear = any(letter > "\x7f" and letter in _LETTER_SET for name in names for letter in name)
    return None if unclear else tuple(name for name in names if name)


_LETTER_SET = frozenset(_LETTERS)
_MERGE_OF_BYTE = re.compile(r'"<0x[0-9A-F]{2}>"')
_MERGE_TO_BYTE = re.compile(r'\["(<[0x0-9A-F]*)","([x0-9A-F]*>)"\]')


def _merges_bytes(merges: str) -> bool:
    """True if a merge of SentencePiece's BPE takes or makes the token of a byte. For gigatoken that token is the byte.
    For `tokenizers` it is a byte only in place of an unknown character."""
    made = (f'"{left}{right}"' for left, right in _MERGE_TO_BYTE.findall(merges))
    return bool(_MERGE_OF_BYTE.search(merges)) or any(map(_MERGE_OF_BYTE.fullmatch, made))


def _byte_level(known: Json) -> EnginePlan | None:
    """Bytes in place of characters: the vocabulary covers any text, and merges alone decide."""
    normalizer = _alone(known.get("normalizer"), "normalizers")
    form = normalizer.get("type") if normalizer else None
    *before, last = _flat(known.get("pre_tokenizer")) or [{}]
    if (
        any(known["model"].get(name) for name in PLAIN_BPE)
        or form not in (None, "NFC", "NFD", "NFKC", "NFKD")
        or last.get("type") != "ByteLevel"
        or last.get("add_prefix_space")
    ):
        return None
    uses_regex = bool(last.get("use_regex", True))
    digits: Literal["each", "runs"] | None = None
    patterns: tuple[str, ...]
    if uses_regex and len(before) == 1 and before[0].get("type") == "Digits":
        digits = "each" if before[0].get("individual_digits") else "runs"
        family, patterns = DIGITS_FAMILY, (GPT2,)
    elif uses_regex and not before:
        family, patterns = BYTE_LEVEL[(GPT2,)], (GPT2,)
    else:
        patterns = tuple(map(_pattern, before))
        if uses_regex or patterns not in BYTE_LEVEL:
            return None
        family = BYTE_LEVEL[patterns]
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = [{"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in patterns]
    prepared: Json = level | {"use_regex": True}
    if patterns != (GPT2,):
        prepared = {"type": "Sequence", "pretokenizers": [*cut, level | {"use_regex": False}]}
    return _plan(known, family, normalize=form, digits=digits, normalizer=None, pre_tokenizer=prepared)


def _bytes(known: Json, definition: str) -> EnginePlan | None:
    """Bytes that are never merged: neither cuts of a text nor names in the vocabulary matter, except those of bytes."""
    model = known["model"]
    level, *others = _flat(known.get("pre_tokenizer"))
    odd = (*(name for name in PLAIN_BPE if name != "unk_token"), "ignore_merges")
    if (
        any(model.get(name) for name in odd)
        or known.get("normalizer") is not None
        or others
        or level.get("type") != "ByteLevel"
        or level.get("add_prefix_space")
    ):
        return None
    vocabulary = json.loads(definition)["model"]["vocab"]
    if not (model["unk_token"] in vocabulary if model.get("unk_token") else vocabulary.keys() >= {*BYTE_LETTERS}):
        return None
    return _plan(known, BYTES_FAMILY)


_SPACE_TO_MARK = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_PIECE_FORMS: tuple[tuple[Json | None, Json | None], ...] = (
    ({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _SPACE_TO_MARK]}, None),
    (_SPACE_TO_MARK, {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}),
    *(
        (None, {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": splits})
        for scheme in ("first", "always")
        for splits in (False, True)
    ),
)
"""Normalizer and pre-tokenizer of SentencePiece's BPE: of Llama 2, Gemma, Mistral. Independent of Unicode's tables."""


def _pieces(known: Json) -> EnginePlan | None:
    model = known["model"]
    odd = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    if (
        (known.get("normalizer"), known.get("pre_tokenizer")) not in _PIECE_FORMS
        or any(model.get(name) for name in odd)
        or not (model.get("unk_token") and model.get("fuse_unk"))
    ):
        return None
    return _plan(known, SENTENCEPIECE_FAMILY)


def _plan(
    known: Json,
    family: str,
    *,
    normalize: UnicodeForm | None = None,
    digits: Literal["each", "runs"] | None = None,
    **changes: Json | None,
) -> EnginePlan | None:
    """The engine gets no added tokens: special tokens are text, and the reference encodes texts with the others.

    A token that `tokenizers` finds in normalized text may be in a text that does not hold its own text: then there is
    no plan, except for Unicode normal forms, whose texts are checked again.
    """
    tokens = known.get("added_tokens") or []
    in_normalized = any(token["normalized"] and not token["special"] for token in tokens)
    if in_normalized and known.get("normalizer") and family == SENTENCEPIECE_FAMILY:
        return None
    parts: Json = {"added_tokens": [], **changes}
    # the text after a cut must be encoded like the beginning of a text
    cuts_allowed = family == SENTENCEPIECE_FAMILY and (known.get("pre_tokenizer") or {}).get("prepend_scheme") is None
    rules = ("special", "normalized", "single_word", "lstrip", "rstrip")
    everywhere = [each for each in tokens if each["content"] and not any(each[rule] for rule in rules)]
    cut = tuple((token["content"], token["id"]) for token in everywhere if cuts_allowed)
    gone = {content for content, _ in cut}
    plain = [token["content"] for token in tokens if not token["special"]]
    return EnginePlan(
        family=family,
        engine=FAMILIES[family],
        changes=tuple((name, json.dumps(value)) for name, value in parts.items()),
        normalize=normalize,
        digits=digits,
        plain=tuple(each for each in plain if each not in gone),
        cut=cut,
        special=tuple(token["content"] for token in tokens if token["special"]) if cut else (),
    )


def _alone(step: Json | None, name: str) -> Json | None:
    steps = _flat(step, name)
    return None if not steps or steps == [{}] else steps[0] if len(steps) == 1 else step


def _flat(step: Json | None, name: str = "pretokenizers") -> list[Json]:
    """Return the steps of a sequence, including nested sequences; never empty for a pre-tokenizer."""
    if step and step.get("type") == "Sequence":
        return [each for part in step[name] for each in _flat(part, name)]
    return [step or {}]


_COVERING = frozenset({GPT2, CL100K, QWEN2, O200K, TEKKEN})
"""Patterns that match every character, so that keeping only their matches removes nothing."""


def _pattern(step: Json) -> str:
    """Return the split pattern of this step, in one spelling; "" for any other step."""
    if step.get("type") != "Split":
        return ""
    pattern = normalize_pattern(str(step["pattern"].get("Regex", "")))
    how = (step.get("behavior"), bool(step.get("invert")))
    isolated = how == ("Isolated", False) or (how == ("Removed", True) and pattern in _COVERING)
    return pattern if isolated else ""


_ESCAPE = re.compile(r"\\(?:x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|([\s\S]))")


def normalize_pattern(pattern: str) -> str:
    """Return a pattern in the spelling of this table: numbered escapes of letters as the letters themselves. DeepSeek's
    definitions spell letters and line ends in both ways."""

    def one(match: re.Match[str]) -> str:
        number = match[1] or match[2] or match[3]
        if number is None:
            return match[0]
        letter = chr(int(number, 16))
        return letter if ord(letter) > 0x7F or letter.isalnum() else match[0]

    found = _ESCAPE.sub(one, pattern)
    return next((each for each in _SPELLINGS if _line_ends(each) == _line_ends(found)), found)


def _line_ends(pattern: str) -> str:
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


_SPELLINGS = frozenset(pattern for patterns in BYTE_LEVEL for pattern in patterns)
