"""The accounts of a chain on a real Slurm, closed against its own accounting."""

from __future__ import annotations

from pathlib import Path

import pytest

from relayrun.control.rundir.records import AttemptStart
from relayrun.control.rundir.run import Run
from relayrun.watch.goodput.account import NodeTimeAccount, account_for_run
from relayrun.watch.goodput.ledger import MICROSECONDS_PER_SECOND
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.workspace import Workspace

from .cluster import TestCluster
from .conftest import MakeCluster
from .test_chain import SLURM, ends, hurry, logs, start, wait_for_end, wait_for_iteration
from .test_law_slurm import program
from .test_spare_nodes_slurm import without_n1, workspace  # noqa: F401 - the last one is a fixture

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.long]


def accounted(cluster: TestCluster, run: Run) -> NodeTimeAccount:
    """As a person on this cluster sees it."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.env[name])
        return account_for_run(Run(run.path))


def booked(cluster: TestCluster, run: Run) -> list[int]:
    """Node time of the job of each attempt, as Slurm's accounting has it."""
    begins = [AttemptStart.read(run.attempt(number).begin) for number in run.attempt_numbers()]
    ids = [begin.job_id for begin in begins if begin is not None]
    rows = cluster.allocations(f"--jobs={','.join(ids)}", ids=ids, columns=["ElapsedRaw", "NNodes"])
    return [int(row["ElapsedRaw"]) * int(row["NNodes"]) * MICROSECONDS_PER_SECOND for row in rows]


