"""`relayrun.api`: runs submitted, awaited, read and stopped by a program."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from relayrun.api import RunHandle, submit
from relayrun.errors import ConfigError, RelayrunError, RunDirError
from tests.waiting import wait_for

PROGRAM = """
import sys, time
from pathlib import Path
from relayrun import client
folder, last, seconds = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
start = int(Path(client.checkpoint()).read_text()) if client.checkpoint() else 0
for step in range(start + 1, last + 1):
    time.sleep(seconds)
    client.step_done(step, loss=1.0 / step)
    leave = client.should_leave()
    if step % 5 == 0 or leave:
        (folder / f"step-{step}").write_text(str(step))
        client.checkpoint_done(step, folder / f"step-{step}")
    if leave:
        break
"""


def config(folder: Path, last: int, *, seconds: float = 0.0) -> Path:
    (folder / "program.py").write_text(PROGRAM)
    path = folder / "run.yaml"
    path.write_text(f"""
project: test
name: api
trainer: command
cluster: local
run_dir: {folder / "api"}
command:
  run: ["{sys.executable}", "{folder / "program.py"}", "{{checkpoints}}", "{last}", "{seconds}"]
  leave_signal: null
  steps: {last}
job: {{time: "10"}}
""")
    return path


def test_a_run_is_submitted_with_changes_awaited_and_continued(tmp_path: Path) -> None:
    run = submit(config(tmp_path, 10), {"chain.auto_requeue": False})
    assert run.status().state == "queued"
    assert not run.status().auto_requeue
    assert run.wait() == "done"
    assert run.status().durable_iteration == 10
    assert RunHandle(run.path).status().state == "done"
    path = config(tmp_path, 20)
    with pytest.raises(RelayrunError, match="ended"):
        submit(path)
    again = submit(path, {"chain.auto_requeue": True}, resume=True)
    assert again.path == run.path
    assert again.wait() == "done"
    assert again.status().auto_requeue


def test_a_run_is_stopped_from_elsewhere(tmp_path: Path) -> None:
    path = config(tmp_path, 10_000, seconds=0.05)
    run = submit(path)
    states: list[str] = []
    waiting = threading.Thread(target=lambda: states.append(run.wait()))
    waiting.start()
    wait_for(lambda: run.status().iteration > 0, 120)
    assert run.wait(seconds=0.2, every=0.1) == "running", "another thread runs its jobs"
    assert "saves after the step that is under way" in run.stop()
    waiting.join(120)
    assert states == ["stopped"]


def test_what_a_submit_refuses_is_an_error(tmp_path: Path) -> None:
    path = config(tmp_path, 20)
    with pytest.raises(ConfigError, match="stepz"):
        submit(path, {"command.stepz": 10})
    with pytest.raises(RunDirError, match="there is no such run"):
        RunHandle(tmp_path / "nothing")
