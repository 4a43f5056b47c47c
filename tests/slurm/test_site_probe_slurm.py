"""`relayrun site probe` finds what a site's submit plugin does, and what a person may do with a job."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from relayrun.cli import main

from .conftest import MakeCluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

PLUGIN = """
function slurm_job_submit(job, partitions, uid)
  if job.partition ~= nil then
    slurm.log_user("Please do not give a partition")
    return slurm.ERROR
  end
  job.partition = "debug"
  job.time_limit = 4
  return slurm.SUCCESS
end

function slurm_job_modify(job, known, partitions, uid)
  return slurm.SUCCESS
end
"""
SITE = (
    "# a comment\nname: test\nscheduler: slurm\nmodules: [nosuch]\nprobed:\n  clocks: [n9]\njob: {partition: debug}\n"
)


@pytest.mark.parametrize("rewrites", [False, True])
def test_a_site_is_measured(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rewrites: bool
) -> None:
    cluster = make_cluster()
    if rewrites:
        (cluster.conf.parent / "job_submit.lua").write_text(PLUGIN)
        with cluster.conf.open("a") as conf:
            conf.write("JobSubmitPlugins=lua\n")
        cluster.stop_ctld()
        cluster.start_ctld()
        cluster.wait_until(
            lambda: all(cluster.node_state(f"n{each}") == "IDLE" for each in range(4)), what="idle nodes"
        )
    for name in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(name, cluster.env[name])
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    site = tmp_path / "here.yaml"
    site.write_text(SITE)
    assert main(["site", "probe", "--cluster", str(site), "--directory", str(tmp_path), "--queue", "5"]) == 0
    found = yaml.safe_load(site.read_text())
    probed = found.pop("probed")
    assert found == {key: value for key, value in yaml.safe_load(SITE).items() if key != "probed"}
    assert site.read_text().startswith("# a comment\n")
    assert (probed.get("refused"), probed.get("rewritten")) == ((["partition"], ["time"]) if rewrites else (None, None))
    assert probed["modules"] == ["nosuch"]
    assert "NCCL_DEBUG" in probed["variables"]
    assert not {"denied", "clocks", "cancelled_step"} & probed.keys(), probed
    assert "by-name" not in probed.get("misplaced", [])
    cluster.wait_until(lambda: not cluster.queue(), timeout=60, what="an empty queue")
