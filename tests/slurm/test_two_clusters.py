"""One project on two clusters, by two ordinary users: other site files, partitions, accounts, a `gres` that must be."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.checkpoint_records import resume_point
from relayrun.control.rundir.run import Run
from tests.workspace import ends

from .cluster import TestCluster
from .test_users import Team, job_of, team

__all__ = ["team"]

pytestmark = [pytest.mark.slurm, pytest.mark.long]

SITES: dict[str, dict[str, Any]] = {
    "east": {"partition": "low", "account": "physics", "gpus_per_node": 2, "sbatch": {"gres": "gpu:2"}},
    "west": {"partition": "high", "account": "biology", "gpus_per_node": 1, "sbatch": {"gres": "gpu:1", "nice": 7}},
}


def demand(cluster: TestCluster, account: str, user: str) -> None:
    """Give the user an account, and have the cluster refuse jobs without a GPU."""
    cluster.conf.write_text(f"{cluster.conf.read_text()}AccountingStorageTRES=gres/gpu\n")
    cluster.stop_ctld()
    cluster.start_ctld()
    name = cluster.run(["scontrol", "show", "config"]).stdout.partition("ClusterName ")[2].split()[1]
    for order in (
        ["add", "account", account, f"Cluster={name}"],
        ["add", "user", user, f"account={account}"],
        ["modify", "qos", "normal", "set", "MinTRESPerJob=gres/gpu=1", "Flags=DenyOnLimit"],
    ):
        cluster.run(["sacctmgr", "--immediate", *order])


@pytest.fixture(scope="module")
def teams(team: Team) -> Iterator[dict[str, Team]]:
    """The team's own cluster, and another one."""
    other = TestCluster(team.folder / "w", nodes=1, gpus=2, accounting=True)
    try:
        other.up()
        demand(team.cluster, "physics", team.owner)
        demand(other, "biology", team.member)
        yield {"east": team, "west": replace(team, cluster=other)}
    finally:
        other.down()


def test_one_project_runs_on_both(teams: dict[str, Team]) -> None:
    home = teams["east"]
    program = home.stand_in("program", "--steps=1000")
    clusters = home.workspace.folder / "clusters"
    clusters.mkdir()
    for name, job in SITES.items():
        site = {"name": name, "scheduler": "slurm", "job": job, "python": str(program), "host_python": home.python}
        job["setup"] = [f'echo "$SLURM_JOB_PARTITION" >"{home.folder}/runs/setup-{name}"']
        (clusters / f"{name}.yaml").write_text(
            yaml_file.dump_yaml(site | {"environment": {"MASTER_ADDR": "127.0.0.1"}})
        )
    config = home.workspace.config(
        "project",
        cluster="east",
        job={"nodes": 1, "ntasks_per_node": 1, "time": "10"},
        training={"steps": 1000, "precision": "bf16"},
        chain={"auto_requeue": True},
    )
    runs: dict[str, Run] = {}
    for name, person in (("east", home.owner), ("west", home.member)):
        own = teams[name]
        runs[name] = own.run(name)
        site = [f"--set=cluster={name}", f"--set=name={name}", f"--set=run_dir={runs[name].path}"]
        none = ["--set=job.sbatch={gres: false}", "--set=job.gpus_per_node=0"]
        refused = own.act(person, own.python, "-m", "relayrun.cli", "submit", config, *site, *none, check=False)
        assert refused.returncode == 1
        assert "error: sbatch: sbatch: error: QOSMinGRES" in refused.stderr, refused
        typo = own.relayrun(person, "submit", config, *site, "--set=job.sbatch={gress: x}", check=False)
        assert "has no option --gress" in typo
        assert "did you mean gres?" in typo
        own.relayrun(person, "submit", config, *site)

    for name, run in runs.items():
        own = teams[name]
        own.wait_iteration(run)
        own.cluster.wait_until(lambda own=own, run=run: len(own.chain(run)) == 2, what="a successor")
        asked = SITES[name]
        for job in own.chain(run):
            known = own.cluster.job(job)
            assert (known["Partition"], known["Account"]) == (asked["partition"], asked["account"])
            assert known["TresPerNode"].replace("gres/", "gres:") == f"gres:{asked['sbatch']['gres']}", known
            assert known.get("Nice") == str(asked["sbatch"].get("nice", 0))
        assert (home.folder / f"runs/setup-{name}").read_text() == f"{asked['partition']}\n"
        assert job_of(run, 1) in own.chain(run)
        own.relayrun(own.owner if name == "east" else own.member, "stop", run.path)
        own.wait_over(run)
        assert [end.cause for end in ends(run)] == ["exit"]
        assert resume_point(run).iteration > 0
