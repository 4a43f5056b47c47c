"""`relayrun check`: what a submit would refuse or warn of, and the plan of the run; nothing is written or queued."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

from relayrun.config.compose import compose
from relayrun.config.compose.differences import differences
from relayrun.config.compose.schema import RunConfig
from relayrun.config.compose.yamlfile import LocatedSettings
from relayrun.errors import RelayrunError
from relayrun.submit import submission
from relayrun.submit.check import view
from relayrun.submit.check.finding import Finding
from relayrun.submit.check.report import Report
from relayrun.submit.check.state import Intent

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun check`."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    parser.add_argument(
        "--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE", help="as for `relayrun submit`"
    )
    parser.add_argument("--resume", action="store_true", help="take it that the chain may have ended")
    parser.add_argument("--accept-data-change", action="store_true", help="take it that the data may have changed")
    parser.add_argument("--take-over", action="store_true", help="take it that the run may be another user's")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print findings and plan; the exit code is 1 where a submit would refuse. Raises RelayrunError."""
    intent = Intent(resume=options.resume, accept_data_change=options.accept_data_change, take_over=options.take_over)
    return check(compose.read_settings(options.config, options.overrides), intent, json=options.json)


def check(given: LocatedSettings, intent: Intent, *, json: bool = False, launcher: Path | None = None) -> int:
    """Check the run that settings mean, and print the report; return the exit code.

    `launcher`: the Bash script that is to be given to sbatch, instead of a job of relayrun's own.
    """
    name = "settings.schema"
    try:
        config = compose.validate(given)
        name = "settings.trainer"
        report = submission.report_on(config, given=given, intent=intent, launcher=launcher)
    except RelayrunError as error:  # of settings of which no plan can be made
        if not json:
            raise
        refused = Finding(name=name, level="error", words=error.message, where=error.where, remedy=error.hint)
        print(view.dump({"run": None, "run_dir": None, "refused": True, "findings": [refused.as_json()]} | _NOTHING))
        return 1
    changes = changes_of(report)
    if json:
        print(view.dump(view.as_json(report, changes)))
    else:
        view.show(report, changes)
    return 1 if report.findings.errors else 0


def dry_run(given: LocatedSettings, intent: Intent) -> int:
    """Print the job script that a submit would write, and on standard error what the check found but is not fine.

    Behind it stands, as a comment, what the ranks of a foreign trainer execute.

    Returns 1 where a submit would refuse. Raises RelayrunError where there is no job to print.
    """
    config = compose.validate(given)
    print(submission.dry_run(config), end="", flush=True)
    report = submission.report_on(config, given=given, intent=intent)
    if not isinstance(config, RunConfig):
        print(*view.as_comment(report), sep="\n", flush=True)
    findings = report.findings
    for finding in findings.warnings:
        log.warning("%s", finding.line)
    findings.raise_errors()
    return 0


_NOTHING: dict[str, Any] = {"data": [], "plan": None, "changes": []}


def changes_of(report: Report) -> list[str]:
    """What differs between the config and the run's last revision; empty for a run that has none."""
    revisions = report.run.revisions()
    if not revisions:
        return []
    return differences(compose.read_resolved(report.run.config_revision(revisions[-1])), report.config)
