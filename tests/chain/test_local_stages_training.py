"""Stages of the real training program on one machine, each begun with a checkpoint of the one before."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from relayrun.files import read_json_lines
from tests.campaigns import attempts, relayrun, write_config
from tests.workspace import Workspace, ends, steps

pytestmark = [pytest.mark.slow, pytest.mark.long]

NAMES = """
import json, os, sys
open(os.path.join(sys.argv[1], "found.json"), "w").write(json.dumps([sys.argv[2], os.listdir(sys.argv[2])]))
"""


def test_stable_decay_long_context_and_a_program_that_looks_at_the_end(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    held_out = Workspace.make(tmp_path / "held-out", seed=2)
    (tmp_path / "names.py").write_text(NAMES)
    program = [sys.executable, str(tmp_path / "names.py"), "{run_dir}"]
    look = {"run": program, "resume": ["{checkpoint}"], "steps": None, "leave_signal": "SIGTERM", "done": "exit-code"}
    write_config(tmp_path, "look", command=look)
    path = workspace.config(
        "plan",
        data={"validation": {"held-out": [str(held_out.folder / "data")]}},
        model={"make_vocab_size_divisible_by": 100},
        training={"eval_interval": 10, "eval_steps": 2},
        optimizer={"lr_decay_style": "constant"},
        checkpoint={"interval": 10},
        evaluation={"interval": 10, "job": {"time": "10"}},
        stages={
            "stable": None,
            "branch": {"from": "stable:10", "decay": 10},
            "long": {
                "from": "stable",
                "training.steps": 30,
                "training.seq_length": 128,
                "checkpoint.no_load_data": True,
            },
            "look": {"from": "long", "config": "look.yaml"},
        },
    )
    done = relayrun("stages", "submit", path)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = {name: workspace.run(f"plan-{name}") for name in ("stable", "branch", "long", "look")}
    assert {name: [end.cause for end in ends(run)] for name, run in runs.items()} == {name: ["done"] for name in runs}
    begins = {name: attempts(run)[0] for name, run in runs.items()}
    before = {"branch": ("stable", 10), "long": ("stable", 20), "look": ("long", 30)}
    for name, (parent, iteration) in before.items():
        begin = begins[name]
        assert begin.base_path == str(runs[parent].checkpoint(iteration))
        assert begin.base_iteration == (0 if name == "look" else iteration), "a program of another kind begins at 0"
        evaluated = {line["iteration"]: line for line in read_json_lines(runs[parent].evaluations_view)}
        assert evaluated[iteration]["status"] == "done"
        assert evaluated[iteration]["results"]["held-out"]["loss"] > 0
    assert sorted(steps(runs["branch"])) == list(range(11, 21))
    assert sorted(steps(runs["long"])) == list(range(21, 31))
    checkpoint, names = json.loads((runs["look"].path / "found.json").read_text())
    assert Path(checkpoint) == runs["long"].checkpoint(30)
    assert names
