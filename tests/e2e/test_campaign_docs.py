"""Every example and command of docs/how-to/sweeps.md and stages.md, in a project whose template is a tiny run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from tests.campaigns import attempts
from tests.readme import ROOT, path_with_relayrun
from tests.workspace import Workspace, steps

PAGES = {name: (ROOT / f"docs/how-to/{name}.md").read_text(encoding="utf-8") for name in ("sweeps", "stages")}
NAMES = {"sweeps": "my-sweep", "stages": "my-stages"}


def blocks(page: str, kind: str) -> list[str]:
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGES[page], re.M | re.S)
    return [text for name, text in found if name == kind]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with `my-run.yaml` and the first example of each page."""
    folder = tmp_path / "project"
    (folder / "configs/runs").mkdir(parents=True)
    (folder / places.PROJECT_MARKER).touch()
    made = Workspace.make(tmp_path / "made")
    path = made.config(
        "my-run",
        project="my-project",
        training={"steps": 10, "global_batch_size": 16, "micro_batch_size": 4},
    )
    values = {name: value for name, value in yaml_file.read_yaml(path).values.items() if name != "run_dir"}
    (folder / "configs/runs/my-run.yaml").write_text(yaml_file.dump_yaml(values))
    for page, name in NAMES.items():
        (folder / f"configs/runs/{name}.yaml").write_text(blocks(page, "yaml")[0])
    return folder


def environment() -> dict[str, str]:
    return os.environ | {"PATH": path_with_relayrun(), "PYTHONPATH": str(ROOT)}


def bash(project: Path, text: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=project,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )


def test_the_pages_are_short_and_every_block_has_a_test() -> None:
    counts = {page: {kind: len(blocks(page, kind)) for kind in ("yaml", "bash", "")} for page in PAGES}
    assert counts == {"sweeps": {"yaml": 2, "bash": 2, "": 3}, "stages": {"yaml": 3, "bash": 1, "": 0}}
    assert all(len(text.splitlines()) <= 150 for text in PAGES.values())


def runs_of(dry_run: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines of the runs, without those of their checks."""
    return [line for line in dry_run.stdout.splitlines() if "/logs/runs/" in line]


@pytest.mark.slow
def test_the_runs_that_the_examples_mean(project: Path) -> None:
    dry = {page: blocks(page, "bash")[0].splitlines()[0] for page in PAGES}
    shown = {page: bash(project, command) for page, command in dry.items()}
    assert all(done.returncode == 0 for done in shown.values()), shown
    assert [line.split("  ")[2] for line in runs_of(shown["sweeps"])] == [
        "optimizer.lr=0.001",
        "optimizer.lr=0.002",
        "optimizer.lr=0.004",
    ]
    names = [line.split()[0] for line in runs_of(shown["stages"])]
    assert names == ["stable", "decay-10", "decay", "long"]
    sweep = project / "configs/runs/my-sweep.yaml"
    whole = sweep.read_text()
    sweep.write_text("include: [my-run.yaml]\nname: my-sweep\n" + blocks("sweeps", "yaml")[1])
    axes = bash(project, dry["sweeps"])
    assert axes.returncode == 0, axes.stderr
    assert len(runs_of(axes)) == 8
    sweep.write_text(whole.replace("2e-3", "high"))
    refused = bash(project, dry["sweeps"])
    assert refused.returncode == 1
    assert refused.stderr.replace(f"{project}/", "") == blocks("sweeps", "")[1]
    assert not (project / "logs").exists()


@pytest.mark.slow
def test_annealing_on_other_data_is_taken(project: Path) -> None:
    for name in ("web", "best"):
        shutil.copytree(project.parent / "made/data", project / "data" / name)
    mine = project / "configs/runs/my-run.yaml"
    run = yaml_file.read_yaml(mine).values
    run["data"].pop("datasets")
    mine.write_text(yaml_file.dump_yaml(run))
    (project / "configs/runs/my-stages.yaml").write_text(
        "include: [my-run.yaml]\nname: my-stages\n" + blocks("stages", "yaml")[1]
    )
    anneal = bash(project, blocks("stages", "bash")[0].splitlines()[0])
    assert [line.split()[0] for line in runs_of(anneal)] == ["stable", "anneal", "anew"], anneal.stderr
    assert "3 runs, 0 errors" in anneal.stdout


@pytest.mark.long
def test_a_sweep_of_real_runs(project: Path) -> None:
    submit = bash(project, blocks("sweeps", "bash")[0])
    assert submit.returncode == 0, submit.stdout + submit.stderr
    table = submit.stdout[submit.stdout.rindex("run  ") :].splitlines()
    assert table[0].split() == blocks("sweeps", "")[0].splitlines()[0].split()
    runs = [Run(project / f"logs/runs/my-project/my-sweep-{number:02}") for number in (1, 2, 3)]
    assert [sorted(steps(run)) for run in runs] == [list(range(1, 11))] * 3
    assert len({str(steps(run)[10]) for run in runs}) == 3
    print("\n".join(table))
    again = bash(project, blocks("sweeps", "bash")[1])
    assert again.returncode == 0, again.stderr
    assert [len(attempts(run)) for run in runs] == [1, 1, 1]


@pytest.mark.long
def test_stages_of_real_runs(project: Path) -> None:
    submit = bash(project, blocks("stages", "bash")[0])
    assert submit.returncode == 0, submit.stdout + submit.stderr
    print(submit.stdout)
    runs = {name: Run(project / f"logs/runs/my-project/my-stages-{name}") for name in ("stable", "decay-10", "decay")}
    runs["long"] = Run(project / "logs/runs/my-project/my-stages-long")
    wanted = {"stable": range(1, 21), "decay-10": range(11, 16), "decay": range(21, 31), "long": range(31, 41)}
    assert {name: sorted(steps(run)) for name, run in runs.items()} == {name: list(w) for name, w in wanted.items()}
    shutil.rmtree(project / "logs")
