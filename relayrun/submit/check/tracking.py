"""Whether Weights & Biases is on, and whether its key has the form of one. The key itself is never shown."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from relayrun.config.compose.schema import CommonConfig, MegatronConfig, RunConfig
from relayrun.control.trainers.wandb import wandb_mode
from relayrun.submit.check.findings import Findings

WANDB_KEY = re.compile(r"(?:local-)?[0-9a-f]{40}|wandb_v1_[A-Za-z0-9_]{40,}")
"""Forms of W&B's keys: 40 hexadecimal digits, of an own server with `local-` in front, and the longer new ones."""


def check_wandb(config: CommonConfig, findings: Findings, environment: Mapping[str, str] = os.environ) -> None:
    """Look at W&B's variables, of this environment and of `cluster.environment`."""
    name = "tracking.wandb"
    if "WANDB_API_KEY" in config.cluster.environment:
        findings.refuse(
            name,
            "a key stands in the config, which is copied into the run directory",
            setting="cluster.environment.WANDB_API_KEY",
            value="(not shown)",
            remedy="take it out, and export WANDB_API_KEY in the environment that submits",
        )
    if not isinstance(config, RunConfig | MegatronConfig):
        findings.ok(name, f"W&B is the program's own affair: nothing is sent for a run of trainer {config.trainer}")
        return
    environment = {**environment, **config.cluster.environment}
    key, mode = environment.get("WANDB_API_KEY", ""), wandb_mode(environment)
    if mode == "offline":
        findings.ok(name, "W&B writes files beside the run (WANDB_MODE=offline), for scripts/tools/sync_wandb.py")
    elif mode is None:
        findings.ok(name, "W&B is off: neither WANDB_API_KEY nor WANDB_MODE=offline is in the environment")
    elif WANDB_KEY.fullmatch(key) is None:
        blanks = ", with blanks or line breaks around it" if key != key.strip() else ""
        findings.warn(
            name,
            f"WANDB_API_KEY has {len(key)} characters{blanks} and not the form of a key: W&B will refuse it",
            remedy="export the key that the W&B site shows, 40 characters or wandb_v1_...",
        )
    else:
        findings.ok(name, "W&B is on; WANDB_API_KEY has the form of a key")
