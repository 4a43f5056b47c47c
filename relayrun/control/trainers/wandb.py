"""Whether W&B is on, and what makes all attempts of a foreign program one run of W&B."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Literal

from relayrun.control.rundir.run import Run
from relayrun.control.rundir.tracker_runs import update_tracker_runs
from relayrun.errors import RunDirError

WandbMode = Literal["online", "offline"]

log = logging.getLogger(__name__)


def wandb_mode(environment: Mapping[str, str]) -> WandbMode | None:
    """Return whether W&B is on, from its own variables: WANDB_API_KEY, or WANDB_MODE=offline; None where it is off."""
    wanted = environment.get("WANDB_MODE", "online" if environment.get("WANDB_API_KEY") else "disabled")
    if wanted == "offline":
        return "offline"
    return "online" if wanted in ("online", "run") and environment.get("WANDB_API_KEY") else None


def wandb_variables(run: Run) -> dict[str, str]:
    """Return the environment variables that name W&B's run: the same one up to a rewind."""
    try:
        return {"WANDB_RUN_ID": update_tracker_runs(run)[-1].id, "WANDB_RESUME": "allow"}
    except RunDirError as error:  # no attempt fails for it: W&B begins another run
        log.warning("%s: %s", run.streams, error.message)
        return {}
