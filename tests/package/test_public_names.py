"""The names that programs of others import, and their signatures. A change of public_names.txt needs a new 0.N, and a
line in the CHANGELOG under *What to do*; a new name does not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("written", ROOT / "scripts/tools/write_python_reference.py")
assert _spec is not None
assert _spec.loader is not None
written = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(written)


def test_signatures_are_those_that_programs_know() -> None:
    kept = Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8")
    assert written.signatures() == kept


def test_the_page_of_python_modules_is_what_they_say() -> None:
    page = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    assert page == written.page(), "run scripts/tools/write_python_reference.py"
    assert "```python\nclass Loader(Iterator[dict[str, Any]])\n```" in page
