"""Streams in real training: text is tokenized by the ranks, and a resume is exact, also with other ranks."""

from __future__ import annotations

import copy
import gzip
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from relayrun.cli import main
from relayrun.config.compose.schema import RunConfig
from relayrun.files import read_json
from relayrun.submit.check.data import build_manifest
from relayrun.tokens.mixture import audit
from tests.checkpoints import assert_same_bytes
from tests.workspace import Workspace

LANES = 8


def texts(generator: random.Random, count: int) -> list[str]:
    """Documents of the workspace's words."""
    return [" ".join(f"w{generator.randint(1, 60)}" for _ in range(generator.randint(5, 60))) for _ in range(count)]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, generator = tmp_path_factory.mktemp("text"), random.Random(3)
    Workspace.make(folder)
    (folder / "web").mkdir()
    (folder / "code").mkdir()
    for number in range(3):
        table = pa.table({"text": texts(generator, 10), "score": [generator.random() for _ in range(10)]})
        pq.write_table(table, folder / "web" / f"{number}.parquet", row_group_size=4)
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts(generator, 40))
    (folder / "code" / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def with_streams(harness: Callable[..., Any], folder: Path, *, num_workers: int = 1) -> Any:
    """A run over two streams and token shards, as a submit leaves it."""
    web = {"shuffle_buffer": 64, "fragment_shuffle_window": 4, "filters": "score > 0.2"}
    mixture = {
        "web": {
            "path": str(folder / "web"),
            "weight": 2.0,
            "source": "parquet",
            "stream": web,
            "order": "document-window",
            "document_window": {"window": 40, "overlap": 4, "eos": True, "drop_eod": True},
        },
        "code": {"path": str(folder / "code"), "weight": 1.0, "source": "jsonl"},
        "tokens": {"path": str(folder / "data"), "weight": 1.0},
    }
    made = harness(
        data={"tokenizer": str(folder / "tokenizer.json"), "datasets": [], "mixture": mixture}
        | {"lanes": LANES, "num_workers": num_workers},
        model={"hidden_dropout": 0.0, "attention_dropout": 0.0},
        training={"steps": 12, "loss_mean": "token"},
        optimizer={"lr_decay_style": "constant", "lr_warmup_steps": 0},
        checkpoint={"interval": 4, "keep_last": 10},
    )
    build_manifest(RunConfig.model_validate_json(json.dumps(made.config))).write(made.run.manifest)
    return made


@pytest.mark.long
def test_a_run_over_streams_in_pieces_and_with_other_ranks_is_the_run_in_one_piece(
    harness: Callable[..., Any], files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the borders of epochs: 12 steps of 8 rows; two replicas, cut at 4 and 8; then one, and four.

    The ranks of the run in one piece read by themselves, those of the others have processes beside them or not.
    """
    whole, pieces = with_streams(harness, files, num_workers=0), with_streams(harness, files, num_workers=1)
    expected = whole.train().steps()
    for end in (4, 8, None):
        pieces.config["training"]["stop_after"] = end
        pieces.train()
    found = {number: step for attempt in pieces.attempts for number, step in attempt.steps().items()}
    assert sorted(found) == list(range(1, 13))
    for number, step in found.items():
        for name in ("loss", "grad_norm", "padding_share", "windows_per_row"):
            assert step[name].hex() == expected[number][name].hex(), (number, name)
    assert any(step["padding_share"] for step in found.values())
    name = "iter_0000012"
    assert_same_bytes(whole.run.checkpoints / name, pieces.run.checkpoints / name)

    for ranks in (1, 4):
        staged = with_streams(harness, files)
        shutil.rmtree(staged.run.path)
        shutil.copytree(whole.run.path, staged.run.path)
        for iteration in (8, 12):
            shutil.rmtree(staged.run.checkpoints / f"iter_{iteration:07}")
        staged.config = copy.deepcopy(whole.config)
        staged.config["job"]["ntasks_per_node"] = ranks
        staged.revision = 2
        staged.write_config()
        base = staged.run.checkpoints / "iter_0000004"
        steps = staged.train(base_iteration=4, base_path=str(base)).steps()
        assert sorted(steps) == list(range(5, 13))
        for number, step in steps.items():
            assert step["loss"] == pytest.approx(expected[number]["loss"], rel=1e-5)
            assert step["padding_share"] == expected[number]["padding_share"]

    audited = audit.audit_run(pieces.run)
    rows = {row.dataset: row for row in audit.dataset_ledgers(audited)}
    assert sum(row.samples for row in rows.values()) == audited.consumed_samples == 96
    assert rows["web"].lanes is not None
    assert rows["web"].lanes.left_out["stream.filters"] > 0
    assert rows["tokens"].lanes is None
    assert main(["data", "ledger", str(pieces.run.path)]) == 0
    assert "web: at sample 96 its lanes stood in epoch" in capsys.readouterr().out
    for numbers in ("90:96", "2:8"):
        assert main(["data", "show", str(pieces.run.path), "--samples", numbers]) == 0
        assert ".parquet, row group" in capsys.readouterr().out
    state = read_json(pieces.attempts[-1].directory.data)
    assert {name: len(entry["cursors"]) for name, entry in state["streams"].items()} == {"web": LANES, "code": LANES}


@pytest.mark.long
def test_another_option_is_refused_by_the_ranks(harness: Callable[..., Any], files: Path) -> None:
    """A submit refuses it, too, or begins the data set anew; see tests/tokens/test_streams_submit.py."""
    made = with_streams(harness, files)
    made.config["training"] |= {"steps": 2}
    made.config["checkpoint"] |= {"interval": 1}
    made.write_config()
    made.train()
    made.config["data"]["mixture"]["web"]["stream"]["shuffle_buffer"] = 65
    made.config["training"]["steps"] = 3
    made.revision = 2
    made.write_config()
    attempt = made.start()
    assert attempt.wait() != [0, 0]
    words = "".join(failure.error for failure in attempt.failures())
    assert "stream.shuffle_buffer of data set 'web' was 64, is 65" in words
