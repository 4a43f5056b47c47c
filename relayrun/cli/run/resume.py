"""`relayrun resume`: submit a run again with the settings of its last submit; nothing needs to be typed again."""

from __future__ import annotations

import argparse
import logging

from relayrun.cli.run import check, submit
from relayrun.config.compose import compose
from relayrun.config.compose.differences import config_differences
from relayrun.control.rundir.find_runs import find_run
from relayrun.errors import RunDirError
from relayrun.submit import submission
from relayrun.submit.check.state import SubmitIntent
from relayrun.submit.launcher_environment import quote_yaml

log = logging.getLogger(__name__)


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun resume`."""
    parser.add_argument("name", metavar="RUN", help="run directory, or project/name below logs/runs")
    submit.add_change_arguments(parser)
    parser.set_defaults(run=run_resume)


def run_resume(options: argparse.Namespace) -> int:
    """Submit a run as its newest revision says, with what --set changes, also where its chain has ended.

    Raises RelayrunError.
    """
    found = find_run(options.name)
    newest = max(found.revisions(), default=None)
    if newest is None:
        raise RunDirError("this run has no config to go on with", where=found.config, hint="use `relayrun submit`")
    path = found.config_revision(newest)
    given = compose.read_settings(
        path, [*options.overrides, f"run_dir={quote_yaml(str(found.path))}"]
    )  # it may have moved
    config = compose.validate_settings(given)
    for change in config_differences(compose.read_resolved_config(path), config):
        log.info("changed: %s", change)
    accept, take_over = options.accept_data_change, options.take_over
    if options.dry_run:
        return check.print_dry_run(given, SubmitIntent(resume=True, accept_data_change=accept, take_over=take_over))
    submit.print_submitted(
        submission.submit_run(config, resume=True, accept_data_change=accept, take_over=take_over, given=given)
    )
    return 0
