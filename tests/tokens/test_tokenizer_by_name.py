"""A tokenizer by its name on the hub gives the ids of its tokenizer.json, as its downloaded folder does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.tokenization_corpus import train_tokenizer

LOAD = """
import sys
from relayrun.errors import InputError
from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions
for options in ({"bos": True}, {"eos_token": "<|endoftext|>"}, {"append_eod": "no"}, {"special_text": True}):
    for name in sys.argv[2:]:
        try:
            loaded = load_tokenizer(TokenizeOptions(tokenizer=name, cache_dir=sys.argv[1], **options))
        except InputError as error:
            print(error.message)
        else:
            ids = loaded.tokenizer.encode("hello  world<|im_end|>").ids
            print(loaded.ids_fingerprint, loaded.eos_id, loaded.bos_id, loaded.size, ids)
"""
NAMED = {"eos_token": "<|endoftext|>", "bos_token": "<|endoftext|>"}
LATER = {"eos_token": "<|im_end|>", "bos_token": "<|endoftext|>", "add_prefix_space": True}


def by_name_and_by_folder(tmp_path: Path, config: dict[str, object]) -> list[list[str]]:
    """Return what a tokenizer's name and its folder give, for each of the options."""
    folder = tmp_path / "hub" / "models--org--t" / "snapshots" / "x"
    train_tokenizer(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"} | config))
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
    lines = done.stdout.splitlines()
    return [lines[at : at + 2] for at in range(0, len(lines), 2)]


@pytest.mark.parametrize("config", [{"add_prefix_space": True}, {"tokenizer_class": "Qwen2Tokenizer"}])
def test_a_name_on_the_hub_and_its_folder_are_one_tokenizer(tmp_path: Path, config: dict[str, object]) -> None:
    for by_name, by_folder in by_name_and_by_folder(tmp_path, NAMED | config):
        assert by_name == by_folder


def listed(*names: str, first: int) -> dict[str, object]:
    tokens = {str(first + at): {"content": name, "special": True} for at, name in enumerate(names)}
    return {"added_tokens_decoder": tokens}


def test_an_eos_that_the_configuration_alone_lists_has_its_id(tmp_path: Path) -> None:
    size = Tokenizer.from_file(str(train_tokenizer(tmp_path / "tokenizer.json"))).get_vocab_size()
    config = LATER | listed("<|im_start|>", "<|im_end|>", first=size)
    found = by_name_and_by_folder(tmp_path, config)
    for by_name, by_folder in found:
        assert by_name == by_folder
    # text of a special token stays text, but with special_text
    eos = [line.split() for line, _ in found]
    assert [words[1] for words in eos] == [str(size + 1), "0", "None", str(size + 1)]
    assert {words[3] for words in eos} == {str(size + 2)}
    assert [words[-1] == f"{size + 1}]" for words in eos] == [False, False, False, True]
    assert eos[0][0] == eos[1][0] == eos[2][0] == eos[3][0]


@pytest.mark.parametrize("tokens", [{}, listed("<|im_end|>", first=5), listed("<|im_end|>", first=5000)])
def test_an_eos_without_an_id_is_refused_by_every_way(tmp_path: Path, tokens: dict[str, object]) -> None:
    first, named, without, _ = by_name_and_by_folder(tmp_path, LATER | tokens)
    assert first[0] == first[1] == "the tokenizer has no token '<|im_end|>' to end documents with"
    assert named[0] == named[1]
    assert without[0] == without[1]
