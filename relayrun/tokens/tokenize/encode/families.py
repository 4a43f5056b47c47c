"""The tokenizers that a fast engine may encode: for each the engine, how its definition is prepared, and what it
may not have.

`plan_engine` compares the parts of a tokenizer.json that decide on ids (normalizer, pre-tokenizer, options of the
model) with the forms listed here, as they are, not by a name or a likeness; what is not listed has no plan, and is
encoded by the reference. Why each form is exact stands in docs/decisions/0029; `tests/property/test_published.py`
tries every form on 40,000 texts and on every character of Unicode.
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
"""Options of a BPE model that a plain one has not."""

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


@dataclass(frozen=True, kw_only=True)
class TokenizerFamily:
    """A form of tokenizer, as the table of the documentation lists it."""

    name: str
    engine: FastEngineName
    doubtful: str = ""
    """Characters whose class depends on the version of Unicode or on case folding: texts with one go elsewhere."""


_FOLDED = "\u017f\u212a"
"""What folds to an ASCII letter: `(?i:'s)` matches an apostrophe and a long s."""
_SPACE_ONCE = "\u180e"
"""White space in some versions of Unicode, and not in others."""

BYTE_LEVEL: dict[tuple[str, ...], TokenizerFamily] = {
    (GPT2,): TokenizerFamily(name="GPT-2", engine="gigatoken", doubtful=_SPACE_ONCE),
    (CL100K,): TokenizerFamily(name="Llama 3, cl100k", engine="gigatoken", doubtful=_SPACE_ONCE + _FOLDED),
    (QWEN2,): TokenizerFamily(name="Qwen", engine="gigatoken", doubtful=_SPACE_ONCE + _FOLDED),
    (O200K,): TokenizerFamily(name="o200k", engine="gigatoken", doubtful=_SPACE_ONCE + _FOLDED),
    (TEKKEN,): TokenizerFamily(name="Tekken", engine="gigatoken", doubtful=_SPACE_ONCE),
    DEEPSEEK: TokenizerFamily(name="DeepSeek", engine="gigatoken", doubtful=_SPACE_ONCE),
}
"""Families of byte-level BPE by the patterns that cut their texts."""
DIGITS_FAMILY = TokenizerFamily(name="StarCoder, Digits", engine="gigatoken", doubtful=_SPACE_ONCE)
SENTENCEPIECE_FAMILY = TokenizerFamily(name="Llama 2, Mistral, Gemma", engine="gigatoken")
WORDPIECE_FAMILY = TokenizerFamily(name="BERT", engine="nanotoken")
UNIGRAM_FAMILY = TokenizerFamily(name="T5, XLM-R", engine="splintr")
BYTES_FAMILY = TokenizerFamily(name="a token for each byte", engine="bytes")
FAMILIES = (*BYTE_LEVEL.values(), DIGITS_FAMILY, SENTENCEPIECE_FAMILY, WORDPIECE_FAMILY, UNIGRAM_FAMILY, BYTES_FAMILY)
BYTE_LEVEL_FAMILIES = frozenset(family.name for family in (*BYTE_LEVEL.values(), DIGITS_FAMILY))
"""Names of the families whose words are written in letters for bytes."""


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """How one engine encodes the texts of one tokenizer."""

    family: str
    engine: FastEngineName
    changes: tuple[tuple[str, str], ...]
    """Parts of the definition that the engine gets changed: name and JSON."""
    normalize: UnicodeForm | None = None
    """Texts that are not in this form go through the tokenizer's own normalizer first."""
    digits: Literal["each", "runs"] | None = None
    """What the pre-tokenizer cuts out of a text before its pattern sees the rest: every digit, or every run."""
    doubtful: str = ""
    """Characters that send a text elsewhere, besides those that are not assigned."""
    plain: tuple[str, ...] = ()
    """Text that sends a text elsewhere: of added tokens."""
    cut: tuple[tuple[str, int], ...] = ()
    """Text and id of added tokens that are cut out of a text first."""
    special: tuple[str, ...] = ()
    """Text of special tokens, which is not cut but covers what would be."""


