"""One row of a drill: the run is submitted as a user submits it, the fault happens, the chain ends, and is judged."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from relayrun import places
from relayrun.control.chain.cancel import cancel
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.stop import stop_reason
from relayrun.control.scheduler.slurm import Slurm
from relayrun.errors import ConfigError, RelayrunError, RunDirError, SchedulerError
from relayrun.lab.faults.control import Control
from relayrun.lab.faults.fault import Fault
from relayrun.lab.faults.judge import Verdict, judge
from relayrun.lab.faults.programs import write_commands
from relayrun.lab.faults.reach import Reach
from relayrun.lab.faults.result import Result
from relayrun.lab.faults.site import REFERENCE, Site
from relayrun.lab.faults.stage import DidNotHappen, Stage
from relayrun.watch.goodput.account import account
from relayrun.watch.goodput.ledger import SECOND
from relayrun.watch.goodput.parts import LOST, START

POLL = 1.0
"""Seconds between two looks at the queue."""

PATIENCE = 5.0
"""What the seconds of a fault's waits are multiplied by: nodes and file systems of a cluster are slower than one
machine."""

AWAY = 900.0
"""Seconds for which a controller that does not answer is no reason to give a row up."""


@dataclass(frozen=True, kw_only=True)
class Company:
    """With what the rows of a drill are done."""

    site: Site
    slurm: Slurm
    reach: Reach
    control: Control | None = None
    queue_seconds: float = 3600.0
    patience: float = PATIENCE
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    """What the submit finds in its environment."""
    tell: Callable[[str], None] = print
    """Is given what a person should know, a line each."""


def undisturbed(company: Company) -> Result:
    """Do the run that nothing happens to, which the others are compared with."""
    fault = Fault(name=REFERENCE, what="nothing: what the others are compared with", expect="resumed", causes=("done",))
    return replace(row(company, fault), bit_for_bit=None)


def row(company: Company, fault: Fault) -> Result:
    """Do one row. Whatever ends it early, Ctrl-C too, its jobs are cancelled by their ids."""
    site, begin = company.site, time.time()
    run, commands = site.run(fault.name), site.commands(fault.name)
    commands.mkdir(parents=True, exist_ok=True)
    search = company.environment.get("PATH", os.defpath)
    write_commands(fault.commands, commands, search=search, real={"python3": site.host_python})
    config = site.write_config(fault.name, fault)
    stage = Stage(
        run=run,
        commands=commands,
        slurm=company.slurm,
        reach=company.reach,
        control=company.control,
        patience=company.patience,
        queue_seconds=company.queue_seconds,
    )
    failed = ""
    with _small_disk(run, fault):
        try:
            submit(config, company.environment | {"PATH": f"{commands / 'bin'}:{search}"})
            if not fault.before_begin:
                wait_for_begin(stage)
            fault.act(stage)
            wait_for_end(stage)
        except (RelayrunError, OSError) as error:
            failed = str(error)
        finally:
            if run.plan.exists() and is_live(stage):
                company.tell(f"{fault.name}: {end_jobs(stage)}")
            stage.bring_back_nodes()
        verdict = judge(run, fault, site.run(REFERENCE), commands) if run.plan.exists() else Verdict(causes=[], said="")
        return _result(run, fault, begin, verdict, failed)


def submit(config: Path, environment: dict[str, str]) -> None:
    """Submit a run config with this environment, as a user does. Raises ConfigError with what the submit said."""
    command = [sys.executable, str(places.shared("launchers/submit.py")), str(config)]
    done = subprocess.run(
        command, env=environment, cwd=places.CODE, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ConfigError(f"the submit was refused: {done.stderr.strip()}", where=config)


def wait_for_begin(stage: Stage) -> None:
    """Wait until the first attempt has begun, or the chain is over before. Raises DidNotHappen."""
    stage.wait(lambda: stage.run.attempt(1).begin.exists() or over(stage), what="the first attempt's begin")


def wait_for_end(stage: Stage) -> None:
    """Wait until no job of the chain waits or runs any more. Raises DidNotHappen, and where two jobs wait."""
    answered = time.monotonic()
    limit = time.monotonic() + stage.queue_seconds + 3600
    while time.monotonic() < limit:
        try:
            if len(waiting := stage.waiting_jobs()) > 1:
                raise RunDirError(f"more than one job of the chain waits: {', '.join(waiting)}", where=stage.run.path)
            if over(stage):
                return
            answered = time.monotonic()
        except SchedulerError as error:
            if time.monotonic() - answered > AWAY:
                raise DidNotHappen(f"Slurm does not answer: {error.message}", where=stage.run.path) from None
        time.sleep(POLL)
    raise DidNotHappen("the chain does not end", where=stage.run.path)


def over(stage: Stage) -> bool:
    """Whether no job of the chain waits or runs, a fallback job of it neither."""
    if stage.jobs():
        return False
    plan = Plan.load(stage.run)
    return not stage.slurm.fallback_jobs.live(plan.fallback_job_name) and not stage.jobs()


def is_live(stage: Stage) -> bool:
    """Whether something that the row queued may still wait or run."""
    with contextlib.suppress(RelayrunError):
        return not over(stage) or any((job := stage.slurm.query(own)) and job.live for own in stage.own_jobs)
    return True


def end_jobs(stage: Stage) -> str:
    """End the chain and cancel by their ids the jobs that the row queued; return what was done, in words.

    Raises SchedulerError where one stays.
    """
    for job in stage.own_jobs:
        stage.slurm.cancel(job)
    return cancel(stage.run, stage.slurm, user="the drill")


@contextlib.contextmanager
def _small_disk(run: Run, fault: Fault) -> Iterator[None]:
    """Inside, the run directory of a fault of the disk, or a folder of it, is a file system of 40 MB.

    What lies there in the end is kept.
    """
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


def _result(run: Run, fault: Fault, begin: float, verdict: Verdict, failed: str) -> Result:
    lost, steps, allocated = _cost(run)
    wrong = [*([failed] if failed else []), *verdict.wrong]
    return Result(
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


def _cost(run: Run) -> tuple[float, int, float]:
    """Seconds without new steps that the fault cost, steps computed again, and all node seconds.

    The seconds are those of one node: what was lost, the starts of the attempts behind the first, and the waits before
    them.
    """
    try:
        spent = account(run)
    except RelayrunError:  # no attempt began
        return 0.0, 0, 0.0
    seconds = 0.0
    for number, stay in enumerate(spent.stays):
        names = LOST if number == 0 else LOST | START
        seconds += sum(stay.parts.get(name, 0) for name in names) / stay.nodes
        seconds += sum(stay.waited.values()) if number else 0
    return seconds / SECOND, spent.work.redone_iterations, spent.allocated / SECOND
