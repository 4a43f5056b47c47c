"""The stages of `relayrun dumps dedup` as Slurm arrays: the bytes of the local way, also after kills."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.tokens.curate.dedup_jobs import deduplicate
from relayrun.tokens.tokenize.dumps import prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from tests.tokens.test_dedup import PARAGRAPHS, documents, parts

from . import power_loss
from .cluster import TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]


WORDS = """
from datatrove.utils.word_tokenizers import WordTokenizer


class Words(WordTokenizer):
    def word_tokenize(self, text):
        return text.split()

    sent_tokenize = span_tokenize = None
"""


def make_config(folder: Path, name: str, **given: Any) -> Path:
    places = {"tokenizer": "none", "metadata_folder": f"meta-{name}", "output_folder": "tokens", "logs": f"logs-{name}"}
    values: dict[str, Any] = {key: f"{folder}/{place}" for key, place in places.items()}
    values |= {"tokenizer_name": "t", "dataset_name": name, "tasks": 4, "workers": 2, "max_parallel": 2}
    section = {
        "output_folder": f"{folder}/{name}",
        "language": "own_words.Words",
        "minhash": {"n_grams": 3, "num_buckets": 4},
        "sentences": PARAGRAPHS,
    }
    job = {"time": 5, "partition": "debug", "setup": [f"export PYTHONPATH='{folder}'"]}
    values |= {"job": job, "dedup": section, **given}
    prepare_dumps(folder / "data", values["metadata_folder"], n_dumps=2)
    (folder / f"{name}.yaml").write_text(json.dumps(values))
    return folder / f"{name}.yaml"


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_words.py").write_text(WORDS)
    monkeypatch.syspath_prepend(tmp_path)
    rows = documents(number=300) + parts("\n", 100)
    (tmp_path / "data").mkdir()
    for number in range(6):
        lines = "".join(json.dumps(row) + "\n" for row in rows[number::6])
        (tmp_path / "data" / f"{number}.jsonl").write_text(lines)
    return tmp_path


def kept(folder: Path) -> dict[str, bytes]:
    files = [*folder.glob("*.gz"), *folder.glob("_dedup/**/exclusions/*.gz")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def cancel_arrays(cluster: TestCluster, moment: float) -> set[str]:
    """Kill and cancel all arrays after so many seconds; return them."""
    time.sleep(moment)
    queue = cluster.queue()
    arrays = {job.id.partition("_")[0] for job in queue}
    if arrays:
        for job in queue:
            if job.state == "RUNNING":
                power_loss.kill_job(cluster, job.id)
        cluster.run(["scancel", *arrays], check=False)
    return arrays


@pytest.mark.parametrize(("seed", "kills"), [(1, 4), (2, 8), (3, 8)])
def test_stages_are_arrays_and_go_on_after_kills(cluster: TestCluster, data: Path, seed: int, kills: int) -> None:
    deduplicate(load_tokenization_config(make_config(data, "local", executor="local")), wait=True)
    expected = kept(data / "local")
    assert len(expected) == 12
    command, here = [sys.executable, "-m", "relayrun", "dumps", "dedup"], {"PYTHONPATH": str(data)}
    said = cluster.run([*command, make_config(data, "whole"), "--wait"], timeout=540, env=here).stdout
    assert [line for line in said.splitlines() if line.startswith("stage buckets: 4 tasks in 2 jobs of Slurm array ")]
    assert "dedup kept: 4/4 tasks" in said
    assert kept(data / "whole") == expected
    generator, config, killed, folders = random.Random(seed), make_config(data, "killed1"), 0, 1
    while killed < kills:
        cluster.run([*command, config], env=here)
        refused = cluster.run([*command, config], check=False, env=here)
        assert "pending or running as Slurm jobs" in refused.stderr
        if arrays := cancel_arrays(cluster, generator.uniform(2, 12)):
            killed += 1
        cluster.wait_until(lambda: not cluster.queue(), what="the queue is empty")
        if not arrays:  # it was done before
            assert kept(data / f"killed{folders}") == expected
            folders += 1
            config = make_config(data, f"killed{folders}")
    cluster.run([*command, config, "--wait"], timeout=540, env=here)
    assert kept(data / f"killed{folders}") == expected
    print(f"seed {seed}: {killed} kills in {folders} folders")


def test_a_stage_that_fails_ends_those_behind_it(cluster: TestCluster, data: Path) -> None:
    config = make_config(data, "failed")
    (data / "data/3.jsonl").write_text('{"text": "good"}\n' * 3000 + "no json\n")
    command: list[str | Path] = [sys.executable, "-m", "relayrun", "dumps", "dedup", config]
    here = {"PYTHONPATH": str(data)}
    failed = cluster.run([*command, "--wait"], timeout=540, check=False, env=here)
    assert failed.returncode == 1
    assert "dedup failed: " in failed.stderr
    assert "3.jsonl:3001: this line is not JSON" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not cluster.queue()
