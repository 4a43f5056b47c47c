"""Twenty tokenizers as published: the engine that `auto` takes gives the ids of `tokenizers`.

`make test` tries a part that another day changes, with small models; `make test-long` all of it, as published.
"""

from __future__ import annotations

import datetime

import pytest
from tokenizers import Tokenizer

from tests.fuzz_tokenizers import assigned, beside, compare, random_texts
from tests.published import FORMS, published, small

ENGINES = {
    **dict.fromkeys(FORMS, "gigatoken"),
    "one token a byte": "bytes",
    **dict.fromkeys(("BERT", "T5", "XLM-R", "Kimi-like", "SuperBPE-like", "right-to-left digits"), "huggingface"),
}
DAY = datetime.date.today().toordinal()


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_a_part_of_the_texts_gives_the_ids_of_hugging_face(name: str) -> None:
    tokenizer = Tokenizer.from_str(small(name))
    for texts in (random_texts(1000, DAY), beside(assigned()[DAY % 499 :: 499])):
        found = compare(name, tokenizer, texts)
        print(found)
        assert not found.differing, found
        assert found.engine == ENGINES[name]


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", FORMS)
def test_forty_thousand_texts_and_every_character_give_the_ids_of_hugging_face(name: str) -> None:
    tokenizer = Tokenizer.from_file(str(published(name)))
    for texts in (random_texts(40_000, 7), beside(assigned())):
        found = compare(name, tokenizer, texts)
        print(found)
        assert found.engine == ENGINES[name]
        assert not found.differing, found
