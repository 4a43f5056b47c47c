"""What can be known to be wrong before anything is submitted."""

from __future__ import annotations

import os
from pathlib import Path

from relayrun.config.schema import RunConfig
from relayrun.errors import ConfigError


def check(config: RunConfig) -> None:
    """Raise a RelayrunError for the first thing that would make a job fail.

    The schema has judged the numbers already; here are the things that lie outside the config.
    """
    run_dir = Path(config.run_dir or "")
    for place in config.cluster.read_only_paths:
        protected = Path(os.path.realpath(place))
        if Path(os.path.realpath(run_dir)).is_relative_to(protected):
            raise ConfigError(f"cluster {config.cluster.name!r} allows no writing below {place}",
                              where=run_dir, hint="set run_dir to another file system")  # fmt: skip
