"""Set-up of an export job like the run's own jobs: `python -m relayrun.train.export.job_environment RUN`.

It prints lines of Bash for do-convert.sh: environment, modules and `job.setup` of the run, the array `run_command` with
the words before the program (container, command prefix), and `run_python` with the Python of the ranks. Standard
library only: it runs outside the container.
"""

from __future__ import annotations

import os
import shlex
import sys

from relayrun.control.chain import job_script
from relayrun.control.rundir.find_runs import find_run
from relayrun.control.rundir.plan import Plan
from relayrun.control.rundir.run import Run
from relayrun.control.scheduler.factory import scheduler_for_plan
from relayrun.errors import RelayrunError, run_main


def environment_lines(plan: Plan, run: Run) -> list[str]:
    """Return the lines; outside a Slurm job there is no task to start."""
    starter: list[str] = []
    if "SLURM_JOB_ID" in os.environ and plan.srun_options:
        starter = scheduler_for_plan(plan, run).single_task_command(
            plan, cpus_per_task=os.environ.get("SLURM_CPUS_PER_TASK", "1")
        )
    own = {name: value for name, value in plan.environment.items() if name != "PYTHONPATH"}
    return [
        *job_script.export_lines(own),
        *job_script.setup_lines(plan.setup, modules=plan.modules),
        f"run_command=({shlex.join([*starter, *plan.command_prefix])})",
        f"run_python=({shlex.join(plan.program[:1])})",
    ]


def main(name: str) -> int:
    """Print the lines; none without a plan: the export itself reports a missing run. Raises UntrustedError for a run of
    another user, whose lines would be executed as this one."""
    try:
        run = find_run(name)
    except RelayrunError:
        return 0
    if run.plan.exists():
        print("\n".join(environment_lines(Plan.load_trusted(run), run)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(lambda: main(sys.argv[1])))
