#!/usr/bin/env python3
"""Copy runs of a W&B project into another one, for a report or to show some runs of many.

copy_wandb_project.py -se me -sp experiments -de my-team -dp paper -r f5v94x1q -n baseline

Every row of the history with its step and time, config, summary, name, tags. Called again, it sends what is missing.
"""

from __future__ import annotations

import argparse
import sys

from relayrun.errors import InputError, run_main
from relayrun.monitoring.trackers.wandb_copy import Project, copy_project


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-se", "--source-entity", required=True, metavar="ENTITY", help="user or team")
    parser.add_argument("-sp", "--source-project", required=True, metavar="PROJECT")
    parser.add_argument("-de", "--destination-entity", required=True, metavar="ENTITY")
    parser.add_argument("-dp", "--destination-project", required=True, metavar="PROJECT")
    parser.add_argument("-r", "--run-id", nargs="+", default=[], metavar="ID", help="default: all runs of the project")
    parser.add_argument("-n", "--new-name", metavar="NAME", help="name of the copy, for one run")
    options = parser.parse_args()
    import wandb

    try:
        for line in copy_project(
            wandb.Api(),
            Project(options.source_entity, options.source_project),
            Project(options.destination_entity, options.destination_project),
            run_ids=options.run_id,
            new_name=options.new_name,
        ):
            print(line, flush=True)
    except (wandb.Error, ValueError) as error:  # wandb's Api says with ValueError what it does not find
        raise InputError(f"W&B: {error}") from None


if __name__ == "__main__":
    sys.exit(run_main(main))
