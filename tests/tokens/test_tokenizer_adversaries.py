"""Tokenizers that look like a known form and are not quite one: the ids stay those of `tokenizers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.engines import HuggingFaceEngine, select_engine
from tests import published
from tests.published import added, small

Json = dict[str, Any]


def with_tokens(*tokens: Json) -> Callable[[Json], None]:
    """With added tokens that are not special; each is looked for in normalized text."""

    def change(known: Json) -> None:
        known["added_tokens"] += [token | {"id": 9000 + at} for at, token in enumerate(tokens)]

    return change


def normalized(content: str) -> Callable[[Json], None]:
    return with_tokens(added(content, 0, special=False, normalized=True))


def with_entry(*names: str, **model: Any) -> Callable[[Json], None]:
    """With entries in the vocabulary, and other options of the model."""

    def change(known: Json) -> None:
        known["model"] |= model
        for at, name in enumerate(names):
            known["model"]["vocab"].setdefault(name, 9000 + at)

    return change


def with_merge(left: str, right: str) -> Callable[[Json], None]:
    """With a merge before all others, and with what its parts are merged of."""

    def change(known: Json) -> None:
        vocab, merges = known["model"]["vocab"], []

        def make(name: str) -> None:
            if name not in vocab:
                if len(name) > 1:
                    make(name[:-1])
                    make(name[-1])
                    merges.append([name[:-1], name[-1]])
                vocab[name] = max(9000, *vocab.values()) + 1

        make(left)
        make(right)
        vocab.setdefault(left + right, max(9000, *vocab.values()) + 1)
        known["model"]["merges"] = [*merges, [left, right], *known["model"]["merges"]]

    return change


def without_letter(known: Json) -> None:
    """No letter for the line end, but a token that ends like one: a quote, and it."""
    letter = published.byte_letters()[0x0A]
    known["model"] |= {"merges": [], "vocab": {**dict.fromkeys(published.byte_letters(), 0)}}
    known["model"]["vocab"] = {name: at for at, name in enumerate(known["model"]["vocab"]) if name != letter}
    known["model"]["vocab"]['"' + letter] = 9000


def with_long_rules(known: Json) -> None:
    """What a tokenizer.json may also ask for, and what has no part in the ids of a document."""
    known["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    known["padding"] = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
    known["padding"] |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "a"}
    known["post_processor"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}


CASES: dict[str, tuple[str, Callable[[Json], None], list[str]]] = {
    "an added token behind a mark": ("Llama 2", normalized("a b"), ["x▁a▁b", "▁a▁b", "a b", "xa▁b"]),
    "an added token with a space": ("Gemma", normalized("a b"), ["xa▁b", "a b", "x▁a▁b"]),
    "an added token without normalizer": ("Mistral", normalized("a b"), ["xa▁b", "a b", "x▁a▁b"]),
    "an added token in a normal form": ("Qwen", normalized("e\u0301!"), ["é!", "e\u0301!", "é"]),
    "stripping to the left": ("GPT-2", with_tokens(added("xyz", 0, special=False, lstrip=True)), ["a  xyz b", "axyz"]),
    "stripping to the right": ("Gemma", with_tokens(added("xyz", 0, special=False, rstrip=True)), ["a xyz  b", "xyz"]),
    "single words": ("Llama 3", with_tokens(added("xyz", 0, special=False, single_word=True)), ["axyz xyz", "xyz1"]),
    "an entry of characters": ("Llama 3", with_entry("語"), ["語", "漢語", " 語", "a"]),
    "an entry of characters, merged first": ("GPT-2", with_entry("語", ignore_merges=True), ["語", "漢語", " 語"]),
    "an entry that is a space": ("GPT-2", with_entry(" ", ignore_merges=True), [" ", "a b", "  "]),
    "an entry of characters and bytes": ("Llama 3", with_entry("é語", "語é"), ["é語", "語é", "語", "é"]),
    "a special token as an entry": ("Llama 3", with_entry("<｜User｜>"), ["<｜User｜>", "a<｜User｜>b"]),
    "an entry that no merge makes": ("GPT-2", with_entry("qqq"), ["qqq", " qqq", "qqqq"]),
    "the same, merged last": ("GPT-2", with_entry("qqq", ignore_merges=True), ["qqq", " qqq", "qqqq"]),
    "a byte that has no letter": ("GPT-2", without_letter, ['a"\nb', "\n", '"\n']),
    "a merge of the token of a byte": ("Llama 2", with_merge("<0x41>", "A"), ["AA", "A", "xAA"]),
    "a merge that gives the token of a byte": ("Mistral", with_merge("<0x4", "1>"), ["<0x41>", "A", "x<0x41>A"]),
    "the same, elsewhere": ("Gemma", with_merge("<", "0x41>"), ["<0x41>", "A", "x<0x41>A"]),
    "no byte fallback": ("Llama 2", with_entry(byte_fallback=False), ["☃", "a\0b"]),
    "no fused unknown": ("Gemma", with_entry(fuse_unk=False), ["☃☃", "a"]),
    "cut short, filled up, framed": ("GPT-2", with_long_rules, ["a b c d e f g h i j k l m n", "", "one"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_ids_are_those_of_tokenizers(case: str) -> None:
    name, change, texts = CASES[case]
    known = json.loads(small(name))
    change(known)
    tokenizer = Tokenizer.from_str(json.dumps(known))
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    definition = tokenizer.to_str()
    selection = select_engine("auto", tokenizer, PackedTexts.of(["a text"]), print, definition=definition)
    made = PackedTexts.of([*texts, "a plain text", "<|endoftext|> [MASK] <s>"])
    ids, lengths = selection.build(definition).encode(made)
    right, right_lengths = HuggingFaceEngine(tokenizer).encode(made)
    assert (ids.tolist(), lengths.tolist()) == (right.tolist(), right_lengths.tolist()), selection
