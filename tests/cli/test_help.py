"""`relayrun help`: search, pages, groups of commands, and the nearest command."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from relayrun import cli
from relayrun.cli.site import help as help_command

ROOT = Path(__file__).resolve().parents[2]
FOUND = {
    "time limit": "chain",
    "OOM": "why",
    "CUDA out of memory": "why",
    "NCCL timeout": "hangs",
    "failure signature": "chain.failure_signatures",
    "resume with fewer nodes": "spare-nodes",
    "different number of gpus": "checkpoints",
    "site file for my cluster": "clusters",
    "account of my job": "launchers",
    "go on with more steps": "training",
    "learning rate warmup": "training",
    "keep checkpoints": "checkpoint.keep_last",
    "when is a checkpoint complete": "checkpoints",
    "cancel a run": "chain",
    "colleague stop my run": "trust",
    "other users": "trust",
    "report loss from my script": "command",
    "SIGUSR2 leave": "command",
    "tensor parallel": "scale",
    "jsonl column": "tokenization",
    "tokenizer": "tokenization",
    "own loss in python": "own-code",
    "wandb": "monitoring",
    "where are the logs": "monitoring",
    "learning rate": "training",
    "send me an email": "notify",
    "preemption": "failure-modes",
    "quota full": "clusters",
    "convert llama weights": "export",
    "operator": "operators",
    "firewall": "operators",
    "slurmctld load": "operators",
    "exit codes of jobs": "run-directory",
    "contribute a change": "contributing",
    "pull request": "contributing",
    "run the tests": "contributing",
    "make a release": "contributing",
}
"""What people search for, and a page or setting that has to be among the five."""


@pytest.mark.parametrize("words", FOUND)
def test_a_search_finds_the_page(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", *words.split()]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert 1 <= len(lines) <= help_command.MOST_FOUND
    assert FOUND[words] in [line.split()[0] for line in lines]


def test_a_setting_is_found_by_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "max_failed_restarts"]) == 0
    assert "chain.max_failed_restarts " in capsys.readouterr().out


def test_a_page_is_shown_by_its_name_and_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "data-order"]) == 0
    assert capsys.readouterr().out == (ROOT / "docs/explanation/data-order.md").read_text(encoding="utf-8")
    assert cli.main(["help"]) == 0
    lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(help_command.pages())
    assert [line for line in lines if not line.startswith("  ")] == [f"{kind}:" for kind in help_command.KINDS]
    assert len({line.index(line.split(maxsplit=1)[1]) for line in lines if line.startswith("  ")}) == 1


def test_what_is_not_there_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["help", "chekpoints"]) == 1
    assert "did you mean 'checkpoints'" in capsys.readouterr().err
    assert cli.main(["help", "zzqqx"]) == 1
    assert "-> try other words; `relayrun help` lists all pages" in capsys.readouterr().err


def test_a_newcomer_who_types_the_name_alone_sees_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert "  submit      submit a training run" in shown
    assert "`relayrun init FOLDER` makes a project and says what to call next." in shown


def test_a_second_init_names_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (r"\d+ files written, for cluster 'local'; next:", r"0 files .*, \d+ were there and are kept; next:"):
        assert cli.main(["init", str(tmp_path / "project"), "--cluster", "local"]) == 0
        assert re.match(rf"{tmp_path}/project: {words}\n  cd ", capsys.readouterr().out)


def named_pages(text: str) -> list[str]:
    """Pages that a text of the package names: `relayrun help NAME`, also across the end of a line."""
    names = re.findall(r"relayrun\s+help\s+([a-z][\w-]*)", text)
    return [name for name in names if name not in ("words", "name")]


@pytest.mark.parametrize("folder", ["relayrun", "launchers", "configs"])
def test_every_page_that_the_package_names_is_there(folder: str) -> None:
    known = help_command.pages()
    files = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".sh", ".yaml")]
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    assert sum(len(named_pages(text)) for text in texts.values()) > 1
    wrong = {path: name for path, text in texts.items() for name in named_pages(text) if name not in known}
    assert wrong == {}
    assert not [path for path, text in texts.items() if re.search(r"docs/[\w/-]+\.md", text)]


def test_a_page_that_is_gone_is_found() -> None:
    assert named_pages("see `relayrun help checks` and `relayrun help\nwhy`") == ["checks", "why"]


def test_no_two_pages_have_one_name() -> None:
    paths = [path for kind in help_command.KINDS for path in (ROOT / "docs" / kind).glob("*.md")]
    assert len(paths) == len(help_command.pages())


def test_the_help_has_every_command_in_one_of_five_groups(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    out = capsys.readouterr().out
    assert re.findall(r"^(\w+):$", out, re.M)[-5:] == ["run", "data", "model", "watch", "site"]
    assert sorted(re.findall(r"^  ([a-z-]+) +\S", out.partition("run:")[2], re.M)) == sorted(cli.COMMANDS)


@pytest.mark.parametrize(("typed", "meant"), [("sumbit", "submit"), ("statsu", "status"), ("reprot", "report")])
def test_a_typo_has_the_nearest_command(typed: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([typed])
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"there is no command '{typed}'" in error
    assert f"'{meant}'" in error
    assert len(error) < 120


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_help_of_a_command_ends_with_an_example_that_it_takes(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.parse([name, "--help"])
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"  relayrun {name} {cli.EXAMPLES[name]}"
    assert callable(cli.parse(shlex.split(last)[1:]).run)
