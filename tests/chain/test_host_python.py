"""The batch script's Python is older than the ranks': a whole chain, supervisor and agents, on Python 3.10."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from relayrun.control.rundir import restarts

from .conftest import MakeRun
from .test_agents import Steps
from .test_local_chain import CUT, ends, logs, run_chain


def find_python(version: str) -> str | None:
    """Return a Python of this version, `PATH`'s or one of pyenv's, that starts."""
    places = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    places += map(str, Path(sys.base_prefix).parent.glob(f"{version}.*/bin/python"))
    for place in filter(None, places):
        if subprocess.run([place, "-c", ""], capture_output=True, check=False, timeout=60).returncode == 0:
            return place
    return None


OLD = find_python("3.10")
needs_old_python = pytest.mark.skipif(OLD is None, reason="no Python 3.10 on this machine")


@needs_old_python
def test_a_chain_of_several_jobs_on_an_old_host_python(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another `relayrun` in the working folder is not taken, though this Python knows no `-P`."""
    (tmp_path / "relayrun").mkdir()
    (tmp_path / "relayrun" / "__init__.py").write_text("raise SystemExit('the working folder was searched')\n")
    run, plan = make_run("--steps=40", "--step-seconds=0.35", total_steps=40, host_python=OLD, **CUT)
    monkeypatch.chdir(tmp_path)
    run_chain(run, plan)
    assert [end.cause for end in ends(run)][-1] == "done", logs(run)
    assert len(ends(run)) >= 2, logs(run)


@needs_old_python
def test_spare_nodes_on_an_old_host_python(make_run: MakeRun) -> None:
    """The coordinator runs on the host's Python, the agents and ranks on theirs."""
    steps = Steps(make_run, "1:1:7:SIGKILL", host_python=OLD)
    assert steps.starter.wait(300) == 0, steps.log()
    assert [failed.again for failed in restarts.read_failed_restarts(steps.attempt)] == [True]
