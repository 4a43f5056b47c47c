"""Our shards are, byte by byte, those of `tools/preprocess_data.py` of Megatron-LM checkouts, run here.

`MEGATRON_CHECKOUTS` names them, with `:` between: each a folder with `tools/` and `megatron/`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.tokens.tokenize.options import TokenizeOptions
from relayrun.tokens.tokenize.pipeline import tokenize_paths_file
from tests.fuzz_tokenizers import random_texts
from tests.published import published
from tests.tokenization_corpus import TEXTS

ROOT = Path(__file__).resolve().parents[2]
FAMILIES = {"Qwen": "<|endoftext|>", "StarCoder": "<|endoftext|>", "Llama 2": "</s>", "BERT": "[SEP]", "T5": "</s>"}
"""Five, with the token that ends a document."""
CHECKOUTS = [each for each in os.environ.get("MEGATRON_CHECKOUTS", "").split(":") if each]


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.skipif(not CHECKOUTS, reason="MEGATRON_CHECKOUTS names no checkout")
def test_the_shards_of_five_families_are_those_of_megatrons_own_script(tmp_path: Path) -> None:
    special = ("<|", "<s>", "</s>", "<unk>", "<pad>", "[")  # becomes special ids in Megatron alone
    texts = [text for text in [*TEXTS * 3, *random_texts(3000, 1)] if not any(mark in text for mark in special)]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "paths").write_text("in.jsonl\n")
    folders = []
    for name, eos in FAMILIES.items():
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        (folder / "tokenizer.json").symlink_to(published(name))
        configuration = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": eos}
        if eos == "</s>":  # Megatron asks for the ids of pieces, and one that is unknown has none without this
            configuration["unk_token"] = "<unk>"
        (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
        folders.append(folder)
        options = TokenizeOptions(tokenizer=str(folder), workers=1, tasks=1, keep_empty=True)
        tokenize_paths_file(
            options, output_folder=tmp_path / f"ours-{folder.name}", dataset=tmp_path, paths_file=tmp_path / "paths"
        )
    for number, checkout in enumerate(CHECKOUTS):
        out = tmp_path / f"theirs-{number}"
        out.mkdir()
        command = [sys.executable, str(ROOT / "tests/megatron_preprocess.py"), str(tmp_path / "in.jsonl"), str(out)]
        environment = os.environ | {"PYTHONPATH": checkout, "TORCHDYNAMO_DISABLE": "1"}
        done = subprocess.run(
            [*command, *map(str, folders)],
            cwd=checkout,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        for folder in folders:
            for suffix in ("bin", "idx"):
                theirs = (out / f"{folder.name}_text_document.{suffix}").read_bytes()
                ours = (tmp_path / f"ours-{folder.name}" / f"00000_tokens.{suffix}").read_bytes()
                assert ours == theirs, f"{checkout}: {folder.name}.{suffix}"
                print(f"{os.path.basename(checkout)}: {folder.name}.{suffix}: {len(ours):,} same bytes")
