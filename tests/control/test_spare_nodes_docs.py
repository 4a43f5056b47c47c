"""What docs/how-to/spare-nodes.md says is there, and what is refused."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from relayrun.cli import main
from relayrun.config.compose import resolve
from relayrun.control.chain import job_script
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.slurm import Slurm
from relayrun.control.scheduler.slurm_nodes import SlurmNodes
from relayrun.errors import ConfigError
from relayrun.submit.run_plan import make_plan
from tests.workspace import Workspace

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/how-to/spare-nodes.md").read_text(encoding="utf-8")
SLURM = {"name": "test", "scheduler": "slurm", "python": "/opt/python"}
SPARE: dict[str, Any] = {"chain": {"recovery": "node"}, "job": {"nodes": 2, "spare_nodes": 1}}


def block(kind: str, number: int = 0) -> str:
    """The block of this kind with this number on the page, from 0 on."""
    return str(re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.M | re.S)[number])


def test_the_page_is_short_and_its_config_is_one(tmp_path: Path) -> None:
    assert len(PAGE.splitlines()) <= 150
    path = Workspace.make(tmp_path).config("run", cluster=SLURM, training={"global_batch_size": 16})
    (tmp_path / "whole.yaml").write_text(f"include: ['{path}']\n{block('yaml')}", encoding="utf-8")
    config = resolve.load_run_config(tmp_path / "whole.yaml")
    assert (config.job.nodes, config.job.spare_nodes) == (4, 1)


@pytest.mark.slow
def test_its_command_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(shlex.split(block("bash"))[1:]) == 0
    assert "spare_nodes" in capsys.readouterr().out


def test_the_job_asks_for_all_nodes_and_outlives_the_loss_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Workspace.make(tmp_path).config("run", **SPARE, cluster=SLURM)
    run = Run(tmp_path / "run")
    plan = make_plan(resolve.load_run_config(path), run, tmp_path, revision=1)
    assert (plan.nodes, plan.spare_nodes, plan.ntasks) == (2, 1, 2 * plan.ntasks_per_node)
    lines = job_script.job_script(plan, run).splitlines()
    assert {"#SBATCH --nodes=3", "#SBATCH --no-kill"} <= set(lines)
    monkeypatch.setattr(SlurmNodes, "expand", lambda _self, _nodes: ["n0", "n1", "n2"])
    launch = Slurm().rank_launch(
        plan, Job(id="7", name="x", state="RUNNING", nodes="n[0-2]", num_nodes=3), leave_signal=None
    )
    assert list(launch.nodes) == ["n0", "n1", "n2"]
    assert {"--overlap", "--nodes=1", "--ntasks=1"} <= set(launch.command)
    where = [f"--run-dir={run.path}", "--attempt=1"]
    program = job_script.rank_program(plan, [*plan.program, "--attempt=1"], where=where)
    setup = run.attempt(1).setup
    words = job_script.task_command(plan, launch.command, program, setup=setup, nodes=launch.nodes)
    host = ["python3", f"{plan.package_root}/launchers/lib/run_module.py"]
    assert words[:7] == [
        *host,
        "relayrun.control.agent.step_per_node",
        *where,
        "--nodes=n0,n1,n2",
        "--",
    ]
    assert words[-7:] == ["--", *host, "relayrun.control.chain", "orphaned", *where]
    assert words.index("srun") == 7
    without = make_plan(
        resolve.load_run_config(Workspace.make(tmp_path / "without").config("run", cluster=SLURM)),
        run,
        tmp_path,
        revision=1,
    )
    assert "#SBATCH --no-kill" not in job_script.job_script(without, run).splitlines()


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"chain": {"recovery": "job"}}, "set chain.recovery=node"),
        ({"cluster": {"scheduler": "local"}}, "scheduler local has one machine"),
        (
            {"cluster": {"container": {"runtime": "apptainer", "image": "/images/x.sif"}}},
            "set cluster.container.runtime=none",
        ),
        ({"job": {"nodes": 2, "spare_nodes": -1}}, "spare_nodes"),
        ({"job": {"sbatch": {"no-kill": True}}}, "set job.spare_nodes"),
    ],
)
def test_what_cannot_work_is_refused_with_the_setting_to_change(
    tmp_path: Path, sections: dict[str, Any], words: str
) -> None:
    cluster = SLURM | sections.get("cluster", {})
    path = Workspace.make(tmp_path).config("run", **(SPARE | sections | {"cluster": cluster}))
    with pytest.raises(ConfigError) as refused:
        resolve.load_run_config(path)
    assert words in str(refused.value)
