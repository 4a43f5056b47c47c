"""`relayrun`: the one command line; launchers and scripts are thin doors into the same functions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import relayrun
from relayrun.errors import run_main


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `relayrun` command."""
    parser = argparse.ArgumentParser(prog="relayrun", description=relayrun.__doc__)
    parser.add_argument("--version", action="version", version=f"relayrun {relayrun.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    add_submit(commands.add_parser("submit", help="submit a training run"))
    launch = commands.add_parser("launch", help="what the sbatch scripts of launchers/ call")
    launch.add_argument("config", type=Path)
    launch.add_argument("--dry-run", action="store_true", help="print the job script; write nothing")
    launch.set_defaults(run=run_launch)
    data = commands.add_parser("data", help="what a run reads: show samples, the ledger, the difference of two runs")
    add_data(data)
    options = parser.parse_args(argv)
    return run_main(lambda: int(options.run(options)))


def add_submit(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun submit`, also those of launchers/submit.py."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE",
                        help="override a setting: --set training.steps=50")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the job script; write and submit nothing")
    parser.add_argument("--resume", action="store_true", help="go on although the chain of this run has ended")
    parser.add_argument("--accept-data-change", action="store_true",
                        help="go on with data that are not those the run began with (docs/data-order.md)")  # fmt: skip
    parser.set_defaults(run=run_submit)


def add_data(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun data`."""
    commands = parser.add_subparsers(dest="data_command", required=True)
    show = commands.add_parser("show", help="samples by number: data set, document, offset, text")
    show.add_argument("runs", nargs=1, metavar="RUN", help="a run directory, or PROJECT/NAME")
    show.add_argument("--samples", required=True, metavar="FIRST:END", help="for example 1000:1010; END is left out")
    show.add_argument("--full", action="store_true", help="all of the text, not its first 300 characters")
    ledger = commands.add_parser("ledger", help="how much of each data set was read, and when it is exhausted")
    ledger.add_argument("runs", nargs=1, metavar="RUN")
    diff = commands.add_parser("diff", help="what differs in the data of two runs; exit code 1 if anything does")
    diff.add_argument("runs", nargs=2, metavar="RUN")
    parser.set_defaults(run=run_data)


def run_data(options: argparse.Namespace) -> int:
    """Answer from run directories."""
    from relayrun.data import door

    return door.run(options)


def run_submit(options: argparse.Namespace) -> int:
    """Submit, or print, one run."""
    from relayrun import submission
    from relayrun.chain import local
    from relayrun.config import compose
    from relayrun.monitoring.follow import Follower

    config = compose.load(options.config, options.overrides)
    if options.dry_run:
        print(submission.dry_run(config), end="")
        return 0
    submitted = submission.submit(config, resume=options.resume,
                                  accept_data_change=options.accept_data_change)  # fmt: skip
    print(f"job {submitted.job_id} ({submitted.plan.job_name})\nrun directory {submitted.run.path}\n"
          f"logs {submitted.plan.log_folder}", flush=True)  # fmt: skip
    if submitted.plan.scheduler == "local":
        follower = Follower(submitted.run, total_steps=submitted.plan.total_steps)
        local.LocalScheduler(submitted.run).run_queue(local.print_event, follower.poll)
    return 0


def run_launch(options: argparse.Namespace) -> int:
    """Inside the first job of a Bash launcher: its settings are in the environment. Prints the run directory."""
    from relayrun import settings, submission
    from relayrun.config import compose

    config = compose.load(compose.ROOT / options.config, settings.overrides(os.environ))
    if options.dry_run:
        print(submission.dry_run(config), end="")
        return 0
    print(
        submission.adopt_job(
            config,
            resume=settings.flag(os.environ, "RESUME"),
            accept_data_change=settings.flag(os.environ, "ACCEPT_DATA_CHANGE"),
        ).path
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
