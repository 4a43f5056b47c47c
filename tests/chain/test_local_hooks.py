"""The hook of docs/how-to/hooks.md in a chain of three attempts, of which another hook breaks two."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from relayrun.control.job_log import LOG_PREFIX
from relayrun.control.rundir.records import AttemptStart
from tests.chain.test_local_training import ROOT, submit
from tests.checkpoints import assert_same_bytes
from tests.workspace import Workspace, ends, steps

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/how-to/hooks.md").read_text(encoding="utf-8")
COUNT = "my_team.probes:CountSteps"
ONLY_OUTSIDE_RANKS = """
import os
from relayrun.train.hooks import Hook

if "RANK" in os.environ:
    import my_team.counts


class CountSteps(Hook):
    pass
"""
BREAKS = "tests.training.user_hooks:Breaks"


@pytest.mark.long
def test_the_hook_of_the_docs_counts_the_steps_of_a_run_over_three_attempts(tmp_path: Path) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.M | re.S)
    assert f"hooks: [{COUNT}]" in PAGE
    (tmp_path / "my_team").mkdir()
    (tmp_path / "my_team" / "probes.py").write_text(example)
    workspace = Workspace.make(tmp_path)
    settings = {"checkpoint": {"interval": 5, "async_save": False}}
    hooks = [COUNT, {"hook": BREAKS, "options": {"after": {"1": 8, "2": 13}}}]
    config = workspace.config(
        "run",
        training={"hooks": hooks},
        cluster={"environment": {"PYTHONPATH": f"{tmp_path}:{ROOT}"}},
        **settings,
    )
    done = submit(config)
    assert done.returncode == 0, done.stderr
    run = workspace.run("run")
    assert [end.cause for end in ends(run)] == ["failed", "failed", "done"]
    assert [end.durable_iteration for end in ends(run)] == [5, 10, 20]
    for iteration in (5, 10, 15, 20):
        if run.checkpoint(iteration).exists():
            assert torch.load(run.checkpoint(iteration) / "common.pt")[COUNT] == {"steps": iteration}

    message = f"hook {BREAKS}, after_step: RuntimeError: broken by a test ("
    for number in (1, 2):
        begin = AttemptStart.read(run.attempt(number).begin)
        assert begin is not None
        log = Path(begin.log or "").read_text()
        assert message.rstrip(" (") in run.attempt(number).read_end().reason  # type: ignore[union-attr]
        log = "".join(line for line in log.splitlines(keepends=True) if not line.startswith(LOG_PREFIX))
        assert [line for line in log.splitlines() if message in line]
        assert all(line.startswith("error: ") for line in log.splitlines() if message in line), log
        assert "broken by a test" in (run.attempt(number).failures / "rank-0000.json").read_text()

    plain = submit(workspace.config("plain", **settings))
    assert plain.returncode == 0, plain.stderr
    assert steps(run) == steps(workspace.run("plain"))
    common = torch.load(run.checkpoint(20) / "common.pt")
    del common[COUNT]
    torch.save(common, run.checkpoint(20) / "common.pt")
    assert assert_same_bytes(workspace.run("plain").checkpoint(20), run.checkpoint(20)) > 50


def test_a_hook_that_is_not_there_stops_the_chain_at_once(tmp_path: Path) -> None:
    """A submit loads it; a job stops where it has gone since, or loads on no rank."""
    workspace = Workspace.make(tmp_path)
    refused = submit(workspace.config("run", training={"hooks": [COUNT]}))
    assert "has no my_team, which the ranks import" in refused.stderr
    assert not workspace.run("run").path.exists()
    (tmp_path / "my_team").mkdir()
    (tmp_path / "my_team/__init__.py").touch()
    search = {"environment": {"PYTHONPATH": f"{tmp_path}:{ROOT}"}}
    refused = submit(workspace.config("run", training={"hooks": [COUNT]}, cluster=search))
    assert "No module named 'my_team.probes'" in refused.stderr
    assert not workspace.run("run").path.exists()
    (tmp_path / "my_team/probes.py").write_text(ONLY_OUTSIDE_RANKS)
    stopped = submit(workspace.config("run", training={"hooks": [COUNT]}, cluster=search))
    run = workspace.run("run")
    (end,) = ends(run)
    assert end.cause == "fatal", stopped.stderr
    said = f"training.hooks: hook {COUNT} cannot be imported: ModuleNotFoundError: No module named 'my_team.counts'"
    assert said in run.stop.read_text()
