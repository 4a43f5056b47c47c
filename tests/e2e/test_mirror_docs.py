"""Every command of docs/how-to/mirror.md runs; a run that comes back from its second place goes on bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from relayrun import places
from relayrun.config.compose import resolve
from relayrun.config.compose.schema import RunConfig
from relayrun.control.rundir import mirror
from relayrun.control.rundir.run import Run
from tests.checkpoints import assert_same_bytes
from tests.readme import ROOT, path_with_relayrun
from tests.workspace import Workspace, steps

PAGE = (ROOT / "docs/how-to/mirror.md").read_text(encoding="utf-8")
STEPS = 40


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)


def test_the_page_is_short_and_every_block_has_a_test() -> None:
    assert len(PAGE.splitlines()) <= 150
    assert (len(blocks("yaml")), len(blocks("bash"))) == (1, 3)


def test_the_section_is_one_of_a_run_config(tmp_path: Path) -> None:
    (text,) = blocks("yaml")
    (tmp_path / "run.yaml").write_text(f"include: ['{ROOT}/configs/runs/my-run.yaml']\n{text}")
    config = resolve.load_run_config(tmp_path / "run.yaml")
    assert isinstance(config, RunConfig)
    assert config.checkpoint.mirror is not None
    assert config.checkpoint.mirror.path == "/archive/ada"


@pytest.mark.slow
@pytest.mark.long
def test_a_run_that_comes_back_from_its_second_place_goes_on_bit_for_bit(tmp_path: Path) -> None:
    workspace = Workspace.make(tmp_path)
    project, second = tmp_path / "project", tmp_path / "second"
    run = Run(project / "logs/runs/my-project/my-run")
    run.path.parent.mkdir(parents=True)
    second.mkdir()
    (project / places.PROJECT_MARKER).touch()
    environment = os.environ | {"PATH": path_with_relayrun(), "HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}

    def shell(script: str, *, check: bool = True) -> str:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=project,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=1000,
        )
        assert done.returncode == 0 or not check, done.stdout + done.stderr
        return done.stdout

    training = {"steps": STEPS}
    checkpoint = {"interval": 10, "async_save": False}
    whole = workspace.config("whole", training=training, checkpoint=checkpoint)
    shell(f"relayrun submit {whole}")
    crash = {"hook": "relayrun.lab.faults.injection:FaultInjectionHook", "options": {"faults": "crash-at=25"}}
    config = workspace.config(
        "mine",
        project="my-project",
        name="my-run",
        run_dir=str(run.path),
        training=training | {"hooks": [crash]},
        checkpoint=checkpoint | {"mirror": {"path": str(second), "keep_last": 1}},
        chain={"auto_requeue": False},
    )
    shell(f"relayrun submit {config}", check=False)
    shell(blocks("bash")[0])
    copies = mirror.read_copies(second / "my-project/my-run")
    assert [copy.iteration for copy in copies.values()] == [20]
    for folder in run.checkpoints.glob("iter_*"):
        shutil.rmtree(folder)
    out = shell(blocks("bash")[1])
    assert "restored iteration 20: " in out
    begin = run.attempt(2).read_begin()
    assert begin is not None
    assert begin.base_iteration == 20
    reference = workspace.run("whole")
    assert steps(run) == steps(reference)
    assert sorted(steps(run)) == list(range(1, STEPS + 1))
    assert assert_same_bytes(reference.checkpoint(STEPS), run.checkpoint(STEPS)) > 50

    shell(blocks("bash")[0])
    shutil.rmtree(run.path)
    longer = workspace.config("more", training={"steps": STEPS + 10}, checkpoint=checkpoint)
    (project / "my-run.yaml").write_text(longer.read_text())
    again = blocks("bash")[2].replace("/archive/ada", str(second)).replace("iter_0000500", f"iter_00000{STEPS}")
    out = shell(again)
    assert f"restored iteration {STEPS}: " in out
    assert sorted(steps(workspace.run("more"))) == list(range(STEPS + 1, STEPS + 11))
