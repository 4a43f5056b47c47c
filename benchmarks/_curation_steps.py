"""Datatrove's filters of words with a tokenizer of words that needs no package, for both sides of curation.py."""

from __future__ import annotations

import re
from typing import Any

from datatrove.pipeline.filters import (
    C4QualityFilter,
    FineWebQualityFilter,
    GopherQualityFilter,
    GopherRepetitionFilter,
)
from datatrove.utils.word_tokenizers import WordTokenizer

_WORD = re.compile(r"\w+|[^\w\s]")
_SENTENCE = re.compile(r"[^.]+\.?")


class Words(WordTokenizer):  # type: ignore[misc]
    """Runs of letters, and other characters one by one."""

    def word_tokenize(self, text: str) -> list[str]:
        return _WORD.findall(text)

    def sent_tokenize(self, text: str) -> list[str]:
        return [each.strip() for each in _SENTENCE.findall(text)]

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [match.span() for match in _SENTENCE.finditer(text)]


WORDS = Words()


class Repetition(GopherRepetitionFilter):  # type: ignore[misc]
    def __init__(self, exclusion_writer: Any = None) -> None:
        super().__init__(language=WORDS, exclusion_writer=exclusion_writer)


class Quality(GopherQualityFilter):  # type: ignore[misc]
    def __init__(self, exclusion_writer: Any = None) -> None:
        super().__init__(language=WORDS, exclusion_writer=exclusion_writer)


class C4(C4QualityFilter):  # type: ignore[misc]
    def __init__(self, exclusion_writer: Any = None) -> None:
        super().__init__(filter_no_terminal_punct=False, language=WORDS, exclusion_writer=exclusion_writer)


class FineWeb(FineWebQualityFilter):  # type: ignore[misc]
    def __init__(self, exclusion_writer: Any = None) -> None:
        super().__init__(language=WORDS, exclusion_writer=exclusion_writer)
