"""Every fault of the drill and of a test cluster on a real Slurm, with the real training program on two nodes."""

from __future__ import annotations

import fcntl
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from relayrun.control.rundir import restarts
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm import Slurm
from relayrun.lab.faults.experiment import RUN_STEPS, FaultSite
from relayrun.lab.faults.table import UNDISTURBED, Fault
from relayrun.submit.run_plan import log_folder
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.goodput.attribution import MICROSECONDS_PER_SECOND
from tests import warm
from tests.checkpoints import assert_same_bytes
from tests.faults.cluster_faults import FAULTS, FAULTS_BY_NAME, LocalTarget, run_fault
from tests.slurm.cluster import TestCluster
from tests.slurm.conftest import MakeCluster

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def drill_site(cluster: TestCluster, folder: Path, *, fault: Fault | None = None, recovery: str = "job") -> FaultSite:
    """With what a row is done on a test cluster, whose nodes are all this machine."""
    for name in ("SLURM_CONF", "PATH", "HOME"):  # for Slurm's commands of this process; see the fixture `environment`
        os.environ[name] = cluster.env[name]
    # the long rows look at Slurm's tree of processes
    python = sys.executable if fault and fault.long else warm.python()
    values = {"name": "test", "scheduler": "slurm", "environment": {"MASTER_ADDR": "127.0.0.1"}, "python": python}
    return FaultSite(
        folder=folder,
        cluster=values,
        step_seconds=0.05,
        changes={"chain": {"recovery": recovery}},
        slurm=Slurm(),
        target=LocalTarget,
        patience=4,
        environment=cluster.env,
    )


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's commands of this process go to a test cluster, and to none behind the test."""
    for name in ("SLURM_CONF", "PATH", "HOME"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


@pytest.fixture(scope="session")
def reference(slurm: None, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The undisturbed run, of the first worker that needs it, for all."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "drill-reference"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            cluster = TestCluster(tmp_path_factory.mktemp("slurm"))
            with pytest.MonkeyPatch.context() as patch:
                for name in ("SLURM_CONF", "PATH", "HOME"):
                    patch.setenv(name, os.environ.get(name, ""))
                cluster.up()
                try:
                    result = run_fault(drill_site(cluster, folder), cluster, UNDISTURBED)
                finally:
                    cluster.down()
            assert result.passed, result.wrong
            (folder / "done").touch()
    return Run(folder / "runs" / UNDISTURBED.name)


EVERY_TIME = ("rank-killed", "batch-script-killed")
"""Faults of `make test`; `make test-long` has all of them."""


@pytest.mark.parametrize(
    "fault",
    [pytest.param(fault, id=fault.name, marks=[pytest.mark.long] * (fault.name not in EVERY_TIME)) for fault in FAULTS],
)
def test_a_chain_survives_or_stops_with_a_reason(
    fault: Fault, make_cluster: MakeCluster, reference: Run, tmp_path: Path
) -> None:
    drill(fault, make_cluster, reference, tmp_path)


AGAIN = ("rank-killed", "rank-stopped", "killed-while-staging", "latest-torn", "tracker-missing")
"""Rows whose ranks agents start again inside their job."""
AS_WITHOUT = (
    "batch-script-killed",
    "crash-loop",
    "crash-after-progress",
    "loss-nan",
    "rank-asleep",
    "setup-fails",
    "python-missing",
    "cancelled",
    "preempted",
    "node-lost",
    "controller-down-at-exit",
)
"""Rows that end with agents as they do without."""


@pytest.mark.long
@pytest.mark.parametrize("name", [*AGAIN, *AS_WITHOUT])
def test_a_chain_with_agents_survives_or_stops_with_a_reason(
    name: str, make_cluster: MakeCluster, reference: Run, tmp_path: Path
) -> None:
    fault = FAULTS_BY_NAME[name]
    if name in AGAIN:
        fault = replace(fault, causes=("done",), says="")
    run = drill(fault, make_cluster, reference, tmp_path, recovery="node")
    assert any(failed.again for failed in restarts.read_failed_restarts(run.attempt(1))) or name not in AGAIN


@pytest.mark.long
@pytest.mark.usefixtures("accounting")
@pytest.mark.parametrize("name", FAULTS_BY_NAME)
def test_the_account_of_a_chain_is_closed_against_sacct(
    name: str, make_cluster: MakeCluster, reference: Run, tmp_path: Path
) -> None:
    """Whatever happens to it: the parts sum to what Slurm booked, and of no more than a hundredth it is unknown what
    it went to."""
    drill(FAULTS_BY_NAME[name], make_cluster, reference, tmp_path, accounting=True)


def drill(
    fault: Fault,
    make_cluster: MakeCluster,
    reference: Run,
    folder: Path,
    *,
    recovery: str = "job",
    accounting: bool = False,
) -> Run:
    """Let the fault happen to a chain, and see that it ends as the table says.

    `accounting`: compare the node time that the run's account has with that of Slurm's accounting, too.
    """
    node_timeout = 10 if fault.name.startswith("node-lost") else 120
    cluster = make_cluster(grace=30, node_timeout=node_timeout, accounting=accounting)
    site = drill_site(cluster, folder, fault=fault, recovery=recovery)
    run = site.run(fault.name)
    run.path.parent.mkdir()
    (run.path.parent / UNDISTURBED.name).symlink_to(reference.path)
    try:
        result = run_fault(site, cluster, fault)
        if accounting:
            assert_closed(cluster, run)
    finally:
        cluster.down()
    said = "\n".join(
        log.read_text(errors="replace")[-4000:] for log in sorted(log_folder(run).glob(f"{Plan.load(run).job_name}-*"))
    )
    assert result.passed, f"{result.wrong}\n{result.said}\n{said}"
    if fault.expect == "resumed":  # as torch reads them, not by their hashes
        assert result.bit_for_bit
        assert assert_same_bytes(reference.checkpoint(RUN_STEPS), run.checkpoint(RUN_STEPS)) > 50
    return run


def assert_closed(cluster: TestCluster, run: Run) -> None:
    """The node time of a run sums to what sacct has, within a hundredth or a second for each attempt and node."""
    ids = {begin.job_id for number in run.attempt_numbers() if (begin := run.attempt(number).read_begin()) is not None}
    which = (f"--name={Plan.load(run).job_name}", "--starttime=now-1day")
    rows = cluster.allocations(*which, ids=ids, columns=["ElapsedRaw", "NNodes"])
    found = account_for_run(Run(run.path))
    booked = sum(int(row["ElapsedRaw"]) * int(row["NNodes"]) for row in rows)
    seconds = {part: round(amount / MICROSECONDS_PER_SECOND, 2) for part, amount in found.parts.items() if amount}
    said = f"sacct: {rows}\nbooked: {seconds}"
    print(said)
    nodes = sum(int(row["NNodes"]) for row in rows)
    assert sum(found.parts.values()) == found.allocated
    assert abs(found.allocated / MICROSECONDS_PER_SECOND - booked) <= max(0.01 * booked, nodes), said
    assert found.parts["unknown"] <= max(0.01 * found.allocated, nodes * MICROSECONDS_PER_SECOND), said