def plan_engine(definition: str) -> EnginePlan | None:
    """The plan for a serialized tokenizer, as `Tokenizer.to_str` writes it; None where no form is its own."""
    known = parse_without_vocabulary(definition)
    model = known["model"]
    kind = "pieces" if model.get("byte_fallback") and model.get("type") == "BPE" else str(model.get("type"))
    if kind == "BPE" and vocabulary_and_merges(definition)[1].startswith("]"):
        return _bytes(known, definition)
    find = {"BPE": _byte_level, "pieces": _pieces, "WordPiece": _wordpiece, "Unigram": _unigram}.get(kind)
    plan = find(known) if find else None
    if plan is None or kind not in ("BPE", "pieces"):
        return plan
    entries, merges = vocabulary_and_merges(definition)
    letters = BYTE_LETTERS if kind == "BPE" else _BYTE_PIECES
    begun = "," + entries  # a name stands behind a comma: behind an escaped quote it would be the end of another one
    if not all(f",{json.dumps(letter, ensure_ascii=False)}:" in begun for letter in letters):
        return None
    if kind == "pieces":
        return None if _merges_bytes(merges) else plan
    foreign = _foreign(entries)
    return None if foreign is None else dataclasses.replace(plan, plain=plan.plain + foreign)


_LETTERS = tuple(byte_letters())
_NEVER = {*map(chr, (0xC0, 0xC1, *range(0xF5, 0x100)))}
BYTE_LETTERS = tuple(letter for letter in _LETTERS if letter not in _NEVER)
"""What `ByteLevel` writes for the bytes that UTF-8 has: one that the vocabulary lacks would be dropped, or not."""
_BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_TWO_BYTES = np.zeros((256, 256), np.bool_)
"""Which two bytes of UTF-8 are a letter of `ByteLevel`, by lead and the byte behind it."""
for _letter in _LETTERS:
    if ord(_letter) > 0x7F:
        _TWO_BYTES[tuple(_letter.encode())] = True
_ONE_BYTE = bytes(range(0x21, 0x7F))


def _foreign(entries: str) -> tuple[str, ...] | None:
    """Entries of a byte-level vocabulary that are not written in bytes; None where it is unclear what they are.

    `tokenizers` never finds them in a text. gigatoken reads their letters as text, and finds them: such a text goes
    elsewhere. Special tokens stand in many vocabularies, and some of them hold other letters (`<｜User｜>`).
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
    """Whether a merge of SentencePiece's BPE takes the token of a byte, or gives one.

    For gigatoken that token is the byte. For `tokenizers` it is a byte only where a character is unknown.
    """
    made = (f'"{left}{right}"' for left, right in _MERGE_TO_BYTE.findall(merges))
    return bool(_MERGE_OF_BYTE.search(merges)) or any(map(_MERGE_OF_BYTE.fullmatch, made))


def _byte_level(known: Json) -> EnginePlan | None:
    """Bytes in the place of characters: the vocabulary is whole, whatever the text, and merges are all there is."""
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
    """Bytes that are never merged: no cut of a text and no name in the vocabulary but those of bytes matters."""
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
"""Normalizer and pre-tokenizer of SentencePiece's BPE: of Llama 2, of Gemma, of Mistral. No Unicode table decides."""


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


def _wordpiece(known: Json) -> EnginePlan | None:
    normalizer, model = known.get("normalizer") or {}, known["model"]
    wanted = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None}
    if (
        {name: value for name, value in normalizer.items() if name != "lowercase"} != wanted
        or known.get("pre_tokenizer") != {"type": "BertPreTokenizer"}
        or model.get("continuing_subword_prefix") != "##"
        or model.get("max_input_chars_per_word") != 100
    ):
        return None
    return _plan(known, WORDPIECE_FAMILY)


_ALWAYS = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
_UNIGRAM_CUTS = (_ALWAYS, {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, _ALWAYS]})
_MANY_SPACES = {"Regex": " {2,}"}


def _unigram(known: Json) -> EnginePlan | None:
    """What SentencePiece's models become: a precompiled map of characters, and words behind their spaces."""
    first, *others = _flat(known.get("normalizer"), "normalizers") or [{}]
    allowed = (
        *({"type": "Replace", "pattern": _MANY_SPACES, "content": content} for content in (" ", "▁")),
        {"type": "Strip", "strip_left": False, "strip_right": True},
    )
    if (
        first.get("type") != "Precompiled"
        or not all(step in allowed for step in others)
        or known.get("pre_tokenizer") not in _UNIGRAM_CUTS
        or known["model"].get("byte_fallback")
        or known["model"].get("unk_id") is None
    ):
        return None
    plan = _plan(known, UNIGRAM_FAMILY, special_too=True)
    unknown = str(known["model"]["vocab"][known["model"]["unk_id"]][0])  # splintr finds its name in a text
    return plan and dataclasses.replace(plan, plain=(*plan.plain, unknown))


