"""What the agents of a run are told to look for on each node."""

from __future__ import annotations

import sys
from dataclasses import asdict

from relayrun.config.compose.schema import CommonConfig
from relayrun.control.rundir.node_health import HealthPlan


def node_health_plan(config: CommonConfig) -> dict[str, object]:
    """What is looked for on each node, for the plan; nothing where nobody looks."""
    chain, job = config.chain, config.job
    if chain.node_health == "off":
        return {}
    limits, python = chain.node_health_limits, config.cluster.python or sys.executable
    return asdict(
        HealthPlan(
            mode=chain.node_health,
            memory=None if limits.memory_gb == "auto" else limits.memory_gb * 1e9,
            shm=limits.shm_gb * 1e9,
            tmp=limits.tmp_gb * 1e9,
            clock_seconds=limits.clock_seconds,
            open_files=limits.open_files,
            slower=limits.slower,
            command=chain.node_health_command,
            command_seconds=limits.command_seconds,
            gpus=job.gpus_per_node,
            gpu_program=[python, "-P", "-m", "relayrun.train.gpu_health"] if job.gpus_per_node else [],
            probe_program=[python, "-P", "-m", "relayrun.train.node_benchmark"],
        )
    )
