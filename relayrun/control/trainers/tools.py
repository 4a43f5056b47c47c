"""Tools around the program of a rank: W&B and Nsight Systems.

Says whether W&B is on, gives the variables that make all attempts one run of W&B, and the command of nsys.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.errors import RunDirError

NSYS_TRACE = "nvtx,cudnn,cublas,cuda"


def nsys_command(output: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command prefix that records a rank between cudaProfilerStart and cudaProfilerStop.

    `output`: a file per rank; nsys fills in `%h` and `%q{VARIABLE}`. `options`: further ones, `--NAME=VALUE`, which
    replace default ones.
    """
    own = [
        "--sample=none",
        f"--trace={NSYS_TRACE}",
        f"--output={output}",
        "--force-overwrite=true",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
    ]
    given = {option.partition("=")[0] for option in options}
    return ["nsys", "profile", *(option for option in own if option.partition("=")[0] not in given), *options]


WandbMode = Literal["online", "offline"]

log = logging.getLogger(__name__)


def wandb_mode(environment: Mapping[str, str]) -> WandbMode | None:
    """Return whether W&B is on, from its own variables: WANDB_API_KEY, or WANDB_MODE=offline; None if it is off."""
    wanted = environment.get("WANDB_MODE", "online" if environment.get("WANDB_API_KEY") else "disabled")
    if wanted == "offline":
        return "offline"
    return "online" if wanted in ("online", "run") and environment.get("WANDB_API_KEY") else None


def wandb_variables(run: Run) -> dict[str, str]:
    """Return the environment variables that name W&B's run: the same one up to a rollback."""
    try:
        return {"WANDB_RUN_ID": update_tracker_runs(run)[-1].id, "WANDB_RESUME": "allow"}
    except RunDirError as error:  # no attempt fails for it: W&B begins another run
        log.warning("%s: %s", run.streams, error.message)
        return {}
