"""The pipelines of examples/, run as a user runs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tokenization_corpus import expected_ids, shard_documents, train_tokenizer

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ROWS = ["short", "the first text of them all", "the first text of them all"]
KEPT = {"curator_style": ROWS}


def test_every_example_is_tested() -> None:
    assert sorted(KEPT) == sorted(file.stem for file in EXAMPLES.glob("*.py"))


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_an_example_keeps_what_it_says(name: str, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tmp_path / "tokenizer" / "tokenizer.json")
    (tmp_path / "data").mkdir()
    lines = "".join(json.dumps({"text": text, "id": str(row)}) + "\n" for row, text in enumerate(ROWS))
    (tmp_path / "data" / "a.jsonl").write_text(lines)
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), "data", "tokenizer", "tokens"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    found = shard_documents(tmp_path / "tokens" / "00000_tokens")
    assert found == expected_ids(tokenizer, KEPT[name])
