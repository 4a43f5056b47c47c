"""The examples of docs/command.md on one machine: killed, they go on as if they had not been."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relayrun.files import read_lines
from relayrun.rundir.run import Run
from tests.command_examples import (
    LAST_CHECKPOINT,
    NAMES,
    ROOT,
    Uncut,
    assert_same_checkpoints,
    config,
    kill_a_rank,
    left_over,
    losses,
)
from tests.workspace import ends

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "name", [name if name == "plain" else pytest.param(name, marks=pytest.mark.long) for name in NAMES]
)
def test_an_example_that_is_killed_goes_on_as_if_it_had_not_been(name: str, tmp_path: Path) -> None:
    last = 20
    pace = ["--save-at=5", "--hold-at=12", f"--held={tmp_path / 'held'}"]
    path = config(tmp_path, name, last=last, pace=pace, cluster={"name": "local", "scheduler": "local"})
    run = Run(tmp_path / name)
    uncut = Uncut(tmp_path, name, last)
    chain = subprocess.Popen(
        [sys.executable, "-m", "relayrun.cli", "submit", path],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    while not ((tmp_path / "held").exists() and list(read_lines(run.attempt(1).commits))):
        assert chain.poll() is None, chain.communicate()[0]
        time.sleep(0.05)
    kill_a_rank(run, name)
    said, _ = chain.communicate()
    records = ends(run)
    assert [end.cause for end in records] == ["failed", "done"], said
    assert records[0].durable_iteration == 5
    assert run.stop.read_text().startswith(f"the last iteration, {last}, is durable")
    assert losses(run.metrics_view) == uncut.losses()
    final = LAST_CHECKPOINT[name].format(last)
    assert_same_checkpoints(uncut.folder / final, run.checkpoints / final)
    assert left_over(run) == []
