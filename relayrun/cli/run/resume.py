"""`relayrun resume`: submit a run again with the settings of its last submit; nothing needs to be typed again."""

from __future__ import annotations

import argparse
import logging

from relayrun.cli.run import check, submit
from relayrun.config.compose import compose
from relayrun.config.compose.differences import differences
from relayrun.control.rundir.find import find_run
from relayrun.errors import RunDirError
from relayrun.submit import submission
from relayrun.submit.check.state import Intent
from relayrun.submit.launcher_environment import quoted

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun resume`."""
    parser.add_argument("name", metavar="RUN", help="run directory, or project/name below logs/runs")
    submit.add_changes(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Submit a run as its newest revision says, with what --set changes, also where its chain has ended.

    Raises RelayrunError.
    """
    found = find_run(options.name)
    newest = max(found.revisions(), default=None)
    if newest is None:
        raise RunDirError("this run has no config to go on with", where=found.config, hint="use `relayrun submit`")
    path = found.config_revision(newest)
    given = compose.read_settings(path, [*options.overrides, f"run_dir={quoted(str(found.path))}"])  # it may have moved
    config = compose.validate(given)
    for change in differences(compose.read_resolved(path), config):
        log.info("changed: %s", change)
    accept, take_over = options.accept_data_change, options.take_over
    if options.dry_run:
        return check.dry_run(given, Intent(resume=True, accept_data_change=accept, take_over=take_over))
    submit.tell(submission.submit(config, resume=True, accept_data_change=accept, take_over=take_over, given=given))
    return 0
