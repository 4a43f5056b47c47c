"""Hooks of mkdocs for the site of docs/ (mkdocs.yml): the navigation, and what GitHub's Markdown has besides."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
KINDS = {"Tutorials": "tutorial", "How-to guides": "how-to", "Reference": "reference", "Explanation": "explanation"}

BOOSTS = {"decisions": 0.2, "reference": 0.6, "how-to": 2}
"""How much pages of a folder weigh in a search: who searches wants to do something."""


def on_config(config: Any) -> Any:
    """List the pages by kind, each kind by the titles of its pages."""
    config.nav = [{"Home": "README.md"}, *({name: _pages(folder) for name, folder in [kind]} for kind in KINDS.items())]
    config.nav[-1]["Explanation"].append(
        {"Decisions": ["explanation/decisions/README.md", *_pages("explanation/decisions")]}
    )
    return config


def _pages(folder: str) -> list[str]:
    """Return the pages of a folder by title; decisions by number."""
    paths = [path for path in (DOCS / folder).glob("*.md") if path.name != "README.md"]
    paths.sort(key=lambda path: path.read_text(encoding="utf-8").split("\n", 1)[0])
    return [str(path.relative_to(DOCS)) for path in paths]


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Return the page with one word behind its fences, and with links to copies of files of the code."""
    here = Path(page.file.abs_src_path).parent
    page.meta["search"] = {"boost": BOOSTS.get(here.name, 1)}

    def link(found: re.Match[str]) -> str:
        target = Path(os.path.normpath(here / found[2].partition("#")[0]))
        if "://" in found[2] or found[2].startswith("#") or target.is_relative_to(DOCS):
            return found[0]
        if not target.is_file():
            return found[1]
        uri = f"source/{target.relative_to(ROOT)}.txt"
        if uri not in files.src_uris:
            files.append(File.generated(config, uri, content=target.read_text(encoding="utf-8")))
        return f"[{found[1]}]({os.path.relpath(DOCS / uri, here)})"

    markdown = re.sub(r"^(```\w+) \w.*$", r"\1", markdown, flags=re.M)
    return re.sub(r"\[([^\[\]]+)\]\(([^()\s]+)\)", link, markdown)
