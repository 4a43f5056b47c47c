"""Twenty tokenizers with pre-tokenizer, normalizer, decoder and size as published, made without a network.

Vocabularies come from the package `splintr-rs` where it ships them (most byte-level and SentencePiece ones); the others
are trained on texts of this machine, as large as published. What is made is kept, under a hash of this file, in the
folder `relayrun-tokenizers` of the system's folder for temporary files.
"""

from __future__ import annotations

import functools
import gettext
import hashlib
import json
import os
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import splintr
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from tests.tokenization_corpus import TEXTS

Json = dict[str, Any]
SUSPECTS = "\u180e\u017f\u212a\u1680\u2002\u200b\u200d\u2028\u202f\u205f\u2060\ufeff\u00ad\u0085\u00a0\u3000\ufffd\x1c"
"""Characters whose class has changed, or that libraries disagree about."""
CACHE = (
    Path(tempfile.gettempdir()) / "relayrun-tokenizers" / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
)
TRAINED_ON_MB = {"byte-level": 12, "wordpiece": 12, "unigram": 3}

_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPACE = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{_CONTRACTION}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACE}"
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = rf"{_WORD}{_UPPER}*{_LOWER}+|{_WORD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
O200K = (
    rf"{_WORD}{_UPPER}*{_LOWER}+{_CONTRACTION}?|{_WORD}{_UPPER}+{_LOWER}*{_CONTRACTION}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACE}"
)
_NO_HAN = r"&&[^\p{Han}]]"
KIMI = rf"[\p{{Han}}]+|{O200K}".replace(r"\p{M}]", rf"\p{{M}}{_NO_HAN}")
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
SUPERBPE = r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]{2,}[\r\n/]*| +(?!\S)"
RIGHT_TO_LEFT = r"\d{1,3}(?=(?:\d{3})*(?:\D|$))"


def byte_level(use_regex: bool = True) -> Json:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def split(pattern: str, behavior: str = "Isolated", *, invert: bool = False) -> Json:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def steps(*parts: Json) -> Json:
    return {"type": "Sequence", "pretokenizers": list(parts)}


def by_patterns(*patterns: str) -> Json:
    return steps(*map(split, patterns), byte_level(use_regex=False))


def metaspace(prepend_scheme: str, *, splits: bool) -> Json:
    return {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend_scheme, "split": splits}


def replace(old: Json, new: str) -> Json:
    return {"type": "Replace", "pattern": old, "content": new}


def added(content: str, id_: int, *, special: bool = True, **rules: bool) -> Json:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": id_, "content": content, **plain, **rules, "special": special}


_PREPEND = {"type": "Prepend", "prepend": "▁"}
LLAMA2_NORMALIZER = {"type": "Sequence", "normalizers": [_PREPEND, replace({"String": " "}, "▁")]}


def definition(
    model: Json, *, pre_tokenizer: Json | None, normalizer: Json | None = None, added_tokens: list[Json] | None = None
) -> str:
    """A tokenizer.json, as `Tokenizer.to_str` writes it."""
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added_tokens or [],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": model,
    }
    return str(Tokenizer.from_str(json.dumps(whole)).to_str())


