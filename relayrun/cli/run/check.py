"""`relayrun check`: what a submit would refuse or warn of, and the plan of the run; nothing is written or queued."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from relayrun.config.compose import compose
from relayrun.config.compose.differences import config_differences
from relayrun.config.compose.schema import RunConfig
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.errors import RelayrunError
from relayrun.submit import submission
from relayrun.submit.check import report_text
from relayrun.submit.check.findings import CheckFinding
from relayrun.submit.check.report import CheckReport
from relayrun.submit.check.state import SubmitIntent

log = logging.getLogger(__name__)


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun check`."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE", help="as for `relayrun submit`"
    )
    parser.add_argument("--resume", action="store_true", help="take it that the chain may have ended")
    parser.add_argument("--accept-data-change", action="store_true", help="take it that the data may have changed")
    parser.add_argument("--take-over", action="store_true", help="take it that the run may be another user's")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> int:
    """Print findings and plan; the exit code is 1 where a submit would refuse. Raises RelayrunError."""
    intent = SubmitIntent(
        resume=options.resume, accept_data_change=options.accept_data_change, take_over=options.take_over
    )
    return check_settings(compose.read_settings(options.config, options.overrides), intent, json=options.json)


def check_settings(
    given: LocatedSettings, intent: SubmitIntent, *, json: bool = False, launcher: Path | None = None
) -> int:
    """Check the run that settings mean, and print the report; return the exit code.

    `launcher`: the Bash script that is to be given to sbatch, instead of a job of relayrun's own.
    """
    name = "settings.schema"
    try:
        config = compose.validate_settings(given)
        name = "settings.trainer"
        report = submission.check_submission(config, given=given, intent=intent, launcher=launcher)
    except RelayrunError as error:  # of settings of which no plan can be made
        if not json:
            raise
        refused = CheckFinding(name=name, level="error", words=error.message, where=error.where, remedy=error.hint)
        print(
            report_text.json_text(
                {"run": None, "run_dir": None, "refused": True, "findings": [refused.as_json()]} | _EMPTY_REPORT
            )
        )
        return 1
    changes = changes_since_last_submit(report)
    if json:
        print(report_text.json_text(report_text.check_report_as_json(report, changes)))
    else:
        report_text.print_report(report, changes)
    return 1 if report.findings.errors else 0


def print_dry_run(given: LocatedSettings, intent: SubmitIntent) -> int:
    """Print the job script that a submit would write, and on standard error what the check found but is not fine.

    Behind it stands, as a comment, what the ranks of a foreign trainer execute.

    Returns 1 where a submit would refuse. Raises RelayrunError where there is no job to print.
    """
    config = compose.validate_settings(given)
    print(submission.dry_run(config), end="", flush=True)
    report = submission.check_submission(config, given=given, intent=intent)
    if not isinstance(config, RunConfig):
        print(*report_text.command_as_comment(report), sep="\n", flush=True)
    findings = report.findings
    for finding in findings.warnings:
        log.warning("%s", finding.line)
    findings.raise_errors()
    return 0


_EMPTY_REPORT: dict[str, Any] = {"data": [], "plan": None, "changes": []}


def changes_since_last_submit(report: CheckReport) -> list[str]:
    """What differs between the config and the run's last revision; empty for a run that has none."""
    revisions = report.run.revisions()
    if not revisions:
        return []
    return config_differences(compose.read_resolved_config(report.run.config_revision(revisions[-1])), report.config)
