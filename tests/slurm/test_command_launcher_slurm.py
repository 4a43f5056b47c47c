"""A program of the user's own from a Bash launcher, on a real Slurm: the first job prepares it, the chain goes on."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.config.compose import yaml_file
from relayrun.control.chain.requested_options import wished_options
from relayrun.control.rundir import triggers
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from tests.workspace import ends

from .cluster import ROOT, TestCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]

PROGRAM = """
import os, signal, sys, time
asked = []
signal.signal(signal.SIGUSR2, lambda *_: asked.append(1))
folder, last, *resume = sys.argv[1:]
iteration = int(open(os.path.join(resume[0], "state")).read()) if resume else 0
while iteration < int(last):
    iteration += 1
    time.sleep(0.1)
    if os.environ["RANK"] == "0":  # the ranks do not wait for each other: another one may be a step ahead
        print(f"step {iteration} loss={1 / iteration:.4f}", flush=True)
    leave = bool(asked)
    if os.environ["RANK"] == "0" and (leave or iteration % 20 == 0):
        path = os.path.join(folder, f"step-{iteration}")
        os.makedirs(path + ".new", exist_ok=True)
        with open(os.path.join(path + ".new", "state"), "w") as file:
            file.write(str(iteration))
        os.rename(path + ".new", path)
    if leave:
        break
"""


def test_a_command_goes_on_from_its_launcher_to_its_exit(cluster: TestCluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    run, path = Run(tmp_path / "run"), tmp_path / "run.yaml"
    site = {"name": "test", "scheduler": "slurm", "host_python": getattr(sys, "_base_executable", "python3")}
    values = {
        "project": "tests",
        "name": "own",
        "run_dir": str(run.path),
        "trainer": "command",
        "command": {
            "run": ["{python}", str(tmp_path / "train.py"), "{checkpoints}", "100000"],
            "resume": ["{checkpoint}"],
            "checkpoint": {"pattern": "step-{iteration}"},
            "progress": r"step (?P<iteration>\d+) loss=(?P<loss>\S+)",
        },
        "chain": {"auto_requeue": True},
        "job": {"time": "7"},
        "cluster": site | {"environment": {"MASTER_ADDR": "127.0.0.1"}},  # pretended nodes have no addresses
    }
    path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
    settings = {"CONFIG": str(path), "TRAINING_STEPS": "100000", "PYTHON": sys.executable}
    launcher = ROOT / "launchers/submit-demo.sh"  # two nodes with a rank each
    # as inside of `salloc --mem=100 --time=1`, whose variables sbatch hands on
    around = {"SLURM_MEM_PER_NODE": "100", "SLURM_TIMELIMIT": "1", "SLURM_TRES_PER_TASK": "cpu:1", "CDPATH": str(ROOT)}
    settings |= {"HOST_PYTHON": site["host_python"], **around}
    first = cluster.sbatch(["--time=7", "--mem-per-cpu=50", launcher], cwd=tmp_path, env=settings)

    def trains(attempt: int) -> None:
        cluster.wait_until(lambda: any(read_json_lines(run.attempt(attempt).metrics)), timeout=360, interval=0.2)

    trains(1)
    plan = Plan.load(run)
    assert (plan.trainer, plan.total_steps, plan.ntasks) == ("command", 100000, 2)
    begin = run.attempt(1).read_begin()
    assert begin is not None
    assert begin.job_id == first
    assert set(wished_options(run)) == {"mem-per-cpu"}  # the partition and the QOS are the default ones
    cluster.run(["scancel", "--signal=USR2", "--batch", first])  # the header's backstop
    trains(2)
    cut = run.attempt(1).read_end()
    assert cut is not None
    assert cut.cause == "saved"
    second = run.attempt(2).read_begin()
    assert second is not None
    assert second.base_iteration == cut.durable_iteration > 0
    triggers.touch_trigger(run, "exit")

    def over() -> bool:
        return not any(job.name == plan.job_name for job in cluster.queue())

    cluster.wait_until(over, timeout=300, interval=0.5)
    assert [end.cause for end in ends(run)] == ["saved", "exit"]
    assert resume_point(run).iteration > cut.durable_iteration
    lines = [line["iteration"] for line in read_json_lines(run.metrics_view)]
    assert lines == list(range(1, resume_point(run).iteration + 1))
