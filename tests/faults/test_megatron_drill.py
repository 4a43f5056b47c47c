"""Rows of the drill around real checkouts of Megatron-LM on a real Slurm: those whose fault comes from outside.

The program need not know of a fault for the chain to survive it. Faults inside a save that relayrun's own program
stages, and those that a hook injects, have no place here.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.slurm import Slurm
from relayrun.control.trainers import megatron_lm_log
from relayrun.control.trainers.megatron_lm_log import MegatronDialect
from relayrun.lab.faults import experiment
from relayrun.lab.faults.table import Fault
from tests.chain.conftest import MakeRun, make_run  # noqa: F401 - a fixture
from tests.chain.test_local_chain import run_chain
from tests.checkouts import ENVIRONMENT, as_one_attempt, checkout_of, plan
from tests.faults.cluster_faults import (
    FAULTS_BY_NAME,
    ClusterFault,
    ControlledTarget,
    wrapper_marker,
    write_wrappers,
)
from tests.slurm.conftest import MakeCluster
from tests.slurm.test_chain import SLURM, logs
from tests.slurm.test_megatron_slurm import ranks
from tests.workspace import ends, steps

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.timeout(3000)]

STEPS = 40
ROWS = [
    "rank-killed",
    "batch-script-killed",
    "batch-script-killed-requeue",
    "crash-loop",
    "rank-stopped",
    "latest-torn",
    "tracker-missing",
    "cancelled",
    "cancelled-unseen",
    "preempted",
    "preempted-requeue",
    "node-lost",
    "controller-down-at-submission",
    "controller-down-at-exit",
    "supervisor-missing",
    "watch-killed",
    "watch-blind",
    "end-killed",
    "begin-killed",
    "batch-script-killed-at-begin",
    "successor-cancelled",
    "view-unreadable",
    "module-missing",
]
SAYS = {"ranks 1 did not answer": "no progress for"}
"""Other words about a program without stacks."""
CAUSES = {"preempted": ("saved|failed", "done"), "preempted-requeue": ("saved|failed", "done")}
"""Slurm preempts with SIGTERM, which ends a program that leaves on another signal: it goes on from its checkpoint."""
FAILS = {"crash-loop": "0"}
"""At which iteration of an attempt a program fails, for rows whose hook has it raise."""


class MegatronTarget(ControlledTarget):
    """Reaches the ranks of Megatron-LM."""

    def rank_pids(self, job_id: str) -> dict[int, int]:
        return ranks(self.run)


def changes(fault: Fault) -> dict[str, Any]:
    """Return the changes of a row's run config, as values of the plan."""
    found: dict[str, Any] = {}
    for section, values in fault.config.items():
        for name, value in values.items():
            if (section, name) == ("job", "partition"):
                found["sbatch_options"] = {"partition": value}
            elif name == "hang_timeout":
                found[name] = 30.0  # no step of a busy machine takes as long
            else:
                found[name] = value
    return found


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[MegatronDialect, MakeRun], Run]:
    """The undisturbed run of a dialect, on one machine, made when it is first needed."""
    made: dict[MegatronDialect, Run] = {}

    def get(dialect: MegatronDialect, make: MakeRun) -> Run:
        if dialect not in made:
            folder = tmp_path_factory.mktemp("undisturbed")
            whole = plan(checkout_of(dialect), folder, steps=STEPS, log_folder=str(folder / "logs"))
            run, found = make(folder=str(folder / "run"), **whole)
            run_chain(run, found)
            assert [end.cause for end in ends(run)] == ["done"]
            made[dialect] = run
        return made[dialect]

    return get


@pytest.mark.parametrize("dialect", list(MegatronDialect), ids=lambda dialect: dialect.value)
@pytest.mark.parametrize("name", ROWS)
def test_a_chain_survives_or_stops_with_a_reason(
    name: str,
    dialect: MegatronDialect,
    make_cluster: MakeCluster,
    make_run: MakeRun,  # noqa: F811
    reference: Callable[[MegatronDialect, MakeRun], Run],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fault, checkout = FAULTS_BY_NAME[name], checkout_of(dialect)
    commands = fault.commands if isinstance(fault, ClusterFault) else {}
    whole = reference(dialect, make_run) if fault.expect == "resumed" else None
    cluster = make_cluster(grace=60, node_timeout=10 if name.startswith("node-lost") else 120)
    environment = {"MASTER_ADDR": "127.0.0.1"} | ({"MEGATRON_ON_CPU_FAIL": FAILS[name]} if name in FAILS else {})
    if commands:  # the checkout's own PATH would hide them from what runs behind the attempt's environment
        environment["PATH"] = f"{tmp_path / 'bin'}:{ENVIRONMENT['PATH']}"
    on_slurm = {key: SLURM[key] for key in ("scheduler", "nodes", "ntasks_per_node")}
    settings = on_slurm | {"fallback_job": True, "auto_requeue": True} | changes(fault)
    if "python3" in commands:
        settings["host_python"] = "python3"
    slow = "12:1.5" if name.startswith("node-lost") else "12:0.5"
    values = plan(checkout, tmp_path, steps=STEPS, interval=10, slow=slow, environment=environment, **settings)
    run, _ = make_run(**values)
    write_wrappers(commands, tmp_path, search=cluster.env["PATH"], real={})
    (tmp_path / "logs").mkdir(exist_ok=True)
    paths = f"{tmp_path / 'bin'}:{cluster.env['PATH']}" if commands else cluster.env["PATH"]
    cluster.sbatch([run.job_script], env={"PATH": paths})
    try:
        for variable in ("SLURM_CONF", "PATH"):  # of Slurm's commands that the stage runs
            monkeypatch.setenv(variable, cluster.env[variable])
        stage = MegatronTarget(run=run, commands=tmp_path, slurm=Slurm(), control=cluster, patience=4)
        if name == "latest-torn":  # its folder is there before its files are
            stage.wait(lambda: megatron_lm_log.tracked_iteration(run.checkpoints) == 20)
        fault.act(stage)
        experiment.wait_for_end(stage)
    finally:
        cluster.down()
    records = ends(run)
    said = "\n".join([record.reason for record in records] + [run.stop.read_text() if run.stop.exists() else ""])
    causes = [record.cause for record in records]
    expected = CAUSES.get(name, fault.causes)
    assert len(causes) == len(expected), said + logs(run)
    assert all(cause in wanted.split("|") for cause, wanted in zip(causes, expected, strict=True)), said + logs(run)
    assert SAYS.get(fault.says, fault.says) in said
    assert fault.logged in logs(run)
    if commands:
        assert wrapper_marker(tmp_path).exists()
    if whole is None:
        assert run.stop.exists()
    else:
        assert sorted(steps(run)) == list(range(1, STEPS + 1))
        assert as_one_attempt(run, whole) == steps(whole)
