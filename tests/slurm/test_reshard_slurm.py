"""A shuffle as a job gives the bytes of one in a terminal, also after a requeue."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from .cluster import ROOT, TestCluster

pytestmark = pytest.mark.slurm
ROWS = 6000

HANGS_ONCE = """#!/bin/bash
# A Python that hangs once.
here=$(dirname "$0")
if [[ $* != *--check* && -n ${SLURM_PROCID:-} ]] && mkdir "$here/hung" 2>/dev/null; then
  sleep 300
fi
exec PYTHON "$@"
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Input, and what one process makes of it."""
    place = tmp_path_factory.mktemp("re ' shard")
    for name in ("data", "temp"):
        (place / name).mkdir()
    generator = np.random.default_rng(0)
    for number in range(9):
        texts = [f"{number}-{row} " + "x" * int(generator.integers(900)) for row in range(ROWS // 9 + 1)]
        pq.write_table(
            pa.table({"text": texts[: ROWS // 9 + (number < ROWS % 9)]}), place / "data" / f"{number}.parquet"
        )
    command = [sys.executable, ROOT / "scripts/tokenization/reshard.py", *options(place, "alone")]
    subprocess.run(command, check=True, capture_output=True, timeout=600)
    return place


def options(place: Path, name: str) -> list[str]:
    return [
        "--dataset-folder",
        str(place / "data"),
        "--output-folder",
        str(place / "out" / name),
        "--seed",
        "5",
        "--file-size",
        "0.05",
        "--row-group-size",
        "100",
        "--compression",
        "none",
        "--temp-dir",
        str(place / "temp"),
    ]


def submit(cluster: TestCluster, place: Path, arguments: list[str], python: str) -> str:
    environment = {"PYTHON": python, "PATH_TO_LOGS": str(place / "logs")}
    command = [ROOT / "scripts/tokenization/submit_reshard.sh", *arguments]
    return cluster.run(command, env=environment).stdout.splitlines()[0].removeprefix("Slurm job ")


def log(place: Path, job: str) -> str:
    return (place / f"logs/slurm/reshard/R-reshard-{job}.err").read_text()


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.long
def test_a_job_that_is_requeued_gives_the_bytes_of_a_terminal(cluster: TestCluster, place: Path) -> None:
    alone = contents(place / "out/alone")
    assert len(alone) > 20
    wrapper = place / "python"
    wrapper.write_text(HANGS_ONCE.replace("PYTHON", f'"{sys.executable}"'))
    wrapper.chmod(0o755)
    job = submit(cluster, place, options(place, "shuf fled"), str(wrapper))
    cluster.wait_until((place / "hung").exists, timeout=600, what="the shuffle hangs")
    cluster.run(["scontrol", "requeue", job])
    assert cluster.wait_job(job, timeout=360) == "COMPLETED", log(place, job)
    assert cluster.job(job)["Restarts"] == "1"
    found = contents(place / "out/shuf fled")
    assert {name for name in alone.keys() | found.keys() if alone.get(name) != found.get(name)} == set()
    assert sorted(entry.name for entry in (place / "out").iterdir()) == ["alone", "shuf fled"]
    assert not list((place / "temp").iterdir())


def test_bad_input_is_refused_before_anything_is_queued(cluster: TestCluster, place: Path) -> None:
    with pytest.raises(AssertionError, match=r"0\.parquet: no column 'nope'; there are: text"):
        submit(cluster, place, [*options(place, "bad"), "--column", "nope"], sys.executable)
    assert not (place / "out/bad").exists()
    assert not list((place / "temp").iterdir())
