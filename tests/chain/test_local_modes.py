"""The modes of every file that a run writes are those of the table in docs/reference/run-directory.md."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.workspace import Workspace

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
RUN_SECONDS = 900


def table() -> list[tuple[str, str]]:
    """Patterns and modes, in the order of the table."""
    text = (ROOT / "docs/reference/run-directory.md").read_text(encoding="utf-8")
    section = text[text.index("\n## Modes\n") :]
    rows = re.findall(r"^\| (`.*?) \| (\d{4}|source) \|", section[: section.index("\n## How a chain")], re.M)
    return [(pattern, mode) for patterns, mode in rows for pattern in re.findall(r"`([^`]+)`", patterns)]


def expected(name: str, mask: int) -> str | None:
    """The mode of a file or folder (its name ends with a slash) of a run; None: that of its source."""
    for pattern, mode in table():
        if pattern.endswith("/") == name.endswith("/") and fnmatchcase(name, pattern):
            if mode == "source":
                return None
            if pattern == "triggers/":
                return oct(int(mode, 8))
            return oct(int(mode, 8) & ~(mask if pattern == "triggers/*" else mask | 0o022))
    raise AssertionError(f"no row for {name}")


def wrong_modes(run: Path, mask: int) -> Iterator[str]:
    for path in [run, *run.rglob("*")]:
        name = "/" if path == run else str(path.relative_to(run)) + "/" * path.is_dir()
        mode = oct(stat.S_IMODE(path.lstat().st_mode))
        wanted = expected(name, mask)
        if wanted is not None and mode != wanted:
            yield f"{name}: {mode}, not {wanted}"
        if wanted is None and path.lstat().st_mode & mask:
            yield f"{name}: {mode}, wider than the umask"


@pytest.mark.long
@pytest.mark.parametrize("mask", [pytest.param(0o002, id="umask 002"), pytest.param(0o077, id="umask 077")])
def test_modes_of_a_run_are_those_of_the_table(tmp_path: Path, mask: int) -> None:
    workspace = Workspace.make(tmp_path)
    config = workspace.config(
        "run",
        training={"steps": 6},
        checkpoint={"interval": 3},
        debug={"backup_codebase": True},
        job={"setup": ["true"]},
        notify={"targets": {"me": {"command": ["true"]}}},
    )
    done = subprocess.run(
        [sys.executable, "launchers/submit.py", str(config)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        umask=mask,
        timeout=RUN_SECONDS,
        check=False,
    )
    run = workspace.run("run").path
    assert (run / "STOP").exists(), done.stderr
    secret = [run / "attempts/0001/job.env", run / "attempts/0001/setup.sh", run / "code/0001.diff"]
    secret.append(run / "debug/0001/compute_environment.txt")
    assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in secret] == ["0o600"] * 4
    assert list(wrong_modes(run, mask)) == []
    os.chmod(run / "plan.json", 0o604)  # a planted fault
    assert len(list(wrong_modes(run, mask))) == 1
