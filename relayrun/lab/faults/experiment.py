"""One fault test: submit a run as a user does, inject the fault, wait for the end, judge the result.

`run_fault` does one test and returns a `FaultResult`, stored as JSON. `judge_run` compares a finished chain with the
table of faults and with the undisturbed run: losses, gradient norms and the tensors of the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path

from relayrun import places
from relayrun.control.chain.jobs import cancel_chain
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import AttemptEnd, Record
from relayrun.control.rundir.run import Run, stop_reason
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError, RelayrunError, RunDirError, SchedulerError
from relayrun.files import last_bytes, read_lines
from relayrun.lab.faults.small_run import RUN_STEPS, UNDISTURBED_RUN, DrillSite
from relayrun.lab.faults.table import Fault
from relayrun.lab.faults.target import (
    ClusterControl,
    FaultNotInjected,
    FaultTarget,
    SignalSender,
    wrapper_marker,
    write_wrappers,
)
from relayrun.submit.run_plan import log_folder
from relayrun.train.checkpoint import checksums
from relayrun.watch.goodput.account import account_for_run
from relayrun.watch.goodput.ledger import LOST_PARTS, MICROSECONDS_PER_SECOND, START_PARTS

LOG_BYTES_READ = 16 << 20
"""Bytes read from the end of a job's log."""


@dataclass(frozen=True, kw_only=True)
class FaultVerdict:
    """Judgement of a finished run."""

    causes: list[str]
    """Causes of the attempts' ends, in order."""
    said: str
    """Reasons of these ends and of STOP, one per line."""
    wrong: list[str] = field(default_factory=list)
    """Deviations from the table, one sentence each."""
    bit_for_bit: bool | None = None
    """True if losses and checkpoint equal the undisturbed run's; None if the chain need not finish."""


def judge_run(run: Run, fault: Fault, reference: Run, commands: Path) -> FaultVerdict:
    """Compare a finished chain with the table and with the undisturbed run."""
    ends = _attempt_ends(run)
    reason = stop_reason(run)
    said = "\n".join([end.reason if end else "it left no end" for end in ends] + ([reason] if reason else []))
    causes = [end.cause if end else "none" for end in ends]
    wrong = []
    if len(causes) != len(fault.causes) or any(
        cause not in wanted.split("|") for cause, wanted in zip(causes, fault.causes, strict=True)
    ):
        wrong.append(f"attempts ended {', '.join(causes) or '(none)'}; expected {', '.join(fault.causes)}")
    stop = run.stop.read_text(encoding="utf-8") if run.stop.exists() else ""
    if fault.says not in f"{said}\n{stop}":
        wrong.append(f"nobody says {fault.says!r}")
    if fault.logged and not any(fault.logged in log_end(log) for log in job_logs(run)):
        wrong.append(f"no log of its jobs says {fault.logged!r}")
    if fault.commands and not wrapper_marker(commands).exists():
        wrong.append("the command that does harm was not called: the fault did not happen")
    same: bool | None = None
    if fault.expect == "resumed":
        differs = list(islice(run_differences(run, reference), 5))
        same = not differs
        wrong += differs
    elif not run.stop.exists():
        wrong.append("the chain ended without a STOP that says why")
    if any(entry.name.startswith("iter") for entry in (run.checkpoints / ".staging").rglob("*")):
        wrong.append("a checkpoint that was not published lies in checkpoints/.staging")
    return FaultVerdict(causes=causes, said=said, wrong=wrong, bit_for_bit=same)


def run_differences(run: Run, reference: Run) -> Iterator[str]:
    """Yield a sentence for each difference from the undisturbed run: losses, gradient norms, the last checkpoint."""
    steps, wanted = exact_steps(run), exact_steps(reference)
    if sorted(steps) != list(range(1, RUN_STEPS + 1)):
        yield f"it has {len(steps)} of {RUN_STEPS} steps"
    for iteration in sorted(steps.keys() & wanted.keys()):
        if steps[iteration] != wanted[iteration]:
            yield f"loss or gradient norm of iteration {iteration} are not those of the undisturbed run"
            break
    yield from checkpoint_differences(run.checkpoint(RUN_STEPS), reference.checkpoint(RUN_STEPS))


def checkpoint_differences(found: Path, wanted: Path) -> Iterator[str]:
    """Compare two checkpoints with hashes, after comparing each with its own hashes."""
    for folder in (found, wanted):
        _, faults = checksums.verify_checkpoint(folder, None)
        if faults:
            yield f"{folder}: {faults[0]}"
            return
    one, other = _checkpoint_hashes(found), _checkpoint_hashes(wanted)
    if one.keys() != other.keys():
        yield f"{found} has other tensors than {wanted}"
    for key in sorted(one.keys() & other.keys()):
        if one[key] != other[key]:
            yield f"{key[0]} in the checkpoint of iteration {RUN_STEPS} is not that of the undisturbed run"
            return


