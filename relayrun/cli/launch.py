"""`relayrun launch`: what the sbatch scripts of launchers/ call inside the first job of a chain."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from relayrun import places
from relayrun.config import compose
from relayrun.submit import launcher_environment, submission

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun launch`."""
    parser.add_argument("config", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="print the job script; write nothing")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Make this job the first of a chain, with the settings of the environment; print the run directory."""
    settings = launcher_environment.overrides(os.environ)
    if options.dry_run:
        print(submission.dry_run(compose.load(places.project() / options.config, settings)), end="")
        return 0
    job = launcher_environment.job_overrides(os.environ)
    log.info("as this job was submitted, whatever the config says: %s", ", ".join(job))
    config = compose.load(places.project() / options.config, [*settings, *job])
    print(
        submission.adopt_job(
            config,
            host_python=os.environ.get("HOST_PYTHON") or None,
            resume=launcher_environment.flag(os.environ, "RESUME"),
            accept_data_change=launcher_environment.flag(os.environ, "ACCEPT_DATA_CHANGE"),
            take_over=launcher_environment.flag(os.environ, "TAKE_OVER"),
        ).path
    )
    return 0
