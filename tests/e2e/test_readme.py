"""Every command of the README runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.readme import KINDS, README, ROOT, blocks, checkout, tokenize


def test_every_block_is_of_a_kind_that_is_run() -> None:
    fences = re.findall(r"^```(\w.*)$", README, re.M)
    assert set(fences) == set(KINDS)
    assert len(fences) == sum(len(blocks(kind)) for kind in KINDS)


def test_make_commands_are_targets() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    commands = re.findall(r"make ([a-z-]+)", README)
    assert {"demo", "test", "setup", "check", "help", "demo-slurm"} <= set(commands)
    for target in commands:
        assert re.search(rf"^{target}:", makefile, re.M), target


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / link).exists(), f"{page}: {link}"


@pytest.mark.slow
def test_the_way_from_parquet_to_a_run(tmp_path: Path) -> None:
    environment = checkout(tmp_path)
    tokenize(tmp_path, environment, "my-code")
    script = "set -euo pipefail\n" + "\n".join(blocks("bash"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stderr
    assert "plan of my-project/my-run" in done.stdout
    assert "submit would take this" in done.stdout
    assert (tmp_path / "logs/runs/my-project/my-run/checkpoints/iter_0000040").is_dir()
