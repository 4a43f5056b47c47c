"""Raw text to a trained model through the doors, on the demo's whole corpus, with awkward names all the way."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.lab.corpus import build_corpus
from relayrun.tokens.readers.inputs import read_paths_file
from relayrun.tokens.shards.shard import Shard
from relayrun.tokens.tokenize.train_tokenizer import train_tokenizer
from tests.workspace import CONFIG, ends, steps

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
NAMES = ["-leading dash.parquet", "it's.parquet", 'double "quote".PARQUET', "ünï→code 文.parquet"]


def program(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False, timeout=1000
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_every_token_of_the_demo_corpus_and_every_awkward_name_goes_through(tmp_path: Path) -> None:
    home = tmp_path / '-it\'s a "home" $HOME `id` ünï'
    home.mkdir()
    corpus = build_corpus(home / "text", megabytes=24)
    assert corpus["docs"].bytes + corpus["code"].bytes > 20_000_000
    tokenizer_folder = train_tokenizer([corpus["docs"].folder, corpus["code"].folder], home / "tokenizer dir")
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|end_of_text|>")

    for name, folder in (("docs", corpus["docs"].folder), ("code", corpus["code"].folder)):
        parts = sorted(folder.glob("*.parquet"))
        for part, odd in zip(parts, NAMES * 2, strict=False):
            part.rename(folder / odd)
        metadata = home / f"dumps of {name}"
        program(
            "scripts/tokenization/prepare_dumps.py",
            "--dataset-folder",
            folder,
            "--preprocessing-metadata-folder",
            metadata,
            "--n-dumps",
            "2",
        )
        settings = home / f"{name}'s settings.yaml"
        settings.write_text(
            yaml_file.dump_yaml(
                {
                    "tokenizer": str(tokenizer_folder),
                    "tokenizer_name": "demo",
                    "dataset_name": name,
                    "metadata_folder": str(metadata),
                    "output_folder": str(home / "tokens"),
                    "logs": str(home / "logs"),
                    "tasks": 2,
                    "workers": 2,
                    "executor": "local",
                    "max_parallel": 1,
                }
            )
        )
        program("launchers/submit_tokenization.py", settings)

        # every document, in the order of its file: the ids that tokenizers gives, then the end of the document
        finished = sorted((metadata / "completed-dumps").iterdir())
        assert len(finished) == 2
        assert not list((metadata / "dumps").glob("*.txt"))
        documents = 0
        for number, paths_file in enumerate(finished):
            files = read_paths_file(paths_file)
            output = home / "tokens" / "demo" / name / f"dump-{number}"
            shards = [Shard.open(str(path)[:-4]) for path in sorted(output.glob("*.bin"))]
            for rank, shard in enumerate(shards):
                tables = [pq.read_table(folder / file, columns=["text"]) for file in files[rank :: len(shards)]]
                texts = [text for table in tables for text in table["text"].to_pylist() if text]
                assert shard.documents == len(texts)
                ids, starts, lengths = shard.ids(), shard.offsets() // shard.dtype.itemsize, shard.lengths()
                for at in range(0, len(texts), 200):
                    for offset, encoding in enumerate(
                        tokenizer.encode_batch_fast(texts[at : at + 200], add_special_tokens=False)
                    ):
                        start, length = int(starts[at + offset]), int(lengths[at + offset])
                        assert ids[start : start + length].tolist() == [*encoding.ids, end]
                documents += len(texts)
        assert documents == corpus[name].documents

    mixture = home / "a mixture"
    program(
        "scripts/tools/create_data_mixture.py",
        "--folders",
        home / "tokens/demo/docs",
        home / "tokens/demo/code",
        "--weights",
        "0.7",
        "0.3",
        "--output",
        mixture,
    )
    run = Run(home / "the run")
    config = home / "run's config.yaml"
    config.write_text(
        yaml_file.dump_yaml(
            CONFIG
            | {
                "run_dir": str(run.path),
                "training": CONFIG["training"] | {"steps": 5},
                "data": {"tokenizer": str(tokenizer_folder), "datasets": [str(mixture)]},
            }
        )
    )
    program("launchers/submit.py", config)
    assert [record.cause for record in ends(run)] == ["done"]
    assert sorted(steps(run)) == [1, 2, 3, 4, 5]
    assert len(list(read_json_lines(run.attempts_view))) == 1