@pytest.mark.usefixtures("accounting")
def test_the_parts_of_a_chain_of_ten_attempts_sum_to_what_sacct_has(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    """They are asked to leave, lose their ranks, and lose their batch script, in turn; the tenth is done."""
    cluster = make_cluster(nodes=4, accounting=True)  # one is left out after three strikes
    run, plan = make_run("--steps=150", "--step-seconds=0.2", "--save-seconds=0.2", total_steps=150, **SLURM)
    start(cluster, run)
    for number in range(1, 10):
        wait_for_iteration(cluster, run, attempt=number)
        begin = AttemptStart.read(run.attempt(number).begin)
        assert begin is not None
        how = (["USR2", "--batch", begin.job_id], ["KILL", f"{begin.job_id}.0"], ["KILL", "--batch", begin.job_id])
        cluster.run(["scancel", "--signal", *how[(number - 1) % 3]])

        def next_began(following: int = number + 1) -> bool:
            if not (begun := run.attempt(following).begin.exists()):
                hurry(cluster, plan)
            return begun

        # a job whose time is changed all the time is never looked at by Slurm's scheduler
        cluster.wait_until(next_began, timeout=600, interval=5, what=f"attempt {number + 1} begins")
    wait_for_end(cluster, run, plan)
    causes = [end.cause for end in ends(run)]
    told = [causes[0::3][:3], causes[1::3], len(causes), causes[-1]]
    assert told == [["saved"] * 3, ["failed"] * 3, 10, "done"], f"{causes}\n{logs(run)}"

    wanted = booked(cluster, run)
    found = accounted(cluster, run)
    print({part: round(amount / MICROSECONDS_PER_SECOND, 1) for part, amount in found.parts.items() if amount})
    assert [stay.allocation.source for stay in found.allocations if stay.attempt is not None] == ["sacct"] * 10
    allocated = [stay.allocated for stay in found.allocations if stay.attempt is not None]
    assert allocated == wanted
    assert sum(found.parts.values()) == found.allocated
    assert found.parts["unknown"] <= 0.01 * found.allocated


@pytest.mark.usefixtures("accounting")
def test_the_parts_of_a_chain_sum_to_what_sacct_has(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    """One attempt is asked to leave, one is killed, one is done. The prolog and job.setup are slow."""
    cluster = make_cluster(nodes=2, accounting=True)
    with cluster.conf.open("a") as conf:
        conf.write(f"Prolog={program(tmp_path, 'prolog', 'sleep 3')}\n")
    cluster.run(["scontrol", "reconfigure"])
    arguments = ("--steps=30", "--step-seconds=0.2", "--start-seconds=0.5", "--save-seconds=0.5")
    run, plan = make_run(*arguments, total_steps=30, setup=["sleep 2"], **SLURM)
    start(cluster, run)
    wait_for_iteration(cluster, run)
    first = AttemptStart.read(run.attempt(1).begin)
    assert first is not None
    cluster.run(["scancel", "--signal=USR2", "--batch", first.job_id])
    wait_for_iteration(cluster, run, attempt=2)
    second = AttemptStart.read(run.attempt(2).begin)
    assert second is not None
    cluster.run(["scancel", "--signal=KILL", f"{second.job_id}.0"])
    cluster.wait_until(run.attempt(2).end.exists, timeout=600)
    hurry(cluster, plan)
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "failed", "done"], logs(run)
    assert second.previous_job_end is not None

    wanted = booked(cluster, run)
    found = accounted(cluster, run)
    assert [stay.allocation.source for stay in found.allocations] == ["sacct"] * 3
    assert [stay.allocated for stay in found.allocations] == wanted
    assert sum(found.parts.values()) == found.allocated
    assert found.parts["unknown"] <= 0.01 * found.allocated
    assert found.parts["redone"] > 0
    for stay in found.allocations:
        assert stay.parts["prolog"] >= 2 * 3 * MICROSECONDS_PER_SECOND, stay.parts
        assert stay.parts["launch"] >= 2 * 2 * MICROSECONDS_PER_SECOND, stay.parts
    assert [(loss.cause, loss.times) for loss in found.losses if loss.lost] == [("failed", 1)]


@pytest.mark.usefixtures("accounting")
def test_a_job_that_lost_a_node_is_booked_as_slurm_books_it(
    make_cluster: MakeCluster,
    workspace: Workspace,  # noqa: F811
) -> None:
    """Its accounting has a row for each number of nodes; the lost one is given up until Slurm notices."""
    cluster = make_cluster(nodes=3, accounting=True, node_timeout=10)
    run, _ = without_n1(cluster, workspace, "fewer", step_seconds=5)  # Slurm needs up to 40 s
    begin = AttemptStart.read(run.attempt(1).begin)
    assert begin is not None
    rows = cluster.allocations(f"--jobs={begin.job_id}", ids=[begin.job_id], columns=["State", "ElapsedRaw", "NNodes"])
    assert [(row["State"], row["NNodes"]) for row in rows] == [("RESIZING", "3"), ("COMPLETED", "2")]
    found = accounted(cluster, run)
    (stay,) = found.allocations
    assert stay.allocated == found.allocated == sum(booked(cluster, run))
    assert 0 < stay.parts["given up"] < 40 * MICROSECONDS_PER_SECOND
    assert stay.parts["step"] == pytest.approx(2 * stay.stepped, abs=5)  # of two nodes all the time


PROLOG = 25.0
"""Seconds of the planted prolog: long enough that a twentieth of it is more than the whole seconds of Slurm's times."""


@pytest.mark.usefixtures("accounting")
def test_a_slow_prolog_is_booked_as_prolog_and_as_nothing_else(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    tmp_path: Path,
) -> None:
    """One node runs one job without a prolog and one with it, which Slurm waits for as it allocates the node."""
    cluster = make_cluster(nodes=1, accounting=True)
    arguments = ("--steps=10", "--step-seconds=0.2", "--start-seconds=0.5", "--save-seconds=0.5")
    parts = {}
    for name, planted in (("without", False), ("with", True)):
        if planted:
            with cluster.conf.open("a") as conf:
                conf.write(f"Prolog={program(tmp_path, 'prolog', f'sleep {PROLOG:.0f}')}\nPrologFlags=Alloc\n")
            cluster.run(["scontrol", "reconfigure"])
        run, plan = make_run(*arguments, folder=name, total_steps=10, **(SLURM | {"nodes": 1}))
        start(cluster, run)
        wait_for_end(cluster, run, plan)
        assert [end.cause for end in ends(run)] == ["done"], logs(run)
        booked(cluster, run)  # until sacct knows the end
        (stay,) = (each for each in accounted(cluster, run).allocations if each.attempt is not None)
        assert stay.allocation.source == "sacct"
        parts[name] = {part: amount / MICROSECONDS_PER_SECOND for part, amount in stay.parts.items()}
    beyond = {
        part: parts["with"].get(part, 0.0) - parts["without"].get(part, 0.0)
        for part in {**parts["with"], **parts["without"]}
    }
    print({part: round(seconds, 2) for part, seconds in beyond.items()})
    assert beyond["prolog"] == pytest.approx(PROLOG, abs=0.05 * PROLOG)
    slack = {"end": 5.0}  # a controller on a busy machine completes a job when it comes to it
    assert all(
        abs(beyond[part]) < 0.05 * PROLOG + 0.5 * parts["without"][part] + slack.get(part, 0.0)
        for part in beyond.keys() - {"prolog"}
    ), beyond


@pytest.mark.usefixtures("accounting")
def test_a_job_that_queues_itself_again_has_its_times_each_time(
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
) -> None:
    cluster = make_cluster(nodes=2, accounting=True)
    run, plan = make_run("--steps=30", "--step-seconds=0.2", total_steps=30, **(SLURM | {"mode": "requeue"}))
    job = start(cluster, run)
    wait_for_iteration(cluster, run)
    cluster.run(["scancel", "--signal=USR2", "--batch", job])
    wait_for_end(cluster, run, plan)
    assert [end.cause for end in ends(run)] == ["saved", "done"], logs(run)
    asked = [
        "sacct",
        "--noheader",
        "--parsable2",
        "--allocations",
        "--duplicates",
        f"--jobs={job}",
        "--format=State,End",
    ]
    cluster.wait_until(lambda: "COMPLETED|2" in cluster.run(asked).stdout, what="sacct knows the last end")
    found = accounted(cluster, run)
    assert [stay.attempt for stay in found.allocations] == [1, 2], cluster.run(asked).stdout
    assert {(stay.allocation.job_id, stay.allocation.source) for stay in found.allocations} == {(job, "sacct")}
    assert found.allocations[0].end <= found.allocations[1].start
    assert all(stay.allocation.ended for stay in found.allocations)
    assert found.parts["unknown"] == 0
    assert found.waited["queued"] > 0
