#!/usr/bin/env python3
"""Copy runs of a W&B project into another one, for a report or to show some runs of many.

copy_wandb_project.py -se me -sp experiments -de my-team -dp paper -r f5v94x1q 8k2j0c3w -n baseline larger-batch

Every row of the history with its step and time, system metrics, files, config, summary, name, tags. Called again, it
sends what is missing.
"""

from __future__ import annotations

import argparse
import sys

from relayrun.errors import InputError, run_main
from relayrun.train.reporting.wandb_runs import WandbProject, copy_project


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-se", "--src-entity", "--source-entity", required=True, metavar="ENTITY", help="user or team")
    parser.add_argument("-sp", "--src-project", "--source-project", required=True, metavar="PROJECT")
    parser.add_argument("-de", "--dst-entity", "--destination-entity", required=True, metavar="ENTITY")
    parser.add_argument("-dp", "--dst-project", "--destination-project", required=True, metavar="PROJECT")
    parser.add_argument(
        "-r", "--runs", "--run-id", nargs="*", default=[], metavar="ID", help="default: all runs of the project"
    )
    parser.add_argument(
        "-n", "--names", "--new-name", nargs="*", default=[], metavar="NAME", help="of the copies, one for each of -r"
    )
    options = parser.parse_args()
    import wandb

    try:
        for line in copy_project(
            wandb.Api(),
            WandbProject(options.src_entity, options.src_project),
            WandbProject(options.dst_entity, options.dst_project),
            run_ids=options.runs,
            names=options.names,
        ):
            print(line, flush=True)
    except (wandb.Error, ValueError) as error:  # wandb's Api says with ValueError what it does not find
        raise InputError(f"W&B: {error}") from None


if __name__ == "__main__":
    sys.exit(run_main(main))
