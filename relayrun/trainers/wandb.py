"""What makes all attempts of a foreign program one run of W&B, where it uses W&B."""

from __future__ import annotations

import logging

from relayrun.errors import RunDirError
from relayrun.rundir.run import Run
from relayrun.rundir.streams import record_streams

log = logging.getLogger(__name__)


def variables(run: Run) -> dict[str, str]:
    """Return the environment variables that name W&B's run: the same one up to a rewind."""
    try:
        return {"WANDB_RUN_ID": record_streams(run)[-1].id, "WANDB_RESUME": "allow"}
    except RunDirError as error:  # no attempt fails for it: W&B begins another run
        log.warning("%s: %s", run.streams, error.message)
        return {}
