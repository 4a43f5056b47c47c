"""README.md and the tutorial word for word: every command, in this order, from a new checkout and an empty HOME."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relayrun import cli
from relayrun.control.rundir.run import Run
from tests.readme import README, ROOT, blocks, commit_copy
from tests.wheel import Installed
from tests.workspace import ends, steps

TUTORIAL = (ROOT / "docs/tutorial/from-text-to-a-model.md").read_text(encoding="utf-8")
CHAIN = (ROOT / "docs/explanation/chain.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs/README.md").read_text(encoding="utf-8")
SCRIPT = (ROOT / "docs/tutorial/from-your-script-to-a-chain.md").read_text(encoding="utf-8")
PAGES = {"README.md": README, "tutorial.md": TUTORIAL, "chain.md": CHAIN, "script.md": SCRIPT}
LINKED = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
KINDS = ("bash install", "bash", "bash slurm", "bash make")


@pytest.mark.parametrize("page", PAGES.values(), ids=PAGES)
def test_every_block_is_of_a_kind_that_is_run(page: str) -> None:
    fences = re.findall(r"^```(\w.*)$", page, re.M)
    assert set(fences) <= set(KINDS)
    assert len(fences) == sum(len(blocks(kind, page)) for kind in KINDS)


def test_make_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"make ([a-z-]+)", README)
    assert {"demo", "test", "setup", "check", "help", "demo-slurm"} <= set(commands)
    for target in commands:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_the_readme_is_short_and_says_early_what_is_unproven() -> None:
    lines = README.splitlines()
    assert len(lines) < 100
    assert all(any(words in line for line in lines[:10]) for words in ("tried on one GPU", "unproven"))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings of a page, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def dead_links(page: Path, text: str) -> list[str]:
    """Links of a text that lies at `page` which lead to no file, or to no heading of a page."""
    found = []
    for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


def test_links_lead_somewhere() -> None:
    assert len(LINKED) > 100
    assert not {page: dead for page in LINKED if (dead := dead_links(page, page.read_text(encoding="utf-8")))}


def test_a_dead_link_is_found() -> None:
    text = "[a](docs/gone.md), [b](docs/how-to/why.md#no-such-heading), [c](docs/how-to/why.md#causes-decide)"
    assert dead_links(ROOT / "README.md", text) == ["docs/gone.md", "docs/how-to/why.md#no-such-heading"]


def test_the_table_of_the_index_has_commands_of_the_tutorial() -> None:
    (table,) = re.findall(r"^## From text to a model$(.*)", INDEX, re.M | re.S)
    commands = [
        command for line in table.splitlines() if line.startswith("|") for command in re.findall("`(.+?)`", line)
    ]
    assert len(commands) == 11
    places = [TUTORIAL.index(command) for command in commands]
    assert places == sorted(places)


def commands_of(page: str) -> Iterator[list[str]]:
    """The words of every call of relayrun in the blocks of a page."""
    text = "\n".join(block for kind in KINDS for block in blocks(kind, page)).replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip().startswith("relayrun "):
            yield shlex.split(line, comments=True)[1:]


@pytest.mark.parametrize(
    "words", [each for page in PAGES.values() for each in commands_of(page)], ids=lambda words: " ".join(words)
)
def test_every_command_has_these_options(words: list[str]) -> None:
    """Without running it, what the long tests below do."""
    assert callable(cli.parse(words).run)


class NewMachine:
    """A checkout of this repository, an empty HOME and Python, and nothing else.

    What pip would download is shortened: it has no index. The packages that relayrun asks for, and the setuptools that
    builds its wheel, are links to those that the tests run with; pip resolves, builds and installs all the same.
    """

    def __init__(self, folder: Path) -> None:
        self.checkout = commit_copy(folder / "relayrun")
        self.home, programs = folder / "home", folder / "programs"
        self.home.mkdir()
        programs.mkdir()
        (programs / "python3").symlink_to(os.path.realpath(sys.executable))
        self._environment = {
            "PATH": f"{programs}:/usr/bin:/bin",
            "HOME": str(self.home),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_NO_COMPILE": "1",
            "PIP_NO_BUILD_ISOLATION": "0",  # means that there is none
            "PIP_DISABLE_PIP_VERSION_CHECK": "1",
            "COLUMNS": "120",
        }

    def bash(self, script: str) -> str:
        """Run lines as one shell would, in the checkout; return what they printed."""
        command = ["bash", "-c", f"set -euxo pipefail\n{script}"]
        done = subprocess.run(
            command,
            cwd=self.checkout,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=3000,
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        return done.stdout

    def packages(self, *extras: str) -> None:
        """Link into the environment `.venv` what the extras ask for."""
        environment = Installed(self.checkout / ".venv", self.home)
        for name in ("setuptools*", "pkg_resources", "_distutils_hack"):  # an old one, of the new environment
            for old in environment.packages.glob(name):
                shutil.rmtree(old)
        environment.link_packages(extras, "setuptools")


def install_lines() -> list[str]:
    """Every line of the pages that installs relayrun, once."""
    found = []
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        text = page.read_text(encoding="utf-8")
        lines = re.findall(r"^pip install [^#\n]+|(?<=`)pip install [^`\n]+(?=`)", text, re.M)
        found += [line.strip() for line in lines if re.search(r"relayrun|install '?\.", line)]
    return list(dict.fromkeys(found))


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> NewMachine:
    machine = NewMachine(tmp_path_factory.mktemp("machine"))
    machine.bash("python3 -m venv .venv")
    machine.packages("train", "tokenize", "evaluate", "fast", "metrics", "notify")
    return machine


@pytest.mark.slow
@pytest.mark.parametrize(
    "line",
    [pytest.param(line, marks=pytest.mark.long if number else ()) for number, line in enumerate(install_lines())],
)
def test_every_line_that_installs_relayrun_does(machine: NewMachine, line: str) -> None:
    """Where it is not installed; the address of this repository is that of the checkout."""
    line = line.replace("git+URL", f"git+file://localhost{machine.checkout}")
    machine.bash(f"source .venv/bin/activate\npip uninstall --yes relayrun\n{line}\ncd ..\nrelayrun --help")


@pytest.mark.long
def test_the_line_that_an_error_names_brings_the_extra(machine: NewMachine) -> None:
    """Such an error comes from an installed relayrun, so pip needs no index to find it."""
    machine.bash("source .venv/bin/activate\npip install .\npip install 'relayrun[tokenize]'")


def run_word_for_word(folder: Path, install: str, rest: list[str]) -> str:
    """Run an install block in a new checkout, then other blocks, as one shell would; return what it printed."""
    machine = NewMachine(folder)
    first, others = install.split("\n", 1)
    machine.bash(first)
    machine.packages("train", "tokenize")
    return machine.bash("\n".join([others, *rest]))


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_first_run_of_the_readme_and_the_page_about_chains(tmp_path: Path) -> None:
    (install,) = blocks("bash install")
    out = run_word_for_word(tmp_path, install, [*blocks("bash"), *blocks("bash", CHAIN)])
    assert "plan of my-project/my-run" in out
    assert "attempts of my-run" in out
    run = Run(tmp_path / "my-project/logs/runs/my-project/my-run")
    assert (run.checkpoints / "iter_0000060").is_dir()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_the_tutorial(tmp_path: Path) -> None:
    (install,) = blocks("bash install", TUTORIAL)
    out = run_word_for_word(tmp_path, install, blocks("bash", TUTORIAL))
    project = tmp_path / "my-project"
    run = Run(project / "logs/runs/my-project/first")
    causes = [end.cause for end in ends(run)]
    assert set(causes) == {"saved", "done"}  # a chain, and its continuation
    assert causes.count("done") == 2
    assert sorted(steps(run)) == list(range(1, 281))
    assert "logits of megatron-core and transformers on" in out
    assert "def main(" in out
    for picture in (project / "data/lengths.png", project / "first.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
