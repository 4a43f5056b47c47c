"""Every command of docs/how-to/filter.md runs, and prints what the page says."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from relayrun import places
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.steps import check_steps
from relayrun.tokens.tokenize.train_tokenizer import train_tokenizer
from tests.readme import ROOT, blocks, path_with_relayrun

PAGE = (ROOT / "docs/how-to/filter.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    (settings, _), (program,) = blocks("yaml", PAGE), blocks("python", PAGE)
    (commands,), (says,) = blocks("bash", PAGE), blocks("text", PAGE)
    assert PAGE.count("```") == 10
    data = tmp_path / "data/my-text"
    data.mkdir(parents=True)
    paragraph = " ".join(["a fox and a dog"] * 20)
    texts = [
        f"{paragraph}\n{paragraph}\n{paragraph} me@company.com",
        "one line",
        "\n".join([" ".join(["extraordinarily"] * 21)] * 3),
        f"{paragraph}\n{paragraph}\n{paragraph} lorem ipsum",
    ]
    (data / "part-0.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer([data], tmp_path / "data/tokenizer", vocabulary_size=300)
    (tmp_path / "filtered.yaml").write_text(settings)
    (tmp_path / "my_filters.py").write_text(program)
    (tmp_path / places.PROJECT_MARKER).touch()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=tmp_path,
        env={"PATH": path_with_relayrun(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(says)
    shown = re.sub(r" \(\d+% of the bytes, about [\d.]+ Mtok\)", "", done.stdout)
    assert "c4_paragraph 4 in, 3 out; regex 3 in, 2 out; pii 2 in, 2 out; lambda 2 in, 1 out" in shown
    assert Shard.open(tmp_path / "data/tokens/my-tokenizer/my-text-filtered/dump-0/00000_tokens").documents == 1


def test_the_crawl_of_the_page() -> None:
    """tests/tokens/test_dump_readers.py runs one."""
    for module in ("warcio", "magic", "cchardet", "trafilatura"):
        pytest.importorskip(module, exc_type=ImportError)
    settings = yaml.safe_load(blocks("yaml", PAGE)[1])
    check_steps(settings["pipeline"], lambda location: None, reader=settings["reader"])
