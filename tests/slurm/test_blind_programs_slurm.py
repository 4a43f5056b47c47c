"""The programs of `test_local_blind_programs`, which really fail, as jobs of a real Slurm."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.chain import jobs
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.watch.why import explain
from tests.chain.conftest import make_relay
from tests.chain.test_local_blind_programs import PROGRAMS, UNKNOWN
from tests.watch.test_blind_failures import Case, judge

from .cluster import TestCluster
from .conftest import MakeCluster
from .test_chain import SLURM, ends

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(900)]

AT_ONCE = 3


@pytest.fixture(scope="module")
def cluster(make_cluster: MakeCluster) -> TestCluster:
    return make_cluster(nodes=AT_ONCE)


def make_job(top: Path, case: Case) -> tuple[Run, Plan]:
    """A run of one job, on a node of its own, of which the program is the case's script."""
    (top / "work").mkdir(parents=True)
    (top / "logs").mkdir()
    (top / "work/train.sh").write_text(case[3])
    start = f"cd {top}/work; export PATH={Path(sys.executable).parent}:$PATH; exec bash train.sh"
    chain = ChainSection(auto_requeue=False, fallback_job=False, node_health="off", start_timeout=300)
    settings = {"total_steps": None, "trainer": "command", "ntasks_per_node": 1, "cpus_per_task": 8, "nodes": 1}
    return make_relay(top, **(SLURM | settings), chain=chain, trainer_settings={"run": ["bash", "-c", start]})


@pytest.mark.parametrize("first", range(0, len(PROGRAMS), AT_ONCE))
def test_the_first_cause_of_programs_that_really_fail(
    cluster: TestCluster, first: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in cluster.env.items():
        monkeypatch.setenv(name, value)
    runs = {case: make_job(tmp_path / case[0], case) for case in PROGRAMS[first : first + AT_ONCE]}
    for run, plan in runs.values():
        jobs.queue_first_job(run, plan, scheduler_for_plan(plan, run))
    cluster.wait_until(lambda: all(ends(run) for run, _ in runs.values()), timeout=600, interval=1, what="their ends")
    for case, (run, _) in runs.items():
        found = explain(run, 1)
        if case[0] in UNKNOWN and "these names do not resolve" in found.quote:
            continue  # names of nodes of a test cluster
        expected = "unknown" if case[0] in UNKNOWN else "right"
        assert judge(case, found) == expected, (case[0], found.whose, found.certainty, found.quote)
