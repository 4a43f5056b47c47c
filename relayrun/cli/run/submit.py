"""`relayrun submit`: check, prepare the run directory, queue one job."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.cli.run import check
from relayrun.config.compose import compose
from relayrun.control.scheduler import local
from relayrun.submit import launcher_environment, submission
from relayrun.submit.check.state import SubmitIntent
from relayrun.watch import unsent_notices
from relayrun.watch.follow import ProgressFollower


def add_submit_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun submit`, also those of launchers/submit.py."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    parser.add_argument(
        "--load",
        metavar="RUN[:ITERATION]",
        help="begin with another run's checkpoint, or a folder, also of Megatron-LM",
    )
    parser.add_argument("--resume", action="store_true", help="go on although the chain of this run has ended")
    add_change_arguments(parser)
    parser.set_defaults(run=run_submit)


def add_change_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that `relayrun submit` and `relayrun resume` have in common."""
    parser.add_argument(
        "--set",
        dest="overrides",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="override a setting: --set training.steps=50",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check it and print the job script; write and submit nothing"
    )
    parser.add_argument(
        "--accept-data-change",
        action="store_true",
        help="go on with data that are not those the run began with (docs/data-order.md)",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="go on with the run of another user whose jobs have ended, or with the copies of a lost run directory",
    )


def run_submit(options: argparse.Namespace) -> int:
    """Submit one run, or, with --dry-run, print the job that would be submitted."""

    load = [] if options.load is None else [f"checkpoint.load={launcher_environment.quote_yaml(options.load)}"]
    given = compose.read_settings(options.config, [*options.overrides, *load])
    accept, take_over = options.accept_data_change, options.take_over
    if options.dry_run:
        return check.print_dry_run(
            given, SubmitIntent(resume=options.resume, accept_data_change=accept, take_over=take_over)
        )
    submitted = submission.submit_run(
        compose.validate_settings(given),
        resume=options.resume,
        accept_data_change=accept,
        take_over=take_over,
        given=given,
    )
    print_submitted(submitted)
    return 0


def print_submitted(submitted: submission.SubmittedRun) -> None:
    """Print what was submitted; run the queue of this machine where that is the cluster."""
    print(
        f"job {submitted.job_id} ({submitted.plan.job_name})\nrun directory {submitted.run.path}\n"
        f"logs {submitted.plan.log_folder}",
        flush=True,
    )
    unsent_notices.send_in_background(submitted.run)
    if submitted.plan.scheduler == "local":
        follower = ProgressFollower(submitted.run, total_steps=submitted.plan.total_steps)
        local.LocalScheduler(submitted.run).run_queue(local.print_event, follower.poll)
        unsent_notices.send_in_background(submitted.run)  # a STOP of the queue itself
