"""Run directories with a long past, and what `begin` and `end` of a chain cost there, as processes of their own."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.config.sections.chain import ChainSection
from relayrun.control.chain import job_script
from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import Plan, chain_job_name
from relayrun.control.rundir.records import AttemptEnd, AttemptOutcome, AttemptStart, CheckpointCommit
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.local_queue import JOB_ID_VARIABLE, LocalJob, LocalQueue

ROOT = Path(__file__).resolve().parents[1]

STEP = (
    '{{"iteration": {0}, "loss": 3.2147653102874756, "grad_norm": 0.8127365112304688, "lr": 0.00029871, '
    '"consumed_samples": {0}, "consumed_tokens": {0}, "global_batch_size": 512, "tokens_per_second": 412345.6789, '
    '"step_seconds": 5.0863418579, "data_seconds": 0.0003, "forward_backward_seconds": 5.01, '
    '"optimizer_seconds": 0.07, '
    '"save_seconds": 0.0, "model_tflops_per_gpu": 412.345, "mfu": 0.41, "memory_bytes": 71234567890, '
    '"time": 1763790000.123, "skipped": null}}\n'
)

MEASURED = """
import atexit, json, os, resource, runpy, sys
target, run, arguments = sys.argv[1], sys.argv[2], sys.argv[3:]
opened = []
def look(event, details):
    if event == "open" and isinstance(details[0], (str, bytes)):
        path = os.fsdecode(details[0])
        if path.startswith(run):
            opened.append(path)
def tell():
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    found = list(opened)
    with open("/proc/self/status") as status:  # ru_maxrss goes over exec: it would be that of who started this
        peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM:"))
    with open(target, "w") as file:
        json.dump({
            "cpu_seconds": sum(each.ru_utime + each.ru_stime for each in used),
            "peak_mb": peak / 1024,
            "opened": found,
        }, file)
