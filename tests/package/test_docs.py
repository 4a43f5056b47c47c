"""What the pages name is there; how many words they have; titles of guides; the index of decisions."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from pathlib import Path

import pytest

from relayrun import cli
from tests.readme import blocks

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


def test_what_a_page_names_is_there() -> None:
    assert len(PAGES) > 100
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        if page.name in (
            "megatron-lm-launchers.md",
            "coming-from-megatron-lm.md",
        ):  # the first column of its tables names files of another repository
            text = re.sub(r"^\| [^|]+\|", "|", text, flags=re.M)
        assert missing(text) == [], page


def test_a_name_that_is_gone_is_found() -> None:
    text = "`relayrun/chain/steer.py`, `relayrun.data.draw.choose`, `draw.py`, `relayrun.cli.run.stop`, `decisions.py`"
    assert missing(text) == ["relayrun/chain/steer.py", "relayrun.data.draw.choose", "draw.py"]


MOST_WORDS = 45_000
"""Limit for all pages but those that are looked up: the reference, and the decisions."""
TASKS = sorted((ROOT / "docs/how-to").glob("*.md"))
VERBS = """Add Change Check Choose Copy Describe Export Filter Find Get Go Hear Install Keep Leave Make Move Run Save
    Set Submit Tokenize Train Try Watch"""


def number_of_words(texts: Iterable[str]) -> int:
    """How many words texts have: what has a letter or a digit, so that the lines of tables do not count."""
    return sum(len(re.findall(r"\S*\w\S*", text)) for text in texts)


def test_there_is_no_more_to_read_than_a_reader_reads() -> None:
    pages = [path for kind in ("", "tutorial", "how-to", "explanation") for path in (ROOT / "docs" / kind).glob("*.md")]
    assert len(pages) > 40
    assert number_of_words(path.read_text(encoding="utf-8") for path in pages) <= MOST_WORDS
    assert number_of_words(["| a | `b-c` |\n|---|---|\n- d → 4"]) == 4


@pytest.mark.parametrize("page", TASKS, ids=lambda page: page.stem)
def test_the_title_of_a_guide_is_a_task(page: Path) -> None:
    title = page.read_text(encoding="utf-8").splitlines()[0]
    assert title.removeprefix("# ").split()[0].rstrip(",") in VERBS.split()


STATUS = re.compile(r"\*Status: (holds|replaced by .+); decided (\d{4}-\d\d-\d\d)(?:, refined by .+)?\.\*")


def test_the_index_of_decisions_has_all_with_their_dates() -> None:
    folder = ROOT / "docs/explanation/decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d{4})\]\((\S+)\) \| (.+?) \| (\S+) \|$", index, re.M)
    expected = []
    for path in sorted(folder.glob("[0-9]*.md")):
        title, _, status = path.read_text(encoding="utf-8").splitlines()[:3]
        found = STATUS.fullmatch(status)
        assert found, f"{path.name}: {status}"
        number, _, words = title.removeprefix("# ").partition(" ")
        assert path.name.startswith(f"{number}-")
        expected.append((number, path.name, words, found[2]))
    assert sorted(rows) == expected


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_commands_for_contributors_are_there() -> None:
    assert set(re.findall(r"^```(\w+ \w+)$", CONTRIBUTING, re.M)) == {"bash training", "bash wandb"}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    assert set(re.findall(r"(?:`|^)make ([a-z-]+)", CONTRIBUTING, re.M)) <= targets
    (block,) = blocks("bash training", CONTRIBUTING)
    calls = re.findall(r"relayrun ((?:submit|report) [^\n)]*)", block.replace('"', ""))
    assert [callable(cli.parse(shlex.split(call)).run) for call in calls] == [True] * 3


def test_the_mappings_for_contributors_are_those_of_the_families() -> None:
    families = (ROOT / "relayrun/train/export/model_families.yaml").read_text(encoding="utf-8")
    shown = re.findall(r"^ +(decoder\.\S+: .*)$", CONTRIBUTING, re.M)
    assert [line for line in shown if line not in families] == []
    assert {"join: qkv", "join: gate_up"} <= set(re.findall(r"join: \w+", "\n".join(shown)))
