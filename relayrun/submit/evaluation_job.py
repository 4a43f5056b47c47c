"""The job that evaluates a checkpoint, and when it is submitted: written beside a run, where its jobs find both."""

from __future__ import annotations

import sys

from relayrun.config.compose.schema import CommonConfig
from relayrun.config.sections.sbatch import sbatch_script_options
from relayrun.control.chain import job_script
from relayrun.control.rundir.evaluations import EvaluationPolicy
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler import gres
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.files import write_atomic
from relayrun.slurmtime import format_time, parse_time


def write_evaluation_policy(config: CommonConfig, plan: Plan, run: Run) -> None:
    """Write the policy and the job of evaluations; none where the config has none any more."""
    if config.evaluation is None:
        run.evaluation_policy.unlink(missing_ok=True)
        return
    run.evaluations.mkdir(exist_ok=True)
    settings = config.evaluation
    policy = EvaluationPolicy(
        interval=settings.interval,
        total_steps=plan.total_steps or 0,
        hold=settings.hold,
        time_limit=parse_time(settings.job.time),
    )
    write_atomic(run.evaluation_script, evaluation_script(config, plan, run), mode=0o777)
    policy.write(run.evaluation_policy)


def evaluation_script(config: CommonConfig, plan: Plan, run: Run) -> str:
    """Return the script of the job that evaluates one checkpoint; what its section leaves out is as in the run."""
    assert config.evaluation is not None
    own, job = config.evaluation.job, config.job
    cpus = str(own.cpus_per_task or job.cpus_per_task)
    options: dict[str, str | None] = {"time": format_time(parse_time(own.time)), "cpus-per-task": cpus}
    # without the run's memory, which is meant for all its ranks of a node
    options |= {name: value for name, value in job.placement.items() if name != "mem"} | own.placement
    gpus = min(1, job.gpus_per_node) if own.gpus_per_node is None else own.gpus_per_node
    further = sbatch_script_options(job.sbatch | own.sbatch)
    if "gres" in job.sbatch and "gres" not in own.sbatch:  # meant for all ranks of a node
        further["gres"] = gres.gres_with_gpus(str(job.sbatch["gres"]), str(gpus))
    if gpus and not gres.asks_for_gpus(further):
        options["gpus-per-node"] = str(gpus)
    options |= {name: value for name, value in further.items() if value != ""}
    program = [config.cluster.python or sys.executable, "-m", "relayrun.train.export.evaluate", f"--run-dir={run.path}"]
    starter = scheduler_for_plan(plan, run).single_task_command(plan, cpus_per_task=cpus)
    environment = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": cpus, **plan.environment}
    environment.pop("PYTHONPATH", None)  # joined with the package's by `render`
    command = [*starter, *plan.command_prefix, *program]
    return job_script.program_script(
        plan, "evaluation", options, environment=environment, command=command, fallback=run.path
    )
