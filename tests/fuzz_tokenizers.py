#!/usr/bin/env python3
"""The ids of the engine that `auto` takes, against `tokenizers`: random texts, and every character beside others.

    python -m tests.fuzz_tokenizers                 all twenty tokenizers of published size: hours on a busy machine
    python -m tests.fuzz_tokenizers "Llama 3" BERT  these

Prints for each tokenizer the engine, texts, how many were routed to the reference, and how many differ.
"""

from __future__ import annotations

import argparse
import functools
import random
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from tokenizers import Tokenizer

from relayrun.tokens.readers.texts import PackedTexts
from relayrun.tokens.tokenize.encode.engines import HuggingFaceEngine, select_engine
from tests.published import FORMS, SUSPECTS, published

NEIGHBOURS = ("a", "A", " ", "\n", "'", "1", ".", "\u0301", "漢", "'s")
"""What every character stands beside."""
PLAIN = (*"abcXYZ  11'.,\n\t<|>\u2581", "'s", "don't", "  ", "\r\n", "<|endoftext|>", "</s>", "[MASK]", "<unk>", "▁▁")


@dataclass
class Found:
    """What a comparison found, so far."""

    name: str
    engine: str = ""
    texts: int = 0
    routed: int = 0
    differing: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        shown = "".join(f"\n    {ascii(text)[:150]}" for text in self.differing[:5])
        return (
            f"{self.name:24} {self.engine:12} {self.texts:>9,} texts {self.routed:>8,} routed "
            f"{len(self.differing):>6,} differing{shown}"
        )


@functools.cache
def assigned() -> tuple[str, ...]:
    """Every character that this Python's tables know; of private use one in 64."""
    points = (point for point in range(sys.maxunicode + 1) if not 0xE000 <= point < 0xF900 or point % 64 == 0)
    kept = (chr(point) for point in points if point < 0xF0000 or point % 64 == 0)
    return tuple(letter for letter in kept if unicodedata.category(letter) not in ("Cn", "Cs"))


@functools.cache
def _pools() -> tuple[Sequence[str], ...]:
    letters = assigned()
    marks = [each for each in letters if unicodedata.category(each)[0] in "MZC" and unicodedata.category(each) != "Co"]
    numbers = [each for each in letters if unicodedata.category(each)[0] == "N"]
    return letters, letters[:0x3000], letters[:0x800], marks, numbers, SUSPECTS, PLAIN


def random_texts(count: int, seed: int) -> Iterator[str]:
    """Texts of up to 60 characters: of all, of the first blocks, of marks, of digits, and of suspects."""
    generator = random.Random(seed)
    for _ in range(count):
        pool = generator.choice(_pools())
        yield "".join(
            generator.choice(pool if generator.random() < 0.6 else PLAIN) for _ in range(generator.randrange(60))
        )


def beside(letters: Sequence[str]) -> Iterator[str]:
    """Each letter beside each of `NEIGHBOURS`, before it, behind it and between."""
    for other in NEIGHBOURS:
        for letter in letters:
            yield f"{other}{letter}{other} {letter}{letter}{other}x"


def compare(name: str, tokenizer: Tokenizer, texts: Iterator[str], found: Found | None = None) -> Found:
    """The ids of every text by the engine that `auto` selects, against the reference's."""
    tokenizer.encode_special_tokens = True
    definition = tokenizer.to_str()
    selection = select_engine(
        "auto", tokenizer, PackedTexts.of(["a text"]), lambda line: print(f"{name}: {line}", file=sys.stderr)
    )
    engine, reference = selection.build(definition), HuggingFaceEngine(tokenizer)
    found = found or Found(name)
    found.engine, before = selection.engine, engine.routed
    while batch := [text for _, text in zip(range(20_000), texts, strict=False)]:
        made = PackedTexts.of(batch)
        ids, lengths = engine.encode(made)
        right, right_lengths = reference.encode(made)
        found.texts += len(batch)
        if not (np.array_equal(ids, right) and np.array_equal(lengths, right_lengths)):
            parts = zip(batch, _parts(ids, lengths), _parts(right, right_lengths), strict=True)
            found.differing += [text for text, ours, theirs in parts if not np.array_equal(ours, theirs)]
    found.routed += engine.routed - before
    return found


def _parts(ids: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    return np.split(ids, np.cumsum(lengths)[:-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(FORMS), help=f"of: {', '.join(FORMS)}")
    parser.add_argument("--texts", type=int, default=40_000)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--no-characters", action="store_true", help="random texts alone")
    options = parser.parse_args()
    wrong = 0
    for name in options.names:
        tokenizer = Tokenizer.from_file(str(published(name)))
        found = compare(name, tokenizer, random_texts(options.texts, options.seed))
        print(f"{found}   random texts", flush=True)
        wrong += len(found.differing)
        if not options.no_characters:
            found = compare(name, tokenizer, beside(assigned()))
            print(f"{found}   every character beside {len(NEIGHBOURS)} others", flush=True)
            wrong += len(found.differing)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
