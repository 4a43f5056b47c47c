"""Files and modules that the pages name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = ("relayrun", "launchers", "scripts", "configs", "benchmarks", "tests", "docs", "examples")


OF_CHECKOUTS = ("pretrain_gpt.py",)
"""Programs of Megatron-LM's own."""


def missing(text: str) -> list[str]:
    """Paths of the repository, programs and modules, in backticks, that are not there."""
    found = []
    for name in re.findall(r"`([^`\s]+)`", text):
        if re.fullmatch(r"relayrun(\.\w+)+", name):
            path = ROOT / name.replace(".", "/")
            there = any(each.with_suffix(".py").is_file() or each.is_dir() for each in (path, path.parent))
        elif re.fullmatch(r"[\w./-]+\.(py|sh)", name) or (
            name.split("/")[0] in FOLDERS and re.fullmatch(r"[\w./-]+", name)
        ):
            there = (ROOT / name).exists() or any(any((ROOT / folder).rglob(name)) for folder in FOLDERS)
        else:
            continue
        if not there and name not in OF_CHECKOUTS:
            found.append(name)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_is_there(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    if page.name == "coming-from-megatron-lm.md":  # the first column of its tables names files of another repository
        text = re.sub(r"^\| [^|]+\|", "|", text, flags=re.M)
    assert missing(text) == []


def test_a_name_that_is_gone_is_found() -> None:
    text = "`relayrun/chain/steer.py`, `relayrun.data.draw.choose`, `draw.py`, `relayrun.cli.run.stop`, `decisions.py`"
    assert missing(text) == ["relayrun/chain/steer.py", "relayrun.data.draw.choose", "draw.py"]
