"""Every command of docs/how-to/tokenization.md runs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from relayrun.tokens.tokenize.options import OPTION_FLAGS
from tests.readme import ROOT, blocks, checkout, tokenize

PAGE = (ROOT / "docs/how-to/tokenization.md").read_text(encoding="utf-8")


def test_every_program_and_option_that_is_named_exists() -> None:
    for script in set(re.findall(r"(?:scripts|launchers)/[\w/]+\.(?:py|sh)", PAGE)):
        assert (ROOT / script).is_file(), script
    known = "".join(
        path.read_text(encoding="utf-8")
        for path in (
            *(ROOT / "scripts").rglob("*.py"),
            *(ROOT / "launchers").glob("*.py"),
            *(ROOT / "relayrun/cli").rglob("*.py"),
            ROOT / "relayrun/tokens/tokenize/options.py",
        )
    )
    known += "".join(f'"{flag}"' for flag in OPTION_FLAGS.values())
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", PAGE)) - {"--help"}:
        assert f'"{option}"' in known, option


@pytest.mark.long
def test_the_way_from_raw_text_to_a_mixture(tmp_path: Path) -> None:
    environment = checkout(tmp_path)
    tokenize(tmp_path, environment, "my-code")
    (block,) = blocks("bash", PAGE)
    activated = f"set -euo pipefail\nsource .venv/bin/activate  # as the README begins\n{block}"
    done = subprocess.run(
        ["bash", "-c", activated], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1000
    )
    assert done.returncode == 0, done.stderr
    assert "recommended for this node: workers:" in done.stdout
    assert "total  1/1 done" in done.stdout
    assert "0 with faults" in done.stdout
    assert (tmp_path / "data/merged/dump-0-merged.idx").exists()
    assert (tmp_path / "data/my-mixture/my-text").is_dir()