atexit.register(tell)
sys.addaudithook(look)
sys.argv = ["relayrun.control.chain", *arguments]
runpy.run_module("relayrun.control.chain", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one process cost.

    `opened`: every file or folder below the run directory as often as it was opened, or tried to be; without `local/`,
    the queue that stands in for Slurm's controller.
    """

    cpu_seconds: float
    peak_mb: float
    opened: list[str]

    @property
    def distinct(self) -> int:
        return len(set(self.opened))

    def figures(self) -> dict[str, float]:
        """Numbers alone."""
        return {
            "cpu_seconds": self.cpu_seconds,
            "peak_mb": self.peak_mb,
            "opened": len(self.opened),
            "distinct": self.distinct,
            "opened_again": len(self.opened) - self.distinct,
        }


def history_plan(run: Run, *, total_steps: int, package_root: Path = ROOT) -> Plan:
    """The plan of a run with one node on this machine, whose ranks do nothing."""
    return Plan(
        run="tests/history",
        job_name=chain_job_name("tests", "history", run.path),
        scheduler="local",
        total_steps=total_steps,
        config_revision=1,
        submitted_after_attempt=0,
        chain=ChainSection(
            auto_requeue=True, fallback_job=False, node_health="off", hang_timeout=600, start_timeout=600
        ),
        time_limit=3600,
        grace_period=60.0,
        min_grace_period=30.0,
        max_grace_period=1800.0,
        signal_seconds=30,
        nodes=1,
        ntasks_per_node=1,
        cpus_per_task=1,
        sbatch_options={},
        srun_options=[],
        command_prefix=[],
        program=["true"],
        environment={},
        modules=[],
        host_python=sys.executable,
        package_root=str(package_root),
        log_folder=str(run.path.parent / "logs"),
    )


def make_history(folder: Path, *, lines: int, attempts: int, package_root: Path = ROOT) -> Run:
    """A run of so many attempts with so many metrics lines over all, two saves each; the next job runs already."""
    run = Run(folder)
    run.path.mkdir(parents=True)
    triggers.create_trigger_folder(run)
    run.checkpoints.mkdir()
    each = lines // attempts
    plan = history_plan(run, total_steps=10 * lines, package_root=package_root)
    plan.write(run.plan)
    run.job_script.write_text(job_script.job_script(plan, run))
    queue = LocalQueue(run.path / "local")
    job = LocalJob(
        id="",
        name=plan.job_name,
        script=str(run.job_script),
        log_folder=plan.log_folder,
        time_limit=3600,
        signal_seconds=30,
        eligible_time=0.0,
        state="RUNNING",
        pid=os.getpid(),
        start_time=time.time(),
        end_time=time.time() + 3600,
    )
    queue.add(job)
    for number in range(1, attempts + 1):
        began(run, number, base=each * (number - 1))
        trained(run, number, each * (number - 1), each * number)
        ended(run, number, base=each * (number - 1), durable=each * number)
    with open(run.metrics_view, "wb") as view:  # as it was kept by every version
        for number in range(1, attempts + 1):
            view.write(run.attempt(number).metrics.read_bytes())
    with open(run.attempts_view, "w") as view:
        for number in range(1, attempts + 1):
            row = json.loads(run.attempt(number).begin.read_text()) | json.loads(run.attempt(number).end.read_text())
            view.write(json.dumps(row) + "\n")
    return run


def began(run: Run, number: int, *, base: int = 0, **changes: Any) -> AttemptStart:
    """Open an attempt by hand; `changes` are other values of its record."""
    values: dict[str, Any] = {
        "attempt": number,
        "job_id": "1",
        "job_name": "j",
        "nodes": "localhost",
        "config_revision": 1,
        "base_iteration": base,
        "base_path": str(run.checkpoint(base)) if base else None,
        "start_time": 1e9 + number,
        "job_end_time": None,
        "grace_period": 60.0,
    }
    record = AttemptStart(**(values | changes))
    run.attempt(number).path.mkdir(parents=True, exist_ok=True)
    record.write(run.attempt(number).begin)
    if not run.attempt(number).secret.exists():
        run.attempt(number).make_secret()
    return record


def trained(run: Run, number: int, base: int, last: int) -> None:
    """The attempt goes from after `base` to `last`, which it saves, and leaves."""
    attempt = run.attempt(number)
    with open(attempt.metrics, "a") as file:
        file.writelines(STEP.format(iteration) for iteration in range(base + 1, last + 1))
    for iteration in sorted({(base + last) // 2, last} - {base}):
        folder = run.checkpoint(iteration)
        folder.mkdir()
        (folder / "data").write_bytes(b"12345")
        attempt.append_commit(
            CheckpointCommit(
                iteration=iteration,
                path=str(folder),
                consumed_samples=iteration,
                time=1e9 + number,
                seconds=12.5,
                files={"data": 5},
            )
        )
    AttemptOutcome(outcome="saved", reason="time limit near", iteration=last, time=1e9 + number).write(attempt.outcome)


def ended(run: Run, number: int, *, base: int, durable: int, no_time: bool = False) -> None:
    AttemptEnd(
        attempt=number,
        cause="saved",
        reason="time limit near",
        exit_code=0,
        durable_iteration=durable,
        progress=durable > base,
        end_time=1e9 + number,
        action="continue",
        no_time=no_time,
    ).write(run.attempt(number).end)


@contextmanager
def queue_is_run(run: Run) -> Iterator[None]:
    """As if a terminal ran the local queue, so that the job that is said to run counts as alive."""
    with open(run.path / "local" / "runner.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def cost(run: Run, *arguments: str, package_root: Path = ROOT) -> Cost:
    """What `python -m relayrun.control.chain` with these arguments costs; it must succeed."""
    with tempfile.NamedTemporaryFile(suffix=".json") as target, queue_is_run(run):
        done = subprocess.run(
            [sys.executable, "-c", MEASURED, target.name, str(run.path), *arguments, f"--run-dir={run.path}"],
            env=os.environ
            | {
                "PYTHONPATH": str(package_root),
                "PYTHONSAFEPATH": "1",
                JOB_ID_VARIABLE: "1",
                "PYTHONDONTWRITEBYTECODE": "",
            },
            capture_output=True,
            text=True,
            cwd="/",
            timeout=600,
        )
        if done.returncode != 0:
            raise AssertionError(f"{arguments}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
        found = json.loads(Path(target.name).read_text())
    return Cost(
        cpu_seconds=found["cpu_seconds"],
        peak_mb=found["peak_mb"],
        opened=[name for path in found["opened"] if not (name := os.path.relpath(path, run.path)).startswith("local")],
    )