def bpe(vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any) -> Json:
    plain = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    plain |= {"fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    return {"type": "BPE", **plain, **options, "vocab": vocab, "merges": merges}


@functools.cache
def byte_letters() -> list[str]:
    """The character that `ByteLevel` writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    return [letters[byte] for byte in range(256)]


def _letters(token: bytes) -> str:
    return "".join(map(byte_letters().__getitem__, token))


def merges_of(vocab: dict[str, int], mergeable: list[str]) -> list[tuple[str, str]]:
    """Every way to make each of `mergeable` of two others, the lowest id first, as transformers converts ranks."""
    known, merges = set(mergeable), []
    for token in mergeable:
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        found = [(left, right) for left, right in pairs if left in known and right in known]
        merges += sorted(found, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
    return merges


def bundled(name: str, first: int = 0, **options: Any) -> Json:
    """A byte-level BPE of `splintr`, whose ids from `first` are ranks."""
    source = splintr.Tokenizer.from_pretrained(name)
    special = set(source.special_tokens().values())
    ranks: dict[str, int] = {}
    for id_ in range(first, splintr.base_vocab_size(name)):
        try:
            token = b"" if id_ in special else source.decode_token_bytes(id_)
        except ValueError:  # a hole
            token = b""
        if token:
            ranks.setdefault(_letters(token), id_)
    return bpe(ranks, merges_of(ranks, list(ranks)), **options)


def bundled_pieces(name: str, *, first_byte: int) -> Json:
    """A SentencePiece BPE with byte fallback of `splintr`."""
    source = splintr.Tokenizer.from_pretrained(name)
    vocab = {content: id_ for content, id_ in source.special_tokens().items() if id_ < splintr.base_vocab_size(name)}
    pieces = []
    for id_ in range(splintr.base_vocab_size(name)):
        token = source.decode_token_bytes(id_)
        if first_byte <= id_ < first_byte + 256:
            vocab[f"<0x{id_ - first_byte:02X}>"] = id_
        elif token:
            piece = token.decode("utf-8", "replace").replace(" ", "▁")
            if piece not in vocab:
                vocab[piece] = id_
                pieces += [piece] if id_ >= first_byte + 256 else []
    return bpe(vocab, merges_of(vocab, pieces), unk_token="<unk>", fuse_unk=True, byte_fallback=True)


def local_texts(megabytes: float) -> Iterator[str]:
    """Catalogues of translations, and sources and documents of the installed packages, until there is enough."""
    catalogues = sorted(Path("/usr/share/locale").glob("*/LC_MESSAGES/*.mo"))
    library = Path(sysconfig.get_paths()["purelib"])
    sources = sorted(path for end in ("py", "md", "txt", "rst") for path in library.glob(f"*/**/*.{end}"))
    for paths, share in (
        (catalogues[:: max(1, len(catalogues) // 4000)], 0.6),
        (sources[:: len(sources) // 4000], 1.0),
    ):
        left = megabytes * 1e6 * share
        megabytes *= 1 - share
        for path in paths:
            text = _text(path)
            left -= len(text)
            yield text
            if left < 0:
                break


def _text(path: Path) -> str:
    try:
        if path.suffix != ".mo":
            return path.read_text(encoding="utf-8")[:100_000]
        with path.open("rb") as file:
            return "\n".join(gettext.GNUTranslations(file)._catalog.values())[:100_000]  # type: ignore[attr-defined]
    except (UnicodeError, ValueError, OSError, TypeError, IndexError):
        return ""


@functools.cache
def _trained(kind: str, small: bool) -> Json:
    """The model alone, of published size or of 4,000 entries."""
    made, trainer = _untrained(kind)
    if small:  # whose tokens reach over every border, so that a text that is cut elsewhere gets other ids
        trainer.vocab_size = 4000
        if kind == "byte-level":
            made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        elif kind == "pieces":
            made.normalizer, made.pre_tokenizer = normalizers.Replace(" ", "▁"), None
    texts = [*TEXTS * 2, *_borders()] if small else local_texts(TRAINED_ON_MB[kind])
    made.train_from_iterator(texts, trainer)
    model: Json = json.loads(made.to_str())["model"]
    return model


def _borders() -> list[str]:
    """Every two of the characters that cuts depend on, twice, with a third behind them."""
    around = (*SUSPECTS, *"ab A1\n'.漢é", "s", "'s", "\u0301")
    return [f"{first}{second}{third}" for first in around for second in around for third in ("s", "1", " ")] * 2


def _untrained(kind: str) -> tuple[Tokenizer, Any]:
    if kind == "byte-level":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        return made, trainers.BpeTrainer(vocab_size=50_256, initial_alphabet=alphabet, show_progress=False)
    if kind == "pieces":
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        made.pre_tokenizer = pre_tokenizers.Metaspace()
        special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        return made, trainers.BpeTrainer(vocab_size=32_000, special_tokens=special, show_progress=False)
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
        return made, trainers.WordPieceTrainer(vocab_size=30_522, special_tokens=special, show_progress=False)
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizers.NFKC(), pre_tokenizers.Metaspace()
    return made, trainers.UnigramTrainer(
        vocab_size=32_100, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )


@functools.cache
def precompiled() -> Json:
    """The normalizer `nmt_nfkc` of SentencePiece, which T5 and XLM-R ship: from a model of a few words."""
    import io

    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a few words are enough for this"] * 10),
        model_writer=made,
        vocab_size=20,
        model_type="char",
        hard_vocab_limit=False,
        normalization_rule_name="nmt_nfkc",
        minloglevel=2,
    )
    model = sentencepiece_model_pb2.ModelProto.FromString(made.getvalue())
    return json.loads(normalizers.Precompiled(model.normalizer_spec.precompiled_charsmap).__getstate__())  # type: ignore[no-any-return]


Models = Callable[[str], Json]
"""The model of a tokenizer, by name: of published size, or a small one of the same kind."""


def published_model(name: str) -> Json:
    """The vocabulary that is published under this name, or one as large, trained here."""
    bundles: dict[str, tuple[Any, ...]] = {
        "Llama 3": ("llama3", 0, True),
        "o200k": ("o200k_base", 0),
        "cl100k": ("cl100k_base", 0),
        "Qwen": ("qwen3", 0),
        "DeepSeek": ("deepseek_v3", 0),
        "Tekken": ("mistral_v3", 1000, True),
        "Kimi-like": ("kimi_k2", 0),
        "SuperBPE-like": ("olmo2", 0),
        "ModernBERT": ("modernbert", 2),
    }
    pieces = {"Mistral": ("mistral_v2", 771), "Gemma": ("gemma2", 217), "Llama 2": ("llama2", 3)}
    if name in bundles:
        bundle, first, *ignores = bundles[name]
        return bundled(bundle, first, ignore_merges=bool(ignores))
    if name in pieces:
        return bundled_pieces(pieces[name][0], first_byte=pieces[name][1])
    return _trained_model(name, small=False)


def small_model(name: str) -> Json:
    """A model of 4,000 entries of the same kind."""
    model = _trained_model(name, small=True)
    return model | {"ignore_merges": True} if name in ("Llama 3", "Tekken") else model


def _trained_model(name: str, *, small: bool) -> Json:
    if name == "one token a byte":
        return bpe({letter: byte for byte, letter in enumerate(byte_letters())}, [])
    kinds = {"T5": "unigram", "XLM-R": "unigram", "BERT": "wordpiece"}
    kinds |= dict.fromkeys(("Mistral", "Gemma", "Llama 2"), "pieces")
    return _trained(kinds.get(name, "byte-level"), small)


def _with(
    model: Json, pre_tokenizer: Json | None, normalizer: Json | None = None, tokens: list[Json] | None = None
) -> str:
    """With one special token, where none are given."""
    if tokens is None:
        tokens = [added("<|endoftext|>", max(model["vocab"].values()) + 1)]
    return definition(model, pre_tokenizer=pre_tokenizer, normalizer=normalizer, added_tokens=tokens)


_SPECIAL_PIECES = [added(content, id_) for id_, content in enumerate(("<unk>", "<s>", "</s>"))]


def _gemma(model: Json) -> str:
    """Lines, runs of spaces, tags and what is unused are tokens that are not special."""
    cut = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
    first = max(model["vocab"].values()) + 1
    runs = [letter * length for letter in "\n▁" for length in range(2 - (letter == "\n"), 6)]
    names = enumerate([*runs, "<b>", "</b>", "<"], first)
    tokens = [*_SPECIAL_PIECES, *(added(content, id_, special=False) for id_, content in names)]
    if len(model["vocab"]) > 200_000:
        tokens = [added(content, id_) for id_, content in enumerate(("<pad>", "<eos>", "<bos>", "<unk>"))]
        names = enumerate(sorted(model["vocab"], key=model["vocab"].__getitem__)[4:217], 4)
        tokens += [added(content, id_, special=False) for id_, content in names]
    return _with(model, cut, replace({"String": " "}, "▁"), tokens)


def _modernbert(model: Json) -> str:
    """Runs of spaces are tokens that are not special."""
    first = max(model["vocab"].values()) + 1
    tokens = [added(" " * (24 - at), first + at, special=False, normalized=True) for at in range(23)]
    return _with(model, byte_level(), {"type": "NFC"}, [*tokens, added("[MASK]", first + 23, lstrip=True)])


def _unigram(model: Json, *, splits_words: bool) -> str:
    tokens = [added(content, id_) for id_, content in enumerate(("<pad>", "</s>", "<unk>"))]
    words = metaspace("always", splits=True)
    if splits_words:
        return _with(model, steps({"type": "WhitespaceSplit"}, words), precompiled(), tokens)
    spaces = replace({"Regex": " {2,}"}, "▁")
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    normalizer = {"type": "Sequence", "normalizers": [precompiled(), strip, spaces]}
    return _with(model, words, normalizer, tokens)


def _bert(model: Json) -> str:
    normalizer = {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True}
    normalizer |= {"strip_accents": None, "lowercase": True}
    names = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    tokens = [added(content, id_) for id_, content in enumerate(names)]
    return _with(model, {"type": "BertPreTokenizer"}, normalizer, tokens)


_DIGITS = {"type": "Digits", "individual_digits": True}
_REMOVED = split(LLAMA3, "Removed", invert=True)

FORMS: dict[str, Callable[[Json], str]] = {
    "Llama 3": lambda model: _with(model, by_patterns(LLAMA3)),
    "GPT-2": lambda model: _with(model, byte_level()),
    "o200k": lambda model: _with(model, by_patterns(O200K)),
    "cl100k": lambda model: _with(model, steps(_REMOVED, byte_level(use_regex=False))),
    "Qwen": lambda model: _with(model, by_patterns(QWEN2), {"type": "NFC"}),
    "DeepSeek": lambda model: _with(model, by_patterns(*DEEPSEEK), {"type": "Sequence", "normalizers": []}),
    "StarCoder": lambda model: _with(model, steps(_DIGITS, byte_level())),
    "Tekken": lambda model: _with(model, by_patterns(TEKKEN)),
    "Kimi-like": lambda model: _with(model, by_patterns(KIMI)),
    "SuperBPE-like": lambda model: _with(model, by_patterns(SUPERBPE)),
    "Mistral": lambda model: _with(model, metaspace("first", splits=False), None, _SPECIAL_PIECES),
    "Gemma": _gemma,
    "Llama 2": lambda model: _with(model, None, LLAMA2_NORMALIZER, _SPECIAL_PIECES),
    "T5": functools.partial(_unigram, splits_words=True),
    "XLM-R": functools.partial(_unigram, splits_words=False),
    "BERT": _bert,
    "ModernBERT": _modernbert,
    "byte-level with Digits": lambda model: _with(model, steps(_DIGITS | {"individual_digits": False}, byte_level())),
    "right-to-left digits": lambda model: _with(model, by_patterns(RIGHT_TO_LEFT, LLAMA3)),
    "one token a byte": lambda model: _with(model, byte_level()),
}
"""The definition of each of the twenty, of its model."""


def small(name: str) -> str:
    """The tokenizer of `FORMS` under this name, with a model of 4,000 entries."""
    return FORMS[name](small_model(name))


def published(name: str) -> Path:
    """The tokenizer.json of `FORMS` under this name, of published size, made when it is asked for first."""
    file = CACHE / name.replace(" ", "-") / "tokenizer.json"
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(FORMS[name](published_model(name)), encoding="utf-8")
        temporary.rename(file)
    return file
