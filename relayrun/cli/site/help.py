"""`relayrun help`: the pages of this installation, and a search of pages and settings."""

from __future__ import annotations

import argparse
import itertools
import re
from pathlib import Path

from relayrun import places
from relayrun.errors import InputError, did_you_mean

KINDS = ("tutorial", "how-to", "reference", "explanation")
MOST_FOUND = 5
_TITLE_WEIGHT = 6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun help`."""
    words = "the name of a page, which is shown, or words to search for; without WORDS: all pages"
    parser.add_argument("words", nargs="*", metavar="WORDS", help=words)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Show a page, or what was found. Raises InputError if nothing was."""
    known = pages()
    name = "-".join(options.words).removesuffix(".md")
    if name in known:
        print(known[name].read_text(encoding="utf-8"), end="")
        return 0
    lines = search(options.words) if options.words else [_line(each, path) for each, path in known.items()]
    if not lines:
        raise InputError(f"nothing was found for {' '.join(options.words)!r}", hint=did_you_mean(name, known) or None)
    print(*lines, "", "`relayrun help NAME` shows a page, `relayrun explain NAME` a setting", sep="\n")
    return 0


def pages() -> dict[str, Path]:
    """Return the pages by name, in the order of their kinds."""
    folder = places.shared_file("docs")
    return {path.stem: path for kind in KINDS for path in sorted((folder / kind).glob("*.md"))}


def search(words: list[str]) -> list[str]:
    """Return a line for each of the best pages and settings that have all words."""
    from relayrun.config.compose.describe import describe_settings

    found = [(_score(words, *_title_and_text(path)), _line(name, path, words)) for name, path in pages().items()]
    settings = (each for each in describe_settings() if not each.is_section)
    found += [(_score(words, each.name, each.words), f"{each.name:<28} {each.words[:88]}") for each in settings]
    best = sorted((each for each in found if each[0]), key=lambda each: -each[0])
    return [line for _, line in best[:MOST_FOUND]]


def _score(words: list[str], title: str, text: str) -> float:
    """How well a text fits: 0 unless it has every word; whole phrases and words of the title weigh more."""
    title, text = title.lower(), text.lower()
    forms = [rf"\b{re.escape(word.lower().rstrip('s'))}" for word in words if len(word) > 2 and word != "with"]
    if not forms or any(re.search(form, f"{title}\n{text}") is None for form in forms):
        return 0.0
    density = sum(min(len(re.findall(form, text)), 9) for form in forms) / len(forms)
    pairs = [rf"{one}\w*\W+{other}" for one, other in itertools.pairwise(forms)]
    phrases = sum(min(len(re.findall(pair, text)), 5) for pair in pairs)
    return density + 2 * phrases + _TITLE_WEIGHT * sum(bool(re.search(each, title)) for each in (*forms, *pairs))


def _title_and_text(path: Path) -> tuple[str, str]:
    """Return the title of a page with its headings, and its text."""
    text = path.read_text(encoding="utf-8")
    return f"{path.stem} " + " ".join(re.findall(r"^#+ (.*)", text, re.M)), text


def _line(name: str, path: Path, words: list[str] | None = None) -> str:
    """Return a line about a page: its title, or its first line with all words, or with one."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    title = lines[0].removeprefix("# ")
    for enough in (all, any) if words else ():
        for line in lines[1:]:
            if enough(word.lower().rstrip("s") in line.lower() for word in words or ()):
                return f"{name:<28} {title}: {line}"[:118]
    return f"{name:<28} {title}"
