"""The options that the jobs of a chain request beside the plan's: the changes that a person made.

The plan is the only wish. What Slurm gave a job (time, nodes, partition, account, QOS, reservation) is a fact of its
attempt. `requests.json` holds what Slurm accepted right after sbatch: a difference to the plan is the site's, such as a
submit plugin's. A later difference is a person's `scontrol update` of the waiting job: the next jobs request it too,
until a person sets the accepted value again or submits the run again. A job that the chain did not queue, such as a
launcher's, has its options from a person.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from relayrun.control.job_log import log_line, logged
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.records import Record
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.base import Job
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import RunDirError, SchedulerError
from relayrun.slurmtime import parse_time

JOBS_KEPT = 8
"""Newest jobs whose accepted options are kept: an older job of the chain does not start again."""
LASTING_OPTIONS = frozenset({"partition", "account", "qos", "reservation", "constraint", "exclude", "nodes"})
"""Options that Slurm reports of a running job as it does of a waiting one."""


@dataclass(frozen=True, kw_only=True)
class RequestedOptions(Record):
    """`requests.json`. Options have sbatch's long names."""

    accepted: dict[str, dict[str, str]] = field(default_factory=dict)
    """By job id: the options that Slurm accepted, newest job last."""
    changes: dict[str, dict[str, str]] = field(default_factory=dict)
    """By option: its `value`, the `job` that a person changed, and `instead`, the value that Slurm had accepted."""


def read_requests(run: Run) -> RequestedOptions:
    """Return the record; an empty one if it is missing or damaged."""
    found = None
    with logged("which options a person changed is not known", RunDirError, OSError):
        found = RequestedOptions.read(run.requests)
    return found or RequestedOptions()


def wished_options(run: Run) -> dict[str, str]:
    """Return the options that the next job requests beside the plan's."""
    return {name: change["value"] for name, change in read_requests(run).changes.items()}


def describe_changes(run: Run) -> list[str]:
    """Return a sentence about each option that a person changed."""
    found = []
    for name, each in read_requests(run).changes.items():
        instead = f" instead of {each['instead']}" if each["instead"] else ""
        found.append(f"{name} is {each['value']}{instead} since job {each['job']}")
    return found


def record_accepted(run: Run, plan: Plan, job_id: str) -> None:
    """Record what Slurm accepted for a job that was just queued or changed by the chain. Errors are logged, without
    retries: a job that is queued already can go without."""
    job = None
    with logged(f"what Slurm accepted for job {job_id} is not known", SchedulerError):
        job = scheduler_for_plan(plan, run, patience=0).query(job_id)
    if job is not None and not job.options:  # the queue of one machine
        return
    known = read_requests(run)
    _write(run, _with_accepted(known, job_id, job.options if job else {}), before=known)


def note_changes(run: Run, plan: Plan, job: Job, *, defaults: Callable[[], Mapping[str, str]] = dict) -> bool:
    """Record the options of a waiting or beginning job that a person changed since Slurm accepted it; return whether
    there were any. `defaults`: those of a job that asks for none, which a launcher's job may have got unasked."""
    known = read_requests(run)
    accepted = known.accepted.get(job.id, {} if job.of_chain else None)  # a full disk may have taken no record
    if not (accepted or job.options):
        return False
    if accepted is None:
        before = {**defaults()} | {name: value or "" for name, value in plan.sbatch_options.items()}
        before |= {"nodes": str(plan.nodes_of_job), "cpus-per-task": str(plan.cpus_per_task)}
        names = job.options.keys() - {"time"}
    else:
        before = accepted or {name: value for name, value in job.options.items() if name != "time"}
        names = job.options.keys() - {"time"} if job.waits else job.options.keys() & LASTING_OPTIONS
    changed = {name: job.options[name] for name in names if _is_change(plan, job, name, before.get(name, ""))}
    changes = dict(known.changes)
    for name, value in sorted(changed.items()):
        instead = changes.pop(name, {}).get("instead", before.get(name, ""))
        if value != instead:
            changes[name] = {"value": value, "job": job.id, "instead": instead}
        log_line(f"a person changed {name} of job {job.id} to {value}; the next jobs request the same")
    options = {} if accepted is None else before | changed
    _write(run, _with_accepted(replace(known, changes=changes), job.id, options), before=known)
    return bool(changed)


def _is_change(plan: Plan, job: Job, name: str, before: str) -> bool:
    """Return whether a person set this option; else Slurm chose from a list or a range, or the chain set it."""
    value = job.options[name]
    if name == "nodes":
        least = int(value.partition("-")[0])
        low, _, high = before.partition("-")
        reduced = plan.outlives_nodes and least <= plan.nodes_of_job
        return not (reduced or (low.isdecimal() and int(low) <= least <= int(high or low)))
    if name == "exclude" and job.begin_failed_on and before:
        return False
    return value != before and not (name == "partition" and value in before.split(","))


def has_less_time(run: Run, plan: Plan, job: Job) -> bool:
    """Return whether the job's time limit, which a requeue keeps, is below the limit that sbatch requested."""
    try:
        asked = read_requests(run).accepted.get(job.id, {}).get("time")
        wished = float(plan.time_limit) if asked is None else parse_time(asked)
        return parse_time(job.options["time"]) < wished
    except (KeyError, ValueError):  # no limit, or none that is known
        return False


def _with_accepted(known: RequestedOptions, job_id: str, options: Mapping[str, str]) -> RequestedOptions:
    others = {key: value for key, value in known.accepted.items() if key != job_id}
    newest = {**others, job_id: dict(options)}
    return replace(known, accepted=dict(list(newest.items())[-JOBS_KEPT:]))


def _write(run: Run, record: RequestedOptions, *, before: RequestedOptions) -> None:
    if record == before:
        return
    with logged(f"{run.requests.name} not written", OSError):  # the chain goes on with the plan
        record.write(run.requests)
