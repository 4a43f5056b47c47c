"""`relayrun launch`: what the sbatch scripts of launchers/ call inside the first job of a chain."""

from __future__ import annotations

import argparse
import logging
import os
from functools import partial
from pathlib import Path

from relayrun import places
from relayrun.cli.run import check
from relayrun.config.compose import compose, sites
from relayrun.submit import launcher_environment, submission
from relayrun.submit.check.state import SubmitIntent

log = logging.getLogger(__name__)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun launch`."""
    parser.add_argument("config", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="check it and print the job script; write nothing")
    parser.add_argument(
        "--check", type=Path, metavar="LAUNCHER", help="print what `relayrun check` finds, with this sbatch script"
    )
    parser.set_defaults(run=run_launch)


def run_launch(options: argparse.Namespace) -> int:
    """Make this job the first of a chain, with the settings of the environment; print the run directory."""
    file = places.project_folder() / options.config
    settings = launcher_environment.environment_overrides(os.environ, trainer=compose.read_trainer(file))
    # sbatch itself heeds these, and its options over them: what the job has, where this is one
    settings += [
        f"job.{name}={launcher_environment.quote_yaml(os.environ.get(f'SLURM_JOB_{name.upper()}') or value)}"
        for name, value in sites.sbatch_options_from_environment(os.environ).items()
    ]
    for name in (*sites.OTHER_CLUSTER_VARIABLES, *sites.IGNORED_VARIABLES):
        os.environ.pop(name, None)
    flag = partial(launcher_environment.boolean_variable, os.environ)
    resume, accept, take_over = flag("RESUME"), flag("ACCEPT_DATA_CHANGE"), flag("TAKE_OVER")
    if options.dry_run or options.check is not None:
        given = compose.read_settings(file, settings)
        intent = SubmitIntent(resume=resume, accept_data_change=accept, take_over=take_over)
        if options.dry_run:
            return check.print_dry_run(given, intent)
        return check.check_settings(given, intent, launcher=options.check.absolute())
    job = launcher_environment.job_overrides(os.environ)
    log.info("as this job was submitted, whatever the config says: %s", ", ".join(job))
    config = compose.load_run_config(file, [*settings, *job])
    print(
        submission.adopt_job(
            config,
            host_python=os.environ.get("HOST_PYTHON") or None,
            resume=resume,
            accept_data_change=accept,
            take_over=take_over,
        ).path
    )
    return 0
