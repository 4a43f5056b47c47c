"""One fault test: submit a run as a user does, inject the fault, wait for the end, judge the result."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.config.compose import yaml_file
from relayrun.control.chain.jobs import cancel_chain
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError, RelayrunError, RunDirError, SchedulerError
from relayrun.files import last_bytes
from relayrun.lab.compare_runs import checkpoint_differences, loss_differences
from relayrun.lab.faults.table import UNDISTURBED, Fault
from relayrun.lab.faults.target import ClusterUnderTest, FaultNotInjected
from relayrun.lab.small_run import random_data, run_config_values, run_in, start_submit, write_config
from relayrun.submit.run_plan import log_folder
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.goodput.ledger import LOST_PARTS, MICROSECONDS_PER_SECOND, START_PARTS

COMMON_SETTINGS = yaml_file.read_yaml(Path(__file__).with_name("run.yaml")).values
RUN_STEPS: int = COMMON_SETTINGS["training"]["steps"]
INJECTION_HOOK = "relayrun.lab.faults.injection:FaultInjectionHook"
LOG_BYTES_READ = 16 << 20
"""Bytes read from the end of a job's log."""
QUEUE_POLL_SECONDS = 1.0
"""Interval between two queries of the queue."""
WAIT_FACTOR = 5.0
"""Factor on the waits of a fault: nodes and file systems of a cluster are slower than one machine."""
CONTROLLER_AWAY_SECONDS = 900.0
"""Silence of the controller after which a test is given up."""


@dataclass(frozen=True, kw_only=True)
class FaultSite:
    """A cluster, a folder on a file system of all its nodes, and the time limits of a drill there."""

    folder: Path
    """Contains `runs`, `configs` and `data`."""
    cluster: Mapping[str, Any]
    """Section `cluster` of the run configs: the site's file."""
    slurm: Slurm
    target: Callable[..., ClusterUnderTest] = ClusterUnderTest
    nodes: int = 2
    minutes: int = 10
    """Time limit of a job."""
    step_seconds: float = 1.0
    """Minimum duration of a step, so that a fault reaches the nodes while training runs."""
    changes: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Further settings of every run config, by section."""
    queue_seconds: float = 3600.0
    patience: float = WAIT_FACTOR
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment of the submit."""
    tell: Callable[[str], None] = print
    """Prints a line for the user."""

    @property
    def ranks(self) -> int:
        """Number of ranks of a job, with the ranks per node of the site's file."""
        return self.nodes * int(self.cluster.get("job", {}).get("ntasks_per_node", 1))

    def run(self, name: str) -> Run:
        return run_in(self.folder, name)

    def write_config(self, name: str, fault: Fault | None) -> Path:
        """Write the run config of a test, or of the undisturbed run (None); return its path."""
        inject = ",".join(filter(None, [f"step-delay={self.step_seconds}", fault.inject if fault else ""]))
        gpus = int(self.cluster.get("job", {}).get("gpus_per_node", 0))
        precision = {"precision": "bf16"} if gpus else {"precision": "fp32", "threads": 1}
        common: dict[str, dict[str, Any]] = {
            "training": {
                "global_batch_size": 4 * self.ranks,
                "hooks": [{"hook": INJECTION_HOOK, "options": {"faults": inject}}],
                **precision,
            },
            "job": {"nodes": self.nodes, "time": str(self.minutes)},
            "data": random_data(self.folder / "data", vocabulary=300, longest=400, documents=120),
            "cluster": dict(self.cluster),
        }
        changes = [self.changes, fault.config if fault else {}]
        return write_config(
            self.folder, run_config_values(self.folder, "drill", name, COMMON_SETTINGS, common, *changes)
        )


@dataclass(frozen=True, kw_only=True)
class FaultResult(Record):
    """Result of one fault test."""

    name: str
    what: str
    expect: str
    passed: bool
    wrong: list[str] = field(default_factory=list)
    """Reasons of a failure, one sentence each."""
    seen: list[str] = field(default_factory=list)
    """Causes of the attempts' ends, in order."""
    said: str = ""
    """Reasons of the ends, and STOP."""
    stop: str = ""
    """Reason of STOP; empty if the chain trained to the end."""
    seconds_lost: float = 0.0
    """Seconds of one node without new steps: lost work, hangs, later starts, and the waits before them."""
    steps_lost: int = 0
    """Steps that were computed again, or lost."""
    bit_for_bit: bool | None = None
    """True if losses and checkpoint equal the undisturbed run's; None if the chain was to stop."""
    node_seconds: float = 0.0
    begin: float = 0.0
    """Seconds since 1970."""
    seconds: float = 0.0
    """Time from the submit to the end of the chain."""
    run_dir: str = ""
    job_ids: list[str] = field(default_factory=list)


