"""The W&B run of the evaluations, besides the training's own.

An evaluation may end long after its iteration, and W&B's steps only rise, so a step is the number of the result by
time. As everywhere, W&B is asked what it has, and gets the rest.
"""

from __future__ import annotations

import fcntl

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import read_tracker_runs
from relayrun.control.trainers.tools import WandbMode
from relayrun.leftovers import open_lock
from relayrun.train.reporting import trackers


def send_evaluations(run: Run, config: CommonConfig, mode: WandbMode) -> None:
    """Send the results that W&B lacks. Raises any error of the client."""
    streams = read_tracker_runs(run)
    results = sorted(
        (r for r in evaluations.evaluation_results(run) if r.status == "done"), key=lambda result: result.time
    )
    if not streams or not results:
        return
    import wandb

    with open(open_lock(run.evaluations / "wandb.lock"), "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two jobs may end at the same time
        client, known = trackers.start_wandb_client(
            run,
            config,
            mode,
            run_id=f"{streams[0].id}-evaluation",
            name=f"{config.name}-evaluation",
            job_type="evaluation",
        )
        client.define_metric("evaluation/*", step_metric="iteration")
        for number, result in enumerate(results, 1):
            if number > known:
                values = {
                    f"evaluation/{task}/{metric}": value
                    for task, metrics in result.results.items()
                    for metric, value in metrics.items()
                }
                client.log(values | {"iteration": result.iteration, "_timestamp": result.time}, step=number)
        client.finish(exit_code=0)
        wandb.teardown()