def _plan(
    known: Json,
    family: TokenizerFamily,
    *,
    normalize: UnicodeForm | None = None,
    digits: Literal["each", "runs"] | None = None,
    special_too: bool = False,
    **changes: Json | None,
) -> EnginePlan | None:
    """The engine gets no added tokens: special ones are text, and texts with others go elsewhere.

    A token that `tokenizers` looks for in normalized text may be in a text that does not hold its own: then there is
    no plan, but where the normalizer is a normal form, whose texts are looked at again.
    """
    tokens = known.get("added_tokens") or []
    in_normalized = any(token["normalized"] and not token["special"] for token in tokens)
    if in_normalized and known.get("normalizer") and family in (SENTENCEPIECE_FAMILY, WORDPIECE_FAMILY, UNIGRAM_FAMILY):
        return None
    parts: Json = {"added_tokens": [], **changes}
    # what stands behind a cut must be encoded as at the beginning of a text
    cuts_allowed = family is SENTENCEPIECE_FAMILY and (known.get("pre_tokenizer") or {}).get("prepend_scheme") is None
    cut = tuple((token["content"], token["id"]) for token in tokens if cuts_allowed and _is_plain(token))
    gone = {content for content, _ in cut}
    plain = [token["content"] for token in tokens if special_too or not token["special"]]
    return EnginePlan(
        family=family.name,
        engine=family.engine,
        changes=tuple((name, json.dumps(value)) for name, value in parts.items()),
        normalize=normalize,
        digits=digits,
        doubtful=family.doubtful,
        plain=tuple(each for each in plain if each not in gone),
        cut=cut,
        special=tuple(token["content"] for token in tokens if token["special"]) if cut else (),
    )


def _is_plain(token: Json) -> bool:
    """Whether its text is a token wherever it stands, and nothing around it belongs to it."""
    rules = ("special", "normalized", "single_word", "lstrip", "rstrip")
    return bool(token["content"]) and not any(token[rule] for rule in rules)


def _alone(step: Json | None, name: str) -> Json | None:
    """What a sequence of one step, or of none, amounts to."""
    steps = _flat(step, name)
    return None if not steps or steps == [{}] else steps[0] if len(steps) == 1 else step


def _flat(step: Json | None, name: str = "pretokenizers") -> list[Json]:
    """The steps of a sequence, those of sequences inside it too; never none of a pre-tokenizer."""
    if step and step.get("type") == "Sequence":
        return [each for part in step[name] for each in _flat(part, name)]
    return [step or {}]


_COVERING = frozenset({GPT2, CL100K, QWEN2, O200K, TEKKEN})
"""Patterns that match every character, so that to keep their matches alone removes nothing."""


def _pattern(step: Json) -> str:
    """The pattern by which this step cuts, in one spelling; "" where it does something else."""
    if step.get("type") != "Split":
        return ""
    pattern = normalize_pattern(str(step["pattern"].get("Regex", "")))
    how = (step.get("behavior"), bool(step.get("invert")))
    isolated = how == ("Isolated", False) or (how == ("Removed", True) and pattern in _COVERING)
    return pattern if isolated else ""


_ESCAPE = re.compile(r"\\(?:x\{([0-9A-Fa-f]+)\}|x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|([\s\S]))")


def normalize_pattern(pattern: str) -> str:
    """A pattern in the spelling of this table: numbered escapes of letters as the letters themselves.

    DeepSeek's first cuts are written with letters, or with their numbers, and line ends as escapes or themselves.
    """

    def one(match: re.Match[str]) -> str:
        number = match[1] or match[2] or match[3]
        if number is None:
            return match[0]
        letter = chr(int(number, 16))
        return letter if ord(letter) > 0x7F or letter.isalnum() else match[0]

    found = _ESCAPE.sub(one, pattern)
    return next((each for each in _SPELLINGS if _line_ends(each) == _line_ends(found)), found)


def _line_ends(pattern: str) -> str:
    """With line ends as escapes."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


_SPELLINGS = frozenset(pattern for patterns in BYTE_LEVEL for pattern in patterns)
