"""Completion by argcomplete, as shells ask for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun import cli, places

PROGRAM = Path(sys.executable).with_name("relayrun")
TYPED = """
eval "$("$1" --shell bash relayrun)"
COMP_LINE=$2 COMP_POINT=${#2} COMP_TYPE=9 COMP_WORDBREAKS=$' \\t\\n"=:'
complete -p relayrun
function=$(complete -p relayrun | sed 's/.*-F \\([^ ]*\\).*/\\1/')
"${function}" relayrun
printf '%s\\n' "${COMPREPLY[@]}"
"""


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


def typed(folder: Path, words: str) -> list[str]:
    """Return the candidates for the last word behind `relayrun`."""
    answer, line = folder / ".answer", f"relayrun {words}"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked |= {"_ARGCOMPLETE_STDOUT_FILENAME": str(answer)}
    done = subprocess.run([PROGRAM], env=os.environ | asked, cwd=folder, capture_output=True, check=True, timeout=100)
    assert done.stdout == b""
    return answer.read_text().split()


def test_commands_and_their_options(project: Path) -> None:
    assert typed(project, "stat") == ["status"]
    assert set(cli.COMMANDS) <= set(typed(project, ""))
    assert typed(project, "dumps pre") == ["prepare"]
    assert typed(project, "submit --dr") == ["--dry-run"]


def test_runs_of_the_project_from_any_folder_in_it(project: Path) -> None:
    for folder in (project, project / "configs/runs"):
        assert typed(folder, "status ") == ["mine/first", "mine/second", "other/third"]
    assert typed(project, "submit --load oth") == ["other/third"]
    assert typed(project, "diff mine/first mine/s") == ["mine/second"]


def test_configs_and_folders_that_lead_to_them(project: Path) -> None:
    assert typed(project, "submit conf") == ["configs/"]
    assert typed(project, "submit --dry-run configs/runs/") == ["configs/runs/a.yaml"]


def test_names_of_settings(project: Path) -> None:
    assert typed(project, "submit x.yaml --set training.global_b") == ["training.global_batch_size="]
    assert typed(project, "explain training.global_b") == ["training.global_batch_size"]


def test_other_files_are_left_to_the_shell(project: Path) -> None:
    assert typed(project, "dumps size conf") == []


def test_a_bash_that_calls_the_functions_of_argcomplete(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{PROGRAM.parent}:{os.environ['PATH']}")
    command = ["bash", "-c", TYPED, "bash", PROGRAM.with_name("register-python-argcomplete"), "relayrun status mine/f"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout.splitlines()[-1].strip() == "mine/first", done.stderr


def test_no_other_call_loads_argcomplete() -> None:
    code = "import sys, relayrun.cli; relayrun.cli.parse(['status']); sys.exit('argcomplete' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