def run_fault(site: FaultSite, fault: Fault) -> FaultResult:
    """Do one test. If anything ends it early, also Ctrl-C, its jobs are cancelled by their ids."""
    begin, run = time.time(), site.run(fault.name)
    config = site.write_config(fault.name, fault)
    target = site.target(run=run, slurm=site.slurm, patience=site.patience, queue_seconds=site.queue_seconds)
    failed = ""
    try:
        submit = start_submit(config, env=site.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        error = submit.communicate()[1]
        if submit.returncode != 0:
            raise ConfigError(f"the submit was refused: {error.strip()}", where=config)
        target.wait_begin()
        fault.act(target)
        wait_for_end(target)
    except (RelayrunError, OSError) as error:
        failed = str(error)
    finally:
        if run.plan.exists() and may_still_run(target):
            site.tell(f"{fault.name}: {cancel_chain(run, site.slurm, user='the drill')}")
    return _fault_result(site, run, fault, begin, failed)


def wait_for_end(target: ClusterUnderTest) -> None:
    """Wait until the chain has no job. Raises FaultNotInjected; RunDirError if two jobs wait."""
    answered = time.monotonic()
    limit = time.monotonic() + target.queue_seconds + 3600
    while time.monotonic() < limit:
        try:
            if len(waiting := target.waiting_jobs()) > 1:
                raise RunDirError(f"more than one job of the chain waits: {', '.join(waiting)}", where=target.run.path)
            if target.chain_has_ended():
                return
            answered = time.monotonic()
        except SchedulerError as error:
            if time.monotonic() - answered > CONTROLLER_AWAY_SECONDS:
                raise FaultNotInjected(f"Slurm does not answer: {error.message}", where=target.run.path) from None
        time.sleep(QUEUE_POLL_SECONDS)
    raise FaultNotInjected("the chain does not end", where=target.run.path)


def may_still_run(target: ClusterUnderTest) -> bool:
    """True if a job of the chain may be pending or running."""
    with contextlib.suppress(RelayrunError):
        return not target.chain_has_ended()
    return True


def _fault_result(site: FaultSite, run: Run, fault: Fault, begin: float, failed: str) -> FaultResult:
    starts = [start for number in run.attempt_numbers() if (start := run.attempt(number).read_begin())]
    ends = [run.attempt(start.attempt).read_end() for start in starts]
    causes = [end.cause if end else "none" for end in ends]
    reason = stop_reason(run)
    said = "\n".join([end.reason if end else "it left no end" for end in ends] + ([reason] if reason else []))
    wrong, same = [failed] if failed else [], None
    if run.plan.exists():
        wrong += _table_differences(run, fault, causes, said)
        if fault.expect == "resumed":
            reference = site.run(UNDISTURBED.name)
            different = loss_differences(run, reference, RUN_STEPS)
            different += checkpoint_differences(run.checkpoint(RUN_STEPS), reference.checkpoint(RUN_STEPS))[1]
            same = not different
            wrong += different[:5]
    lost, steps, allocated = _fault_cost(run)
    return FaultResult(
        name=fault.name,
        what=fault.what,
        expect=fault.expect,
        passed=not wrong,
        wrong=wrong,
        seen=causes,
        said=said,
        stop=reason or "",
        seconds_lost=lost,
        steps_lost=steps,
        bit_for_bit=None if fault is UNDISTURBED else same,
        node_seconds=allocated,
        begin=begin,
        seconds=time.time() - begin,
        run_dir=str(run.path),
        job_ids=[start.job_id for start in starts],
    )


def _table_differences(run: Run, fault: Fault, causes: list[str], said: str) -> list[str]:
    """Return the deviations of a chain's end from the table, one sentence each."""
    wrong = []
    expected = [wanted.split("|") for wanted in fault.causes]
    if len(causes) != len(expected) or any(cause not in wanted for cause, wanted in zip(causes, expected, strict=True)):
        wrong.append(f"attempts ended {', '.join(causes) or '(none)'}; expected {', '.join(fault.causes)}")
    stop = run.stop.read_text(encoding="utf-8") if run.stop.exists() else ""
    if fault.says not in f"{said}\n{stop}":
        wrong.append(f"nobody says {fault.says!r}")
    files = sorted(log_folder(run).glob(f"{Plan.load(run).job_name}-*"))
    logs = (last_bytes(file, LOG_BYTES_READ).decode(errors="replace") for file in files)
    if fault.logged and not any(fault.logged in text for text in logs):
        wrong.append(f"no log of its jobs says {fault.logged!r}")
    if fault.expect == "stopped" and not run.stop.exists():
        wrong.append("the chain ended without a STOP that says why")
    if any(entry.name.startswith("iter") for entry in (run.checkpoints / ".staging").rglob("*")):
        wrong.append("a checkpoint that was not published lies in checkpoints/.staging")
    return wrong


def _fault_cost(run: Run) -> tuple[float, int, float]:
    """Seconds without new steps, steps computed again, and all node seconds. The seconds are those of one node: lost
    time, the starts of later attempts, and the waits before them."""
    try:
        spent = account_for_run(run)
    except RelayrunError:  # no attempt began
        return 0.0, 0, 0.0
    seconds = 0.0
    for number, each in enumerate(spent.allocations):
        names = LOST_PARTS if number == 0 else LOST_PARTS | START_PARTS
        seconds += sum(each.parts.get(name, 0) for name in names) / each.allocation.nodes
        seconds += sum(each.waited.values()) if number else 0
    return seconds / MICROSECONDS_PER_SECOND, spent.work.redone_iterations, spent.allocated / MICROSECONDS_PER_SECOND
