"""Every shell script is shellcheck-clean and formatted by shfmt."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = Path(sys.executable).parent


def shell_scripts() -> list[Path]:
    """The *.sh that git tracks, and those in launchers/ and scripts/ that it does not track yet."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z", "--", "*.sh"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    found = {ROOT / name for name in tracked.stdout.split("\0") if name}
    found |= {path for folder in ("launchers", "scripts") for path in (ROOT / folder).rglob("*.sh")}
    return sorted(path for path in found if path.is_file())


def run(*argv: str | Path) -> None:
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_there_are_shell_scripts() -> None:
    assert ROOT / "scripts/tools/test_cluster.sh" in shell_scripts()


@pytest.mark.parametrize("script", shell_scripts(), ids=lambda path: str(path.relative_to(ROOT)))
def test_script_passes_shellcheck(script: Path) -> None:
    run(TOOLS / "shellcheck", "--external-sources", script)


def test_scripts_are_formatted_by_shfmt() -> None:
    run(TOOLS / "shfmt", "-i", "2", "-ci", "-d", *shell_scripts())
