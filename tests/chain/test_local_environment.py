"""What of the submitter's and the site's environment reaches the ranks of every attempt, not of the first alone."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path

import pytest

from relayrun.control.rundir.run import Run

from .conftest import ROOT, MakeRun
from .test_local_chain import CUT, run_chain

pytestmark = pytest.mark.slow  # they wait for real processes


def python_path(run: Run, attempt: int) -> list[str]:
    text = (run.attempt(attempt).path / "job.env").read_text()
    found = re.search(r"^export PYTHONPATH=(.*)$", text, re.M)
    assert found is not None, text
    return shlex.split(found[1])[0].split(":")


@pytest.mark.long
@pytest.mark.parametrize("site", ["", "/site/lib"])
def test_the_users_python_path_reaches_the_ranks_of_every_attempt(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, site: str
) -> None:
    own = str(tmp_path / "my hooks")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([own, str(ROOT)]))
    run, plan = make_run(
        "--steps=40", "--step-seconds=0.35", total_steps=40, environment={"PYTHONPATH": site} if site else {}, **CUT
    )
    run_chain(run, plan)
    assert len(run.attempt_numbers()) >= 2
    for attempt in run.attempt_numbers():
        assert python_path(run, attempt) == [str(ROOT), *([site] if site else []), own]


def test_without_one_the_package_alone_is_on_the_path(make_run: MakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    run, plan = make_run("--steps=2", total_steps=2)
    run_chain(run, plan)
    assert python_path(run, 1) == [str(ROOT)]
