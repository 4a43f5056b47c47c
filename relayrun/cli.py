"""`relayrun`: the one command line; launchers and scripts are thin doors into the same functions."""

from __future__ import annotations

import argparse
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
    options = parser.parse_args(argv)
    return run_main(lambda: int(options.run(options)))


def add_submit(parser: argparse.ArgumentParser) -> None:
    """The arguments of `relayrun submit`, also those of launchers/submit.py."""
    parser.add_argument("config", type=Path, help="run config, for example configs/runs/demo.yaml")
    parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="NAME=VALUE",
                        help="override a setting: --set training.steps=50")  # fmt: skip
    parser.add_argument("--dry-run", action="store_true", help="print the job script; write and submit nothing")
    parser.add_argument("--resume", action="store_true", help="go on although the chain of this run has ended")
    parser.set_defaults(run=run_submit)


def run_submit(options: argparse.Namespace) -> int:
    """Submit, or print, one run."""
    from relayrun import submission
    from relayrun.chain import local, render
    from relayrun.config import compose
    from relayrun.rundir.layout import RunDir

    config = compose.load(options.config, options.overrides)
    if options.dry_run:
        run = RunDir(Path(config.run_dir or ""))
        print(
            render.job_script(submission.make_plan(config, run, revision=max(run.revisions(), default=0) + 1), run),
            end="",
        )
        return 0
    submitted = submission.submit(config, resume=options.resume)
    print(f"job {submitted.job_id} ({submitted.plan.job_name})\nrun directory {submitted.run.path}\n"
          f"logs {submitted.plan.log_folder}", flush=True)  # fmt: skip
    if submitted.plan.scheduler == "local":
        local.LocalScheduler(submitted.run).run_queue(local.print_event)
    return 0


if __name__ == "__main__":
    sys.exit(main())