def _checkpoint_hashes(folder: Path) -> dict[tuple[str, str], str]:
    """Hashes of all values: of tensors by name and offset, of other files by name."""
    sums = checksums.Checksums(folder, None)
    found = {(block.key, str(block.offset)): block.values or block.frame for block in sums.blocks()}
    for name, known in sums.files.items():
        if known.xxh3_128 is not None and not name.endswith(checksums.PIECE_SUFFIXES):
            found[name, ""] = known.xxh3_128
    return found


def exact_steps(run: Run) -> dict[int, tuple[str, ...]]:
    """Return loss and gradient norm of every iteration as exact text; of a repeated iteration all values."""
    found: dict[int, tuple[str, ...]] = {}
    for line in read_lines(run.metrics_view):
        if "loss" in line:
            found[line["iteration"]] = (*found.get(line["iteration"], ()), line["loss"].hex(), line["grad_norm"].hex())
    return found


def job_logs(run: Run) -> list[Path]:
    """Return the logs of the run's jobs."""
    return sorted(log_folder(run).glob(f"{Plan.load(run).job_name}-*"))


def log_end(log: Path) -> str:
    """Return the end of a log."""
    return last_bytes(log, LOG_BYTES_READ).decode(errors="replace")


def _attempt_ends(run: Run) -> list[AttemptEnd | None]:
    numbers = [number for number in run.attempt_numbers() if run.attempt(number).begin.exists()]
    return [run.attempt(number).read_end() for number in numbers]


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


QUEUE_POLL_SECONDS = 1.0
"""Interval between two queries of the queue."""

WAIT_FACTOR = 5.0
"""Factor on the waits of a fault: nodes and file systems of a cluster are slower than one machine."""

CONTROLLER_AWAY_SECONDS = 900.0
"""Silence of the controller after which a test is given up."""


@dataclass(frozen=True, kw_only=True)
class DrillTools:
    """Site, scheduler and access rights of a drill."""

    site: DrillSite
    slurm: Slurm
    reach: SignalSender
    control: ClusterControl | None = None
    queue_seconds: float = 3600.0
    patience: float = WAIT_FACTOR
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """Environment of the submit."""
    tell: Callable[[str], None] = print
    """Prints a line for the user."""


def run_undisturbed(company: DrillTools) -> FaultResult:
    """Do the run without a fault, the reference of all others."""
    fault = Fault(
        name=UNDISTURBED_RUN, what="nothing: what the others are compared with", expect="resumed", causes=("done",)
    )
    return replace(run_fault(company, fault), bit_for_bit=None)


def run_fault(company: DrillTools, fault: Fault) -> FaultResult:
    """Do one test. If anything ends it early, also Ctrl-C, its jobs are cancelled by their ids."""
    site, begin = company.site, time.time()
    run, commands = site.run(fault.name), site.commands(fault.name)
    commands.mkdir(parents=True, exist_ok=True)
    search = company.environment.get("PATH", os.defpath)
    write_wrappers(fault.commands, commands, search=search, real={"python3": site.host_python})
    config = site.write_config(fault.name, fault)
    stage = FaultTarget(
        run=run,
        commands=commands,
        slurm=company.slurm,
        reach=company.reach,
        control=company.control,
        patience=company.patience,
        queue_seconds=company.queue_seconds,
    )
    failed = ""
    with _small_file_system(run, fault):
        try:
            submit_run_config(config, company.environment | {"PATH": f"{commands / 'bin'}:{search}"})
            if not fault.before_begin:
                wait_for_begin(stage)
            fault.act(stage)
            wait_for_end(stage)
        except (RelayrunError, OSError) as error:
            failed = str(error)
        finally:
            if run.plan.exists() and may_still_run(stage):
                company.tell(f"{fault.name}: {cancel_jobs(stage)}")
            stage.bring_back_nodes()
        verdict = (
            judge_run(run, fault, site.run(UNDISTURBED_RUN), commands)
            if run.plan.exists()
            else FaultVerdict(causes=[], said="")
        )
        return _fault_result(run, fault, begin, verdict, failed)


