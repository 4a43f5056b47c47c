from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from relayrun.config.sections.chain import ChainSection
from relayrun.control.chain import job_script
from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import Plan, chain_job_name
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE
from tests.history import make_history, queue_is_run
from tests.plans import plan_with

PROGRAM = Path(__file__).with_name("relay_program.py")
ROOT = Path(__file__).resolve().parents[2]

MakeRun = Callable[..., tuple[Run, Plan]]


def make_relay(top: Path, *arguments: str, folder: str = "run", **changes: object) -> tuple[Run, Plan]:
    """Prepare a run directory in `top` whose ranks are the stand-in program; keyword arguments override the plan."""
    run = Run(top / folder)
    run.path.mkdir(parents=True, exist_ok=True)
    triggers.create_trigger_folder(run)
    values: dict[str, object] = {
        "run": "test/chain",
        "job_name": chain_job_name("test", "chain", run.path),
        "scheduler": "local",
        "total_steps": 20,
        "config_revision": 1,
        "submitted_after_attempt": 0,
        "chain": ChainSection(auto_requeue=True, fallback_job=False, node_health="off", start_timeout=300),
        "time_limit": 600,
        "grace_period": 1.0,
        "min_grace_period": 1.0,
        "max_grace_period": 1.0,
        "signal_seconds": 1,
        "nodes": 1,
        "ntasks_per_node": 2,
        "cpus_per_task": 1,
        "sbatch_options": {},
        "srun_options": [],
        "command_prefix": [],
        "program": [sys.executable, str(PROGRAM), f"--run-dir={run.path}", *arguments],
        "environment": {},
        "modules": [],
        "host_python": sys.executable,
        "package_root": str(ROOT),
        "log_folder": str(top / "logs"),
    }
    if "grace_period" in changes:
        values |= {"min_grace_period": changes["grace_period"], "max_grace_period": changes["grace_period"]}
    plan = plan_with(Plan(**values), **changes)  # type: ignore[arg-type]
    plan.write(run.plan)
    run.job_script.write_text(job_script.job_script(plan, run))
    run.fallback_script.write_text(job_script.fallback_script(plan, run))
    return run, plan


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """`make_relay` in the folder of the test."""
    return partial(make_relay, tmp_path)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Three attempts of a hundred iterations, and a job that has just begun: this process."""
    made = make_history(tmp_path / "run", lines=300, attempts=3)
    monkeypatch.setenv(JOB_ID_VARIABLE, "1")
    with queue_is_run(made):
        yield made


def fast_package(folder: Path) -> Path:
    """The package, with a batch script that waits less between two tries."""
    root = folder / "root"
    root.mkdir()
    (root / "relayrun").symlink_to(ROOT / "relayrun")
    (root / "launchers/lib").mkdir(parents=True)
    for script in (ROOT / "launchers/lib").iterdir():
        text = (
            script.read_text().replace("for pause in 2 10 30 0", "for pause in 0 0").replace("sleep 5 &", "sleep 0.2 &")
        )
        (root / "launchers/lib" / script.name).write_text(text)
    return root
