#!/usr/bin/env python3
"""Send a run's metrics to W&B from a machine with network: `scripts/tools/sync_wandb.py project/name`.

For runs whose nodes have none (WANDB_MODE=offline), or whose service was away. Reads the run directory, asks the
service up to where each of the run's ids goes, and sends what is above that. It may be called as often as one likes,
also while the run goes on.
"""

import argparse
import os
import sys

from relayrun.config.compose import resolve
from relayrun.control.rundir import find_runs
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.errors import InputError, RunDirError, run_main
from relayrun.train.reporting import trackers
from relayrun.train.reporting.trackers import PointReader, WandB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory, or project/name below logs/runs")
    options = parser.parse_args()
    if not os.environ.get("WANDB_API_KEY"):
        raise InputError("WANDB_API_KEY is not in the environment", hint="export it; it is written nowhere")
    for name in options.runs:
        run = find_runs.find_run(name)
        if not run.attempt_numbers():
            raise RunDirError("this run has not begun", where=run.path)
        config = resolve.read_resolved_config(run.config_revision(run.revisions()[-1]))
        streams = update_tracker_runs(run)
        for number, stream in enumerate(streams):
            sink = WandB(run, stream, config, "online")
            before = sink.mark
            newest = run.attempt(run.attempt_numbers()[-1])
            complete = stream is not streams[-1] or newest.outcome.exists()
            for point in PointReader.of_stream(run, streams, number, mark=sink.mark).poll(complete=complete):
                sink.write(point)
            sink.close()
            print(
                f"{config.project}/{config.name}: id {stream.id}: the service had iteration {before}, "
                f"sent up to {sink.mark}"
            )
        trackers.send_evaluations(run, config, "online")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