def submit_run_config(config: Path, environment: dict[str, str]) -> None:
    """Submit a run config with this environment, as a user does. Raises ConfigError with the submit's error."""
    command = [sys.executable, str(places.shared_file("launchers/submit.py")), str(config)]
    done = subprocess.run(
        command,
        env=environment,
        cwd=places.CODE_ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ConfigError(f"the submit was refused: {done.stderr.strip()}", where=config)


def wait_for_begin(stage: FaultTarget) -> None:
    """Wait until the first attempt has begun, or the chain has ended before. Raises FaultNotInjected."""
    stage.wait(lambda: stage.run.attempt(1).begin.exists() or chain_has_ended(stage), what="the first attempt's begin")


def wait_for_end(stage: FaultTarget) -> None:
    """Wait until the chain has no job. Raises FaultNotInjected; RunDirError if two jobs wait."""
    answered = time.monotonic()
    limit = time.monotonic() + stage.queue_seconds + 3600
    while time.monotonic() < limit:
        try:
            if len(waiting := stage.waiting_jobs()) > 1:
                raise RunDirError(f"more than one job of the chain waits: {', '.join(waiting)}", where=stage.run.path)
            if chain_has_ended(stage):
                return
            answered = time.monotonic()
        except SchedulerError as error:
            if time.monotonic() - answered > CONTROLLER_AWAY_SECONDS:
                raise FaultNotInjected(f"Slurm does not answer: {error.message}", where=stage.run.path) from None
        time.sleep(QUEUE_POLL_SECONDS)
    raise FaultNotInjected("the chain does not end", where=stage.run.path)


def chain_has_ended(stage: FaultTarget) -> bool:
    """True if the chain has no pending or running job, fallback jobs included."""
    if stage.jobs():
        return False
    plan = Plan.load(stage.run)
    return not stage.slurm.fallback_jobs.live(plan.fallback_job_name) and not stage.jobs()


def may_still_run(stage: FaultTarget) -> bool:
    """True if a job that the test queued may be pending or running."""
    with contextlib.suppress(RelayrunError):
        return not chain_has_ended(stage) or any((job := stage.slurm.query(own)) and job.live for own in stage.own_jobs)
    return True


def cancel_jobs(stage: FaultTarget) -> str:
    """End the chain and cancel the jobs of the test by their ids; return a sentence.

    Raises SchedulerError if one stays.
    """
    for job in stage.own_jobs:
        stage.slurm.cancel(job)
    return cancel_chain(stage.run, stage.slurm, user="the drill")


@contextlib.contextmanager
def _small_file_system(run: Run, fault: Fault) -> Iterator[None]:
    """Mount a file system of 40 MB at the folder of a disk fault inside the block; keep its files afterwards."""
    if not fault.small_disk:
        yield
        return
    folder = run.path / fault.small_disk
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", str(folder)], check=True)
    kept = folder.with_name(f"{folder.name}.kept")
    try:
        yield
        shutil.copytree(folder, kept, symlinks=True)
    finally:
        subprocess.run(["umount", str(folder)], check=True)
    folder.rmdir()
    kept.rename(folder)


def _fault_result(run: Run, fault: Fault, begin: float, verdict: FaultVerdict, failed: str) -> FaultResult:
    lost, steps, allocated = _fault_cost(run)
    wrong = [*([failed] if failed else []), *verdict.wrong]
    return FaultResult(
        name=fault.name,
        what=fault.what,
        expect=fault.expect,
        passed=not wrong,
        wrong=wrong,
        seen=verdict.causes,
        said=verdict.said,
        stop=stop_reason(run) or "",
        seconds_lost=lost,
        steps_lost=steps,
        bit_for_bit=verdict.bit_for_bit,
        node_seconds=allocated,
        begin=begin,
        seconds=time.time() - begin,
        run_dir=str(run.path),
        job_ids=[attempt.job_id for number in run.attempt_numbers() if (attempt := run.attempt(number).read_begin())],
    )


def _fault_cost(run: Run) -> tuple[float, int, float]:
    """Seconds without new steps, steps computed again, and all node seconds.

    The seconds are those of one node: lost time, the starts of later attempts, and the waits before them.
    """
    try:
        spent = account_for_run(run)
    except RelayrunError:  # no attempt began
        return 0.0, 0, 0.0
    seconds = 0.0
    for number, stay in enumerate(spent.stays):
        names = LOST_PARTS if number == 0 else LOST_PARTS | START_PARTS
        seconds += sum(stay.parts.get(name, 0) for name in names) / stay.nodes
        seconds += sum(stay.waited.values()) if number else 0
    return seconds / MICROSECONDS_PER_SECOND, spent.work.redone_iterations, spent.allocated / MICROSECONDS_PER_SECOND
