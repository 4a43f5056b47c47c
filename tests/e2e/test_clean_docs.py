"""Every command of docs/how-to/clean.md runs, from text to a run, and prints what the page says."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from relayrun.cli import main
from relayrun.tokens.tokenize.train_tokenizer import train_tokenizer
from tests.readme import ROOT, blocks, path_with_relayrun

PAGE = (ROOT / "docs/how-to/clean.md").read_text(encoding="utf-8")


@pytest.mark.long
def test_the_commands_of_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (settings,), (program,), (commands,), (says,) = (blocks(kind, PAGE) for kind in ("yaml", "python", "bash", "text"))
    assert PAGE.count("```") == 8
    project = tmp_path / "p"
    assert main(["init", str(project), "--cluster", "local"]) == 0
    generator = random.Random(0)
    words = ["the", "and", *("".join(generator.choices("abcdefghijklmno", k=4)) for _ in range(500))]
    texts = ["\n".join(f"So the {' '.join(generator.choices(words, k=50))}." for _ in range(20)) for _ in range(200)]
    question = {"text": "it was built in the year of the fox", "query": "when was the old bridge over the river built"}
    texts[1] = texts[1].replace(".", f" {question['query']} {question['text']} and so on.", 1)
    texts[2] = texts[0].replace("the", "a", 1)
    texts[3] = "un renard et un chien"
    texts[5] += "\n" + texts[4].split("\n")[7]
    for number, part in enumerate((texts[:100], [texts[0], *texts[100:]])):
        file = project / f"data/crawl/part-{number}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (project / "data/evaluations").mkdir()
    (project / "data/evaluations/bridges.jsonl").write_text(json.dumps(question) + "\n")
    train_tokenizer([project / "data/crawl"], project / "data/tokenizer", vocabulary_size=4096)
    (project / "crawl.yaml").write_text(settings)
    (project / "my_words.py").write_text(program)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=project,
        env={"PATH": path_with_relayrun(), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(says)
    shown = re.sub(r" \(\d+% of the bytes\)", "", done.stdout)
    steps = "lambda 201 in, 200 out; c4_paragraph 200 in, 200 out; decontamination 200 in, 199 out"
    assert f"dedup documents: 2/2 tasks; documents: {steps}" in shown
    kept = "exact 199 in, 198 out; minhash 198 in, 197 out; sentences 197 in, 197 out"
    assert f"dedup kept: 2/2 tasks; documents: {kept}" in shown
    assert main(["data", "why", "part-0.jsonl/5", str(project / "data/clean")]) == 0
    assert "part-0.jsonl/5: cut by sentences: sentences that another document has" in capsys.readouterr().out
