"""The glossary holds: every class of the package is in it, and no name stands for two things."""

from __future__ import annotations

import importlib.util
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")

_spec = importlib.util.spec_from_file_location("write_glossary", ROOT / "scripts" / "tools" / "write_glossary.py")
assert _spec is not None
assert _spec.loader is not None
write_glossary = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(write_glossary)


def nouns() -> list[tuple[str, str]]:
    """The noun and the class of every row of the first table; the class may be empty."""
    table = PAGE.partition("## Nouns")[2].partition("## Index")[0]
    return re.findall(r"^\| ([a-z ]+) \| .* \| (?:`(\w+)` )?\|$", table, re.M)


def test_a_class_name_stands_for_one_thing() -> None:
    names = Counter(name for name, _, _ in write_glossary.classes())
    assert [name for name, count in names.items() if count > 1] == []


def test_the_index_has_every_class_as_it_is_today() -> None:
    assert write_glossary.written(PAGE) == PAGE, "run scripts/tools/write_glossary.py"


def test_every_noun_stands_once_and_names_a_class_that_is_there() -> None:
    known = {name for name, _, _ in write_glossary.classes()}
    found = nouns()
    assert len(found) > 40
    assert len({noun for noun, _ in found}) == len(found)
    assert [name for _, name in found if name and name not in known] == []


def test_a_class_without_words_is_seen() -> None:
    assert [name for name, _, words in write_glossary.classes() if not words] == []
