"""Jobs of dumps with steps, killed one by one at random moments: 100 kills, and the bytes of a local dump."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from relayrun.tokens.tokenize.dump_jobs import submit_dumps
from relayrun.tokens.tokenize.dumps import DumpsFolder, prepare_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from tests.tokenization_corpus import train_tokenizer

from . import power_loss
from .cluster import TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

KILLS, DUMPS = 100, 8
STEPS = """
import time


def is_even(document):
    time.sleep(0.01)
    return int(document.id.rpartition("/")[2]) % 2 == 0
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for local jobs
    train_tokenizer(tmp_path / "tok/tokenizer.json")
    (tmp_path / "data").mkdir()
    for number in range(2 * DUMPS):
        lines = [json.dumps({"text": f"text {number} of row {row} " * 9}) + "\n" for row in range(50 + number)]
        (tmp_path / f"data/{number}.jsonl").write_text("".join(lines))
    return tmp_path


def make_config(place: Path, name: str, **given: Any) -> Path:
    values: dict[str, Any] = {
        "tokenizer": f"{place}/tok/tokenizer.json",
        "tokenizer_name": "t",
        "dataset_name": "d",
        "metadata_folder": f"{place}/meta-{name}",
        "output_folder": f"{place}/{name}",
        "logs": f"{place}/logs-{name}",
        "tasks": 2,
        "workers": 1,
        "max_parallel": 4,
        "pipeline": [{"lambda": {"filter_function": "own_steps.is_even"}}, {"sampler": {"rate": 0.7, "seed": 1}}],
        "job": {"time": 5, "partition": "debug", "setup": [f"export PYTHONPATH='{place}'"]},
        **given,
    }
    prepare_dumps(place / "data", values["metadata_folder"], n_dumps=DUMPS)
    (place / f"{name}.yaml").write_text(json.dumps(values))
    return place / f"{name}.yaml"


def made(place: Path, name: str) -> dict[str, bytes]:
    """Return shards and dropped documents."""
    folder = place / name / "t/d"
    files = [*folder.glob("dump-*/*.bin"), *folder.glob("dump-*/*.idx"), *folder.glob("dump-*/exclusions/*")]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_a_hundred_kills_leave_the_bytes_of_a_local_dump(cluster: TestCluster, place: Path) -> None:
    submit_dumps(load_tokenization_config(make_config(place, "local", executor="local")))
    expected = made(place, "local")
    assert len(expected) == 3 * 2 * DUMPS
    generator, killed, folders = random.Random(48), list[str](), 0

    def kill_one() -> bool:
        """Kill a job after a moment; True if the queue is empty."""
        queue = cluster.queue()
        running = [job.id for job in queue if job.state == "RUNNING"]
        time.sleep(generator.uniform(0.1, 2.0))
        job = generator.choice(running or [""])
        if job and len(killed) < KILLS and power_loss.kill_job(cluster, job):
            killed.append(job)
        return not queue

    while len(killed) < KILLS:
        name, folders = f"killed{folders}", folders + 1
        config, metadata = make_config(place, name), DumpsFolder(place / f"meta-{name}")
        while metadata.pending():
            submit(cluster, config, place)
            cluster.wait_until(kill_one, interval=0)
        assert made(place, name) == expected, f"after {len(killed)} kills"
    print(f"{len(killed)} kills in {folders} folders")


def submit(cluster: TestCluster, config: Path, place: Path) -> None:
    """Submit once the processes of killed jobs have ended."""

    def submitted() -> bool:
        words: list[str | Path] = [sys.executable, "-m", "relayrun", "dumps", "submit", config]
        done = cluster.run(words, check=False, env={"PYTHONPATH": str(place)})
        assert done.returncode == 0 or "by another process" in done.stderr, done.stderr
        return done.returncode == 0

    cluster.wait_until(submitted, timeout=120, what="the dumps are submitted")
