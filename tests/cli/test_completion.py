"""The scripts of `relayrun completion`, in a real Bash."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from relayrun import cli, places

TYPED = """
set -u
source "$1"
cd "$2"
shift 2
COMP_WORDS=(relayrun "$@")
COMP_CWORD=$#
compopt() { printf '%s\n' "$*"; }
_relayrun
for word in "${COMPREPLY[@]}"; do printf '%s\n' "${word}"; done
"""


@pytest.fixture(scope="module")
def bash(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "relayrun.bash"
    with path.open("w") as file, contextlib.redirect_stdout(file):
        assert cli.main(["completion", "bash"]) == 0
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with three runs and a config."""
    for name in ("mine/first", "mine/second", "other/third"):
        (tmp_path / "logs/runs" / name).mkdir(parents=True)
    (tmp_path / places.PROJECT_MARKER).touch()
    (tmp_path / "configs/runs").mkdir(parents=True)
    (tmp_path / "configs/runs/a.yaml").touch()
    (tmp_path / "configs/runs/b.txt").touch()
    return tmp_path


def typed(bash: Path, folder: Path, *words: str) -> list[str]:
    """Return the candidates of Bash for the last of the words behind `relayrun`."""
    done = subprocess.run(
        ["bash", "-c", TYPED, "bash", bash, folder, *words], capture_output=True, text=True, check=True, timeout=600
    )
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_commands_and_their_options(bash: Path, project: Path) -> None:
    assert typed(bash, project, "stat") == ["status"]
    assert set(cli.COMMANDS) <= set(typed(bash, project, ""))
    assert typed(bash, project, "dumps", "pre") == ["prepare"]
    assert typed(bash, project, "submit", "--dr") == ["--dry-run"]
    assert "--filter-in" in typed(bash, project, "dumps", "prepare", "--")
    assert typed(bash, project, "completion", "") == ["bash"]


def test_runs_of_the_project_from_any_folder_in_it(bash: Path, project: Path) -> None:
    for folder in (project, project / "configs/runs"):
        assert typed(bash, folder, "status", "") == ["mine/first", "mine/second", "other/third"]
    assert typed(bash, project, "status", "-f", "mi") == ["mine/first", "mine/second"]
    assert typed(bash, project, "submit", "--load", "oth") == ["other/third"]
    assert typed(bash, project, "diff", "mine/first", "mine/s") == ["mine/second"]


def test_configs_and_folders_that_lead_to_them(bash: Path, project: Path) -> None:
    assert typed(bash, project, "submit", "conf") == ["-o nospace", "configs/"]
    assert typed(bash, project, "submit", "configs/runs/") == ["configs/runs/a.yaml"]
    assert typed(bash, project, "submit", "--dry-run", "configs/runs/a") == ["configs/runs/a.yaml"]


def test_names_of_settings(bash: Path, project: Path) -> None:
    assert typed(bash, project, "submit", "x.yaml", "--set", "training.global_b") == [
        "-o nospace",
        "training.global_batch_size=",
    ]
    assert typed(bash, project, "explain", "training.global_b") == ["training.global_batch_size"]
    # Bash parts what was typed at the =
    assert typed(bash, project, "submit", "--set", "training.steps", "=", "4") == []
    assert typed(bash, project, "submit", "--set", "a.b", "=", "4", "conf") == ["-o nospace", "configs/"]


def test_other_files_are_left_to_bash(bash: Path, project: Path) -> None:
    assert typed(bash, project, "dumps", "size", "conf") == []


def test_an_answer_starts_no_python(bash: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = project / "bin"
    tools.mkdir()
    for name in ("bash", "grep", "sed", "tr"):
        (tools / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tools))
    assert typed(bash, project, "status", "mine/f") == ["mine/first"]


@pytest.mark.alone
def test_an_answer_takes_less_than_a_fifth_of_a_second(bash: Path, project: Path) -> None:
    started = time.monotonic()
    typed(bash, project, "submit", "x.yaml", "--set", "training.")
    assert time.monotonic() - started < 0.2
