"""`relayrun help` and `init`: the pages of this installation, a search of pages and settings, and a new project."""

from __future__ import annotations

import argparse
import math
import operator
import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from relayrun import places
from relayrun.errors import InputError, did_you_mean
from relayrun.terminal import print_rows

KINDS = ("tutorial", "how-to", "reference", "explanation")
MOST_FOUND = 5
_ENDING = re.compile(r"(?<=\w{4})(ions?|ings?|ed|es|s)$")
_FILLERS = {"the", "and", "for", "from", "with", "how", "when", "where", "are", "can", "does", "what", "why", "not"}


def add_help_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun help`."""
    words = "the name of a page, which is shown, or words to search for; without WORDS: all pages"
    parser.add_argument("words", nargs="*", metavar="WORDS", help=words)
    parser.set_defaults(run=run_help)


def run_help(options: argparse.Namespace) -> int:
    """Show a page, or what was found. Raises InputError if nothing was."""
    known = pages()
    name = "-".join(options.words).removesuffix(".md")
    if name in known:
        print(known[name].read_text(encoding="utf-8"), end="")
        return 0
    rows = search(options.words) if options.words else []
    for kind in () if options.words else KINDS:
        own = [(each, path) for each, path in known.items() if path.parent.name == kind]
        rows += [(f"{kind}:", ""), *((f"  {each}", next(_sections(each, path)).line) for each, path in own)]
    if not rows:
        hint = did_you_mean(name, known) or "try other words; `relayrun help` lists all pages"
        raise InputError(f"nothing was found for {' '.join(options.words)!r}", hint=hint)
    print_rows(("", ""), rows)
    print("\n`relayrun help NAME` shows a page, `relayrun explain NAME` a setting")
    return 0


def pages() -> dict[str, Path]:
    """Return the pages by name, in the order of their kinds."""
    folder = places.shared_file("docs")
    return {path.stem: path for kind in KINDS for path in sorted((folder / kind).glob("*.md"))}


def search(words: list[str]) -> list[tuple[str, str]]:
    """Return the best pages and settings, each with its best section; rare words count more."""
    from relayrun.config.compose.describe import describe_settings

    stems = [_ENDING.sub("", word.lower()) for word in words if len(word) > 2 and word.lower() not in _FILLERS]
    found = [each for name, path in pages().items() if name != "settings-list" for each in _sections(name, path)]
    found += [_Section(each.name, each.name, each.words, each.words) for each in describe_settings()]
    counts = [[each.weight(rf"\b{re.escape(stem)}") for stem in stems] for each in found]
    rarity = [math.log(len(found) / (1 + sum(each[i] > 0 for each in counts))) for i in range(len(stems))]
    best: dict[str, tuple[float, tuple[str, str]]] = {}
    for section, has in zip(found, counts, strict=True):
        fit = sum(map(operator.mul, rarity, has)) * (sum(map(bool, has)) / len(has or [0])) ** 2
        key = section.name[: section.name.find(".") + 1] or section.name  # of a section of settings the best alone
        if fit > best.get(key, (0.0, ""))[0]:
            best[key] = fit, (section.name, section.line.partition(". ")[0])
    return [row for _, row in sorted(best.values(), key=lambda each: -each[0])[:MOST_FOUND]]


class _Section(NamedTuple):
    """A part of a page, or a setting: what its line says, what counts as its headings, and its text."""

    name: str
    heading: str
    line: str
    text: str

    def weight(self, stem: str) -> float:
        """How much a word is the subject of this section: most where a heading has it, less in a long text."""
        in_text = min(len(re.findall(stem, self.text, re.I)), 4) / (2 + len(self.text) / 1000)
        return in_text + 4 * bool(re.search(stem, self.heading, re.I))


def _sections(name: str, path: Path) -> Iterator[_Section]:
    """Yield the sections of a page. The tasks in the index of pages count as headings."""
    title, *parts = re.split(r"^##+ ", path.read_text(encoding="utf-8").removeprefix("# "), flags=re.M)
    title, _, text = title.partition("\n")
    index = (places.shared_file("docs") / "README.md").read_text(encoding="utf-8")
    wants = " ".join(re.findall(rf"^\| (.*?) \|.*/{name}\.md", index, re.M))
    for heading, _, body in (("", "", text), *(part.partition("\n") for part in parts)):
        line = f"{title}: {heading}" if heading else title
        yield _Section(name, f"{name} {title} {heading or wants}", line, body)


def add_init_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun init`."""
    from relayrun.submit import project  # slow import, not needed for `help`

    parser.add_argument("folder", type=Path, metavar="FOLDER", help="made if missing; files in it are kept")
    parser.add_argument("--template", choices=project.TEMPLATES, default="native", help="what the project is for")
    words = f"the site file to copy: {', '.join(project.site_names())}, or the path of your own"
    default = "default: generic if there is an sbatch, else local"
    parser.add_argument("--cluster", metavar="NAME_OR_PATH", help=f"{words} ({default})")
    parser.add_argument("--inside", action="store_true", help="allow a FOLDER inside another project or checkout")
    parser.set_defaults(run=run_init)


def run_init(options: argparse.Namespace) -> int:
    """Write a project, and print the next commands. Raises RelayrunError."""
    from relayrun.config.compose.writable import check_outputs
    from relayrun.submit import project

    check_outputs({"FOLDER": options.folder})
    cluster = options.cluster or ("generic" if shutil.which("sbatch") else "local")
    made = project.make_project(options.folder, cluster=cluster, template=options.template, inside=options.inside)
    kept = len(made) - (new := sum(made.values()))
    words = f", {kept} were there and are kept" if kept else ""
    print(f"{options.folder}: {new} files written, for cluster {cluster!r}{words}; next:")
    print(
        *(f"  {line}" for line in (f"cd {shlex.quote(str(options.folder))}", *project.TEMPLATES[options.template])),
        sep="\n",
    )
    return 0
