"""`relayrun.pyz wrap`: from a script to a queued job without the packages that check a run config."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path

from relayrun import places
from relayrun.cli.run import wrap
from relayrun.config.sections.chain import ChainSection
from relayrun.config.sections.command import CommandSection
from relayrun.config.sections.dataclass_section import read_section
from relayrun.control import decisions
from relayrun.control.chain import job_script, jobs
from relayrun.control.rundir import triggers
from relayrun.control.rundir.plan import ACTED_ON_NAMES, Plan, chain_job_name
from relayrun.control.rundir.run import Run, stop_reason, submit_lock
from relayrun.control.rundir.time_limit import first_grace_period
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import InputError, RunDirError
from relayrun.files import writable_by_owner_alone, write_atomic
from relayrun.slurmtime import parse_time
from relayrun.submit.sbatch_header import JOB_WORDS, Adopted
from relayrun.submit.wrap import link_checkpoints, newest_in_folder
from relayrun.trust import refuse_untrusted


def submit(options: argparse.Namespace) -> int:
    """Queue the wrapped script, and print its job and its run. Raises RelayrunError."""
    if options.overrides or options.dry_run or options.cluster != "generic":
        raise InputError("--set, --dry-run and --cluster need an installed relayrun: `pip install .` in a checkout")
    if "container" in (found := wrap.wrapped(options)).settings["cluster_settings"]:
        raise InputError("#SBATCH --environment needs an installed relayrun: `pip install .` in a checkout")
    run, job_id = submit_without_config(found, resume=options.resume)
    print(f"job {job_id}\nrun directory {run.path}")
    return 0


def submit_without_config(found: Adopted, *, resume: bool) -> tuple[Run, str]:
    """Prepare the run, and queue its first job; return both. Raises RelayrunError."""
    name = found.settings["name"]
    run = Run(places.project_folder() / "logs" / "runs" / "wrapped" / name)
    with submit_lock(run), writable_by_owner_alone():
        return run, _queue(found, run, resume=resume)


def _queue(found: Adopted, run: Run, *, resume: bool) -> str:
    refuse_untrusted(run.path, ACTED_ON_NAMES)
    settings = read_section(CommandSection, found.settings["command"], "command")
    if (reason := stop_reason(run)) is not None and not resume:
        raise RunDirError(f"the chain of this run has ended: {reason}", where=run.stop, hint="--resume goes on")
    if run.plan.exists():
        former = Plan.load_trusted(run)
        if live := scheduler_for_plan(former, run).jobs(former, anyone=True):
            raise RunDirError(f"this run has jobs already: {', '.join(job.id for job in live)}", where=run.path)
    link_checkpoints(run, settings.checkpoint.folder or "")
    plan = _plan(found, settings, run)
    Path(plan.log_folder).mkdir(parents=True, exist_ok=True)
    triggers.create_trigger_folder(run)
    plan.write(run.plan)
    write_atomic(run.job_script, job_script.job_script(plan, run), mode=0o777)
    if plan.fallback_job:
        write_atomic(run.fallback_script, job_script.fallback_script(plan, run), mode=0o777)
    for path in (run.stop, run.requests):
        path.unlink(missing_ok=True)
    return jobs.queue_first_job(run, plan, scheduler_for_plan(plan, run, ordered=True))


def _plan(found: Adopted, settings: CommandSection, run: Run) -> Plan:
    job, own = found.settings["job"], found.settings["cluster_settings"]
    options: dict[str, str | None] = {word: str(job[word]) for word in JOB_WORDS if word in job and word != "time"}
    options |= {"gpus-per-node": str(job["gpus_per_node"])} if "gpus_per_node" in job else {}
    options |= {"exclusive": None} if job.get("exclusive") else {}
    options |= {name: None if value is True else str(value) for name, value in job.get("sbatch", {}).items()}
    chain = read_section(ChainSection, found.settings["chain"], "chain")
    limit, base = parse_time(job["time"]), newest_in_folder(settings, run)
    fixed = None if chain.grace_period == "auto" else float(chain.grace_period)
    grace = first_grace_period(limit) if fixed is None else fixed
    return Plan(
        run=f"wrapped/{run.path.name}",
        job_name=chain_job_name("wrapped", run.path.name, run.path),
        scheduler="slurm",
        total_steps=None,
        config_revision=0,
        submitted_after_attempt=max(run.attempt_numbers(), default=0),
        owner=os.geteuid(),
        chain=chain,
        time_limit=limit,
        grace_period=grace,
        min_grace_period=min(chain.min_grace_period, limit / 2) if fixed is None else fixed,
        max_grace_period=limit / 2 if fixed is None else fixed,
        signal_seconds=decisions.default_signal_seconds(grace),
        nodes=job.get("nodes", 1),
        ntasks_per_node=job.get("ntasks_per_node", 1),
        cpus_per_task=job.get("cpus_per_task", 1),
        sbatch_options=options,
        srun_options=own["srun_options"],
        command_prefix=[],
        program=[],
        environment=own.get("environment", {}),
        modules=[],
        setup=job["setup"],
        trainer="command",
        trainer_settings=asdict(settings),
        host_python=sys.executable,
        package_root=str(places.CODE_ROOT),
        log_folder=str(places.project_folder(run.path) / "logs" / "slurm" / "training"),
        load_path=base.path,
        load_iteration=base.iteration,
    )
