"""A tokenizer by its name on the hub gives the ids of its tokenizer.json, as its downloaded folder does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tokenization_corpus import train_tokenizer

LOAD = """
import sys
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
for name in sys.argv[2:]:
    loaded = load_tokenizer(TokenizeOptions(tokenizer=name, cache_dir=sys.argv[1], bos=True))
    print(loaded.fingerprint, loaded.eos_id, loaded.bos_id, loaded.tokenizer.encode("hello  world").ids)
"""


@pytest.mark.parametrize("config", [{"add_prefix_space": True}, {"tokenizer_class": "Qwen2Tokenizer"}])
def test_a_name_on_the_hub_and_its_folder_are_one_tokenizer(tmp_path: Path, config: dict[str, object]) -> None:
    folder = tmp_path / "hub" / "models--org--t" / "snapshots" / "x"
    train_tokenizer(folder / "tokenizer.json")
    known = {"tokenizer_class": "GPT2Tokenizer", "eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"} | config
    (folder / "tokenizer_config.json").write_text(json.dumps(known))
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    refs = folder.parents[1] / "refs"
    refs.mkdir()
    (refs / "main").write_text("x")
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path / "hub"), "org/t", str(folder)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    by_name, by_folder = done.stdout.splitlines()
    assert by_name == by_folder
