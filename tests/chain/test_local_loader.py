"""examples/loader in a chain of the local scheduler, killed behind their first saves: the samples and losses of a whole
run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from relayrun import checkpoints
from relayrun.api import submit
from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests import warm
from tests.tokens.test_loader import shards
from tests.workspace import Workspace

from .test_local_recipes import ON_CPUS, python_of

ROOT = Path(__file__).resolve().parents[2]


def config(folder: Path, example: str, *, name: str, steps: int, kills: int) -> Path:
    words = [str(ROOT / "tests/killed_by_itself.py"), "49", str(kills), str(ROOT / f"examples/loader/{example}.py")]
    python = warm.python() if example == "plain" else sys.executable
    if example == "torchtitan_loader":
        python = python_of("torchtitan")
        words.insert(3, str(ON_CPUS))
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    values = {
        "project": "test",
        "name": name,
        "run_dir": str(folder / name),
        "trainer": "command",
        "cluster": {"name": "local", "scheduler": "local", "python": python, "environment": environment},
        "command": {
            "run": ["{python}", *words, str(folder / "data.yaml"), "{checkpoints}", str(steps)],
            "leave_signal": None,
            "steps": steps,
        },
        "job": {"time": "10"},
        "chain": {"auto_requeue": True, "max_failed_attempts": 20},
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    return path


def steps_of(run: Run) -> dict[int, tuple[float, float]]:
    """Samples and loss of each iteration, as its last attempt trained it."""
    return {line["iteration"]: (line["samples"], line["loss"]) for line in read_json_lines(run.metrics_view)}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("example", "kills", "steps", "package"),
    [
        ("plain", 2, 200, "torch"),
        pytest.param("huggingface", 2, 60, "transformers", marks=pytest.mark.long),
        pytest.param("lightning_module", 2, 60, "lightning", marks=pytest.mark.long),
        pytest.param("megatron_core", 2, 60, "megatron.core", marks=pytest.mark.long),
        pytest.param("torchtitan_loader", 2, 60, "torch", marks=pytest.mark.long),
    ],
)
def test_an_example_that_is_killed_trains_on_the_samples_of_a_whole_run(
    example: str, kills: int, steps: int, package: str, tmp_path: Path
) -> None:
    pytest.importorskip(package)
    data = shards(Workspace.make(tmp_path), web=3, code=1)
    (tmp_path / "data.yaml").write_text(yaml_file.dump_yaml({"data": data}))
    found = {}
    for name, planned in (("whole", 0), ("cut", kills)):
        handle = submit(config(tmp_path, example, name=name, steps=steps, kills=planned))
        assert handle.wait() == "done", (handle.status().why, os.listdir(handle.path))
        run = Run(handle.path)
        assert len(run.attempt_numbers()) == planned + 1
        newest = checkpoints.newest(run.checkpoints)
        assert newest is not None
        assert newest.step == steps
        found[name] = steps_of(run)
    assert sorted(found["whole"]) == list(range(1, steps + 1))
    assert found["cut"] == found["whole"]
