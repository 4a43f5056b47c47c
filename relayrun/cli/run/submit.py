"""`relayrun submit`, `check`, `resume` and `launch`: from a config, a run or a job's environment to a queued job.

`check` writes and queues nothing. The sbatch scripts of launchers/ call `launch`, which makes their job the first of a
chain.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from relayrun import places
from relayrun.cli import add_run, add_set_option
from relayrun.config.compose import resolve, sites
from relayrun.config.compose.campaign import CampaignDescription, campaign_kind, describe_campaign
from relayrun.config.compose.resolve import config_differences
from relayrun.config.compose.schema import CommonConfig, RunConfig
from relayrun.config.compose.yaml_file import LocatedSettings
from relayrun.config.sections.batch_systems import batch_system
from relayrun.control.chain.budget import SHARED_SETTINGS
from relayrun.control.rundir.find_runs import find_run, split_run_and_iteration
from relayrun.control.rundir.plan import Plan
from relayrun.control.scheduler import local
from relayrun.control.scheduler.factory import local_scheduler
from relayrun.errors import InputError, RelayrunError, RunDirError, describe_owner
from relayrun.lab import loss_oracle
from relayrun.submit import campaign, launcher_overrides, submission
from relayrun.submit.check import report_text
from relayrun.submit.check.existing_run import SubmitIntent
from relayrun.submit.check.findings import CheckFinding, Findings
from relayrun.submit.check.report import CheckReport, settings_findings
from relayrun.submit.cost import confirm_cost
from relayrun.submit.launcher_overrides import quote_yaml
from relayrun.trust import refuse_untrusted
from relayrun.watch import unsent_notices
from relayrun.watch.follow import ProgressFollower
from relayrun.watch.text import json_text

log = logging.getLogger(__name__)

YES_WORDS = "submit without a question, however many node hours it can use"


def add_check_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun check`."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    add_set_option(parser, "as for `relayrun submit`")
    parser.add_argument("--resume", action="store_true", help="take it that the chain may have ended")
    parser.add_argument("--accept-data-change", action="store_true", help="take it that the data may have changed")
    parser.add_argument("--take-over", action="store_true", help="take it that the run may be another user's")
    parser.add_argument("--oracle", action="store_true", help="compare each term of the loss with one rank, on CPUs")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    parser.set_defaults(run=run_check)


def run_check(options: argparse.Namespace) -> int:
    """Print findings and plan; return 1 if a submit would refuse. Raises RelayrunError."""
    given = resolve.read_settings(options.config, options.overrides)
    if options.oracle:
        return run_oracle(given, json=options.json)
    if (kind := campaign_kind(given)) is not None:
        return check_plan(describe_campaign(options.config, options.overrides, kind=kind), given, json=options.json)
    return check_settings(given, _intent(options, resume=options.resume), json=options.json)


def run_oracle(given: LocatedSettings, *, json: bool) -> int:
    """Compare the terms of the loss, and print them; return 1 if one differs. Raises RelayrunError."""
    if (stranger := _file_of_another_user(given)) is not None:
        raise RelayrunError(f"{describe_owner(stranger)}: --oracle runs code that it names", where=stranger)
    config = None if campaign_kind(given) is not None else resolve.validate_settings(given)
    if not isinstance(config, RunConfig):
        raise RelayrunError("--oracle is for a run config of the trainer native")
    report = loss_oracle.ask_oracle(config)
    if json:
        print(json_text(asdict(report) | {"differing": report.differing}))
    else:
        report.print()
    return int(report.failure is not None or bool(report.differing))


def check_plan(described: CampaignDescription, given: LocatedSettings, *, json: bool = False) -> int:
    """Check all runs of a sweep or of stages, and print what was found; return 1 if a submit would refuse."""
    if (findings := _passive_findings(given)) is not None:
        return _print_passive(findings, json=json)
    report = campaign.check_campaign(described)
    if json:
        runs = {name: report_text.check_report_as_json(each, []) for name, each in report.reports.items()}
        print(json_text({"campaign": described.name, "refused": report.refused, "runs": runs}))
    else:
        campaign.print_campaign_report(report)
    return int(report.refused)


def _file_of_another_user(given: LocatedSettings) -> Path | None:
    """Return a file of these settings that is neither this user's, nor root's, nor of the owner of this code."""
    known = (os.geteuid(), 0, os.stat(__file__).st_uid)
    files = {Path(place.rpartition(":")[0]) for place in given.places.values()}
    return next((file for file in files if file.is_file() and file.stat().st_uid not in known), None)


def _passive_findings(given: LocatedSettings) -> Findings | None:
    """Check the settings alone if another user can have written them: no program that they name is started, no address
    asked, no folder written to. None if all are this user's or root's."""
    if (stranger := _file_of_another_user(given)) is None:
        return None
    findings = settings_findings(resolve.validate_settings(given), given)
    words = f"{describe_owner(stranger)}: programs, data, folders and the job, which it names, were not looked at"
    remedy = "read it, and check a copy of your own; a submit starts what it names as you"
    findings.warn("settings.owner", words, where=stranger, remedy=remedy)
    return findings


def _print_passive(findings: Findings, *, json: bool) -> int:
    show = _print_without_plan if json else report_text.print_findings
    show(findings.all)
    return 1 if findings.errors else 0


def _print_without_plan(found: Sequence[CheckFinding]) -> None:
    refused = any(each.level == "error" for each in found)
    lines = [each.as_json() for each in found]
    nothing = dict.fromkeys(("run", "run_dir", "node_hours_most", "plan"))
    print(json_text({**nothing, "refused": refused, "findings": lines, "data": [], "changes": []}))


def _intent(options: argparse.Namespace, *, resume: bool) -> SubmitIntent:
    return SubmitIntent(resume=resume, accept_data_change=options.accept_data_change, take_over=options.take_over)


def check_settings(
    given: LocatedSettings, intent: SubmitIntent, *, json: bool = False, launcher: Path | None = None
) -> int:
    """Check the run of these settings, and print the report; return the exit code.

    `launcher`: the Bash script that the user passes to sbatch, if the job is not one of relayrun's own.
    """
    if (passive := _passive_findings(given)) is not None:
        return _print_passive(passive, json=json)
    name = "settings.schema"
    try:
        config = resolve.validate_settings(given)
        name = "settings.trainer"
        report = submission.check_submission(config, given=given, intent=intent, launcher=launcher)
    except RelayrunError as error:  # no plan can be made of these settings
        if not json:
            raise
        refused = CheckFinding(name=name, level="error", words=error.message, where=error.where, remedy=error.hint)
        _print_without_plan([refused])
        return 1
    changes = changes_since_last_submit(report)
    if json:
        print(json_text(report_text.check_report_as_json(report, changes)))
    else:
        report_text.print_report(report, changes)
    return 1 if report.findings.errors else 0


def print_dry_run(given: LocatedSettings, intent: SubmitIntent) -> int:
    """Print the job script of a submit, and its warnings on standard error.

    For a foreign trainer a comment with the ranks' command follows. Raises RelayrunError if a submit would refuse.
    """
    config = resolve.validate_settings(given)
    print(submission.dry_run(config), end="", flush=True)
    if (findings := _passive_findings(given)) is None:
        report = submission.check_submission(config, given=given, intent=intent)
        if not isinstance(config, RunConfig):
            print(*report_text.command_as_comment(report), sep="\n", flush=True)
        findings = report.findings
    for finding in findings.warnings:
        log.warning("%s", finding.line)
    findings.raise_errors()
    return 0


def changes_since_last_submit(report: CheckReport) -> list[str]:
    """Return the differences between the config and the run's last revision; empty for a new run."""
    revisions = report.run.revisions()
    if not revisions:
        return []
    config = submission.with_kept_settings(report.run, report.config, report.manifest)
    return config_differences(resolve.read_resolved_config(report.run.config_revision(revisions[-1])), config)


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun launch`."""
    parser.add_argument("config", type=Path)
    parser.add_argument("--dry-run", action="store_true", help="check it and print the job script; write nothing")
    parser.add_argument(
        "--check", type=Path, metavar="LAUNCHER", help="print what `relayrun check` finds, with this sbatch script"
    )
    parser.set_defaults(run=run_launch)


def run_launch(options: argparse.Namespace) -> int:
    """Make this job the first of a chain, with the settings of its environment; print the run directory."""
    file = places.project_folder() / options.config
    settings = launcher_overrides.environment_overrides(os.environ, trainer=resolve.read_trainer(file))
    # sbatch's own variables, which its options override: inside a job take the job's value
    settings += [
        f"job.{name}={quote_yaml(os.environ.get(f'SLURM_JOB_{name.upper()}') or value)}"
        for name, value in sites.sbatch_options_from_environment(os.environ).items()
    ]
    for name in (*sites.OTHER_CLUSTER_VARIABLES, *sites.IGNORED_VARIABLES):
        os.environ.pop(name, None)
    flag = partial(launcher_overrides.boolean_variable, os.environ)
    intent = SubmitIntent(
        resume=flag("RESUME"), accept_data_change=flag("ACCEPT_DATA_CHANGE"), take_over=flag("TAKE_OVER")
    )
    if options.dry_run or options.check is not None:
        given = resolve.read_settings(file, settings)
        if options.dry_run:
            return print_dry_run(given, intent)
        return check_settings(given, intent, launcher=options.check.absolute())
    job = launcher_overrides.job_overrides(os.environ)
    log.info("as this job was submitted, whatever the config says: %s", ", ".join(job))
    config = resolve.load_run_config(file, [*settings, *job])
    print(submission.adopt_job(config, intent, host_python=os.environ.get("HOST_PYTHON") or None).path)
    return 0


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun submit`, also those of launchers/submit.py."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    words = "begin with another run's checkpoint, or a folder, also of Megatron-LM"
    parser.add_argument("--load", metavar="RUN[:ITERATION]", help=words)
    parser.add_argument("--resume", action="store_true", help="go on although the chain of this run has ended")
    add_change_arguments(parser)
    parser.set_defaults(run=run_submit)


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options common to `relayrun submit` and `relayrun resume`."""
    add_set_option(parser, "override a setting: --set training.steps=50")
    parser.add_argument(
        "--dry-run", action="store_true", help="check it and print the job script; write and submit nothing"
    )
    parser.add_argument("--yes", action="store_true", help=YES_WORDS)
    words = "go on with data that are not those the run began with (`relayrun help data-order`)"
    parser.add_argument("--accept-data-change", action="store_true", help=words)
    words = "go on with the run of another user whose jobs have ended, or with the copies of a lost run directory"
    parser.add_argument("--take-over", action="store_true", help=words)


def run_submit(options: argparse.Namespace) -> int:
    """Submit one run or, with --dry-run, print the job of a submit."""
    load = []
    if options.load is not None:
        load = [f"checkpoint.load={quote_yaml(_typed_load(options.load, places.project_folder(options.config)))}"]
    given = resolve.read_settings(options.config, [*options.overrides, *load])
    return _submit_or_print(options, given, resolve.validate_settings(given), resume=options.resume)


def _typed_load(load: str, project: Path) -> str:
    """Return `--load` for a config, whose relative paths begin at the project. Raises InputError if a folder here and
    another one in the project have this name."""
    name, _ = split_run_and_iteration(load)
    here = Path(name).expanduser().absolute()
    there = next((path for path in (project / name, project / "logs" / "runs" / name) if path.exists()), here)
    if here.exists() and there.resolve() != here.resolve():
        words = f"{name} is {here} here, and {there} in the project"
        raise InputError(words, where="--load", hint="give the whole path of one of them")
    return f"{here}{load[len(name) :]}" if here.exists() else load


def _submit_or_print(options: argparse.Namespace, given: LocatedSettings, config: CommonConfig, *, resume: bool) -> int:
    intent = _intent(options, resume=resume)
    if options.dry_run:
        return print_dry_run(given, intent)
    confirm = partial(confirm_cost, yes=options.yes)
    print_submitted(submission.submit_run(config, given=given, confirm=confirm, **vars(intent)))
    return 0


def print_submitted(submitted: submission.SubmittedRun) -> None:
    """Print the submitted job; with the local scheduler run its queue here."""
    print(
        f"job {submitted.job_id} ({submitted.plan.job_name})\nrun directory {submitted.run.path}\n"
        f"logs {submitted.plan.log_folder}",
        flush=True,
    )
    unsent_notices.send_in_background(submitted.run)
    if batch_system(submitted.plan.scheduler).one_machine:
        follower = ProgressFollower(submitted.run, total_steps=submitted.plan.total_steps)
        local_scheduler(submitted.run).run_queue(local.print_event, follower.poll)
        unsent_notices.send_in_background(submitted.run)  # a STOP of the queue itself


def add_resume_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun resume`."""
    add_run(parser)
    add_change_arguments(parser)
    parser.set_defaults(run=run_resume)


def run_resume(options: argparse.Namespace) -> int:
    """Submit a run with its newest revision, changed by --set, even if its chain has ended; one with jobs takes another
    budget. Raises RelayrunError."""
    found = find_run(options.name)
    Plan.load_trusted(found)
    newest = max(found.revisions(), default=None)
    if newest is None:
        raise RunDirError("this run has no config to go on with", where=found.config, hint="use `relayrun submit`")
    path = found.config_revision(newest)
    refuse_untrusted(found.path, [f"config/{path.name}"])
    place = f"run_dir={quote_yaml(str(found.path))}"  # the run may have moved
    given = resolve.read_settings(path, [*options.overrides, place])
    config = resolve.validate_settings(given)
    before = resolve.read_resolved_config(path)
    for change in config_differences(before, config):
        log.info("changed: %s", change)
    changed = resolve.changed_settings(before, config).keys()
    of_budget = changed and changed <= {f"chain.{name}" for name in SHARED_SETTINGS}
    if of_budget and not options.dry_run and submission.change_budget(found, config):
        print(f"the jobs of {found.path} obey within a minute")
        return 0
    return _submit_or_print(options, given, config, resume=True)
