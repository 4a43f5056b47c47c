"""OpenGenome2 shrunk: raw JSONL to a model trained by a chain, and the commands of docs/how-to/opengenome2.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve, yaml_file
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.tokens.mixture import audit
from relayrun.tokens.shuffle.reshard import ReshardOptions, reshard
from tests import genomes, warm
from tests.readme import ROOT, copy_tracked, path_with_relayrun
from tests.tokens.test_hub_download import FOLDER, DatasetHub
from tests.workspace import ends, steps

PAGE = (ROOT / "docs/how-to/opengenome2.md").read_text(encoding="utf-8")
TINY = ROOT / "configs/runs/og2-tiny.yaml"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def test_every_block_has_a_test_and_the_page_is_short() -> None:
    assert PAGE.count("```") == 2 * sum(len(blocks(kind)) for kind in ("bash", "bash slurm", "yaml"))
    assert len(PAGE.splitlines()) <= 150


def test_the_sample_of_the_page_is_that_of_both_runs() -> None:
    (text,) = blocks("yaml")
    said = yaml_file.parse_yaml(text, source="page").values["data"]
    for name in ("og2_7b_thd_gqa", "og2_7b_thd_gqa_global_shuffle"):
        data = resolve.load_run_config(ROOT / f"configs/runs/{name}.yaml").model_dump()["data"]
        assert {key: data[key] for key in said} == said


def test_the_launchers_of_the_page_are_there() -> None:
    (text,) = blocks("bash slurm")
    assert (ROOT / text.split()[-1]).is_file()


@pytest.mark.slow
@pytest.mark.long
def test_a_shrunk_copy_trains_through_a_chain_to_the_end(tmp_path: Path) -> None:
    """Sorted JSONL files, shuffled globally; the first job crashes behind iteration 4, the next one goes on from 3."""
    texts = genomes.write(tmp_path / "train")
    folder = str(tmp_path / "train")
    reshard(ReshardOptions(dataset_folder=folder, output=tmp_path / "shuffled", file_size=10_000, seed=1))
    assert main(["dumps", "tokenizer", "--bytes", "--output-folder", str(tmp_path / "tokenizer")]) == 0
    genomes.write(tmp_path / "valid", files=1, count=200, seed=2)
    (tmp_path / "valid.txt").write_text("data_metagenomics_train_chunk1.jsonl.gz\n")
    tokenize = ["dumps", "tokenize", "--dataset", str(tmp_path / "valid"), "--paths-file", str(tmp_path / "valid.txt")]
    tokens = ["--tokenizer-name-or-path", str(tmp_path / "tokenizer"), "--output-folder", str(tmp_path / "tokens")]
    assert main([*tokenize, *tokens]) == 0
    crash = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "crash-at=4"}}
    values: dict[str, Any] = {
        "include": [str(TINY)],
        "run_dir": str(tmp_path / "run"),
        "cluster": {"name": "local", "scheduler": "local", "python": warm.python()},
        "data": {
            "tokenizer": str(tmp_path / "tokenizer"),
            "validation": {"metagenomes_valid": [str(tmp_path / "tokens")]},
            "mixture": {"metagenomes": {"path": str(tmp_path / "shuffled"), "stream": {"shuffle_buffer": 64}}},
        },
        "training": {"steps": 10, "hooks": [crash]},
        "checkpoint": {"interval": 3},
    }
    (tmp_path / "run.yaml").write_text(yaml_file.dump_yaml(values))
    assert main(["submit", str(tmp_path / "run.yaml")]) == 0
    run = Run(tmp_path / "run")
    assert [end.cause for end in ends(run)][-1] == "done"
    assert len(run.attempt_numbers()) == 2
    assert sorted(steps(run)) == list(range(1, 11))
    lines = [line for line in read_json_lines(run.metrics_view) if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert all(line["windows_per_row"] > 1 for line in lines)
    (row,) = audit.dataset_ledgers(audit.audit_run(run))
    assert row.samples == 80
    assert row.lanes is not None
    assert sum(map(len, texts)) > 0


@pytest.mark.long
@pytest.mark.slow
def test_the_commands_of_the_page_lead_to_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user types them, with a stand-in for the hub that holds small files."""
    copy_tracked(tmp_path)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    generator = np.random.default_rng(1)
    texts = genomes.sequences(generator, 240)
    files = {
        f"{FOLDER}/data_metagenomics_train_chunk{number + 1}.jsonl.gz": genomes.jsonl_gz(texts[60 * number :][:60])
        for number in range(4)
    }
    for split in ("valid", "test"):
        name = f"{FOLDER}/data_metagenomics_{split}_chunk1.jsonl.gz"
        files[name] = genomes.jsonl_gz(genomes.sequences(generator, 300))
    hub = DatasetHub(files)
    environment = {
        "PATH": path_with_relayrun(),
        "HOME": str(tmp_path),
        "PYTHONPATH": str(tmp_path),
        "HF_ENDPOINT": hub.url,
    }
    script = "set -euo pipefail\n" + "\n".join(blocks("bash"))
    try:
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=1000,
        )
    finally:
        hub.close()
    assert done.returncode == 0, done.stdout + done.stderr
    run = Run(tmp_path / "logs/runs/opengenome2-7b/og2-tiny")
    assert [end.cause for end in ends(run)] == ["done"]
    lines = [*read_json_lines(run.metrics_view)]
    assert any("metagenomes_valid" in line.get("validation", {}) for line in lines)
    exported = json.loads((tmp_path / "data/opengenome2/exported/config.json").read_text())
    assert exported["vocab_size"] == 256
