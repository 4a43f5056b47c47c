"""The files of Megatron-LM's own `tools/preprocess_data.py --append-eod`, byte by byte.

The hashes are those of the files that this command wrote, at Megatron-LM core_v0.16.1 (commit 55ac7082517c), Python
3.11.7, torch 2.13.0+cpu, transformers' and tokenizers' versions as in constraints.txt:

    PYTHONPATH=. python tools/preprocess_data.py --input in.jsonl --output-prefix out --append-eod --workers 1 \
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer

with `in.jsonl` and `tokenizer/` of the folder beside this file. (On a machine without a GPU the module
`batch_invariant_kernels`, which imports triton and is not used, has to be replaced by an empty one.) It keeps empty
documents, and makes special ids of their text: the input has the former and not the latter.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
INPUT = HERE / "preprocess_data"
MEGATRON = {
    "bin": "554382fa5c3b74b93f834e4b701a25766b20ee786e1f2096460091c39cd1d454",
    "idx": "8d5fff5ebc7a98067b6dee94e01c5ab160c7a483ad2412fa02bd6b50d4393704",
}


@pytest.mark.slow
def test_the_files_are_those_of_megatrons_own_script(tmp_path: Path) -> None:
    (tmp_path / "paths").write_text("in.jsonl\n")
    command = [
        sys.executable,
        str(HERE.parents[1] / "scripts/tokenization/preprocess_megatron.py"),
        "--model-identifier",
        str(INPUT / "tokenizer"),
        "--path",
        str(tmp_path / "out"),
        "--dataset",
        str(INPUT),
        "--paths-file",
        str(tmp_path / "paths"),
        "--text-field",
        "text",
        "--append-eod",
        "--keep-empty",
        "--tokenization-batch-size",
        "3",
        "--cache-dir",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    for suffix, digest in MEGATRON.items():
        assert hashlib.sha256((tmp_path / "out" / f"00000_tokens.{suffix}").read_bytes()).hexdigest() == digest
