"""Evaluations in W&B: a run of their own in the training's group, whose axis is the evaluated iteration.

A result comes when training is long past its iteration, or over, and W&B's steps only rise. So the step is the
number of the result, in the order in which they came; as everywhere, W&B is asked what it has and told the rest.
"""

from __future__ import annotations

import fcntl

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.rundir import evaluations
from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import read_tracker_runs
from relayrun.control.trainers.wandb import WandbMode
from relayrun.train.reporting import wandb_files
from relayrun.train.reporting.sinks import wandb_client_settings


def send_evaluations(run: Run, config: CommonConfig, mode: WandbMode) -> None:
    """Send what W&B lacks of the results. Raises whatever the client raises."""
    streams = read_tracker_runs(run)
    results = sorted(
        (r for r in evaluations.evaluation_results(run) if r.status == "done"), key=lambda result: result.time
    )
    if not streams or not results:
        return
    import wandb

    name = f"{streams[0].id}-evaluation"
    (run.path / "wandb").mkdir(exist_ok=True)
    with open(run.evaluations / "wandb.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two jobs may end at once
        client = wandb.init(
            project=config.project,
            name=f"{config.name}-evaluation",
            id=name,
            group=config.name,
            job_type="evaluation",
            resume="allow" if mode == "online" else None,
            mode=mode,
            dir=str(run.path),
            settings=wandb_client_settings(),
        )
        known = (
            client.starting_step - 1 if mode == "online" else wandb_files.highest_wandb_step(run.path / "wandb", name)
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
