#!/usr/bin/env python3
"""Write the index of classes in docs/reference/glossary.md from their docstrings. Run it after a rename."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "glossary.md"
BEGIN, END = "<!-- scripts/tools/write_glossary.py wrote this -->\n", "<!-- up to here -->\n"


def classes() -> Iterator[tuple[str, str, str]]:
    """Yield every public class of the package: its name, its module without `relayrun.`, its first sentence."""
    for path in sorted((ROOT / "relayrun").rglob("*.py")):
        module = ".".join(path.relative_to(ROOT / "relayrun").with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                yield node.name, module, re.split(r"(?<=[.;:])\s", paragraph)[0].rstrip(".;:")


def index() -> str:
    """Return the index as Markdown: a table for each room."""
    rooms: dict[str, list[str]] = {}
    for name, module, words in classes():
        room = module.split(".")[0] if "." in module else "relayrun"
        rooms.setdefault(room, []).append(f"| `{name}` | `{module}` | {words.replace('|', chr(92) + '|')} |")
    parts = [
        f"### {room}\n| class | module | meaning |\n|---|---|---|\n" + "\n".join(sorted(rooms[room])) for room in rooms
    ]
    return "\n\n".join(parts) + "\n"


def written(page: str) -> str:
    """Return the page with today's index between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + index() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
