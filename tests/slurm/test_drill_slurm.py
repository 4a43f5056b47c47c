"""`relayrun drill` as a user calls it: on a Slurm that is not theirs, through steps of their own jobs."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines

from .cluster import ROOT, TestCluster
from .conftest import MakeCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(2400)]


@pytest.fixture(scope="module")
def cluster(make_cluster: MakeCluster) -> TestCluster:
    return make_cluster(nodes=2, cpus=4)


def command(folder: Path, *words: str) -> list[str]:
    program = [sys.executable, "-m", "relayrun.cli", "drill", "--cluster", "test", "--directory", str(folder)]
    return [*program, "--json", *words]


def of_the_page() -> list[str]:
    """The words of the command that docs/how-to/drill.md shows, without its first two."""
    text = (ROOT / "docs/how-to/drill.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```bash drill\n(.*?)^```$", text, re.M | re.S)
    return shlex.split(block)[2:]


def results(text: str) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in json.loads(text)["rows"]}


def test_a_drill_is_stopped_by_ctrl_c_and_goes_on_behind_what_is_done(cluster: TestCluster, tmp_path: Path) -> None:
    folder = tmp_path / "drill"
    other = cluster.sbatch(["--hold", "--job-name=drill-undisturbed", "--wrap=true"])  # not the drill's
    words = ["--faults", "rank-killed,latest-torn", "--yes"]
    program = subprocess.Popen(
        command(folder, *words),
        cwd=ROOT,
        env=cluster.env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # as a terminal has it
    )
    try:
        torn = Run(folder / "runs/latest-torn").attempt(1)
        cluster.wait_until(lambda: any(line["iteration"] > 2 for line in read_json_lines(torn.metrics)), 900)
        os.kill(program.pid, signal.SIGINT)
        out, said = program.communicate(timeout=300)
    finally:
        program.kill()
    assert program.returncode == 130, said
    assert "latest-torn: the chain has ended: cancelled by the drill; cancelled " in said
    cluster.wait_until(lambda: [job.id for job in cluster.queue()] == [other])
    assert results(out).keys() == {"undisturbed", "rank-killed"}
    assert json.loads(out)["not_done"] == ["latest-torn"]
    first = (folder / "results/rank-killed.json").read_bytes()

    done = cluster.run(command(folder, *words), cwd=ROOT, timeout=1200)
    assert (folder / "results/rank-killed.json").read_bytes() == first
    rows = results(done.stdout)
    assert all(row["passed"] and row["bit_for_bit"] for name, row in rows.items() if name != "undisturbed")
    assert rows.keys() == {"undisturbed", "rank-killed", "latest-torn"}
    assert rows["latest-torn"]["steps_lost"] >= 10  # at least those since the checkpoint that was torn
    assert rows["rank-killed"]["seconds_lost"] > 0
    shown = cluster.run([*command(folder), *of_the_page(), "--yes"], cwd=ROOT, timeout=1200)
    assert results(shown.stdout).keys() == {"undisturbed", "rank-killed", "latest-torn", "cancelled"}
    assert all(row["passed"] for row in results(shown.stdout).values())
    assert [job.id for job in cluster.queue()] == [other]
    page = (folder / "drill.md").read_text()
    assert "3 of 3 faults passed" in page
    cluster.run(["scancel", other])
