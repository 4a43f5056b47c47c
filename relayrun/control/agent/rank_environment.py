"""What differs between ranks and rounds in the environment of a rank, under the names that srun and torch give it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from relayrun.control.agent.lines import Message
from relayrun.control.agent.memory_copies import MEMORY_FOLDER_VARIABLE, MEMORY_ITERATION_VARIABLE
from relayrun.control.rundir import rounds


def rank_environment(
    rank: int, start: Message, *, local: int, per_node: int, keep_address: bool, memory: Path | None
) -> Mapping[str, str]:
    """Return the variables of this rank.

    Args:
        start: the coordinator's order. local: its number on its node, of `per_node`.
        keep_address: MASTER_ADDR is as the site says, wherever rank 0 is.
        memory: where ranks keep copies of their state; None: nowhere.
    """
    size, keep = str(start["nodes"] * per_node), keep_address or start["address"] is None
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local),
        "WORLD_SIZE": size,
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(local),
        "SLURM_NTASKS": size,
        **({"SLURM_NODEID": str(rank // per_node)} if "SLURM_NODEID" in os.environ else {}),
        **({} if keep else {"MASTER_ADDR": start["address"]}),
        "MASTER_PORT": str(start["port"]),
        rounds.RESTART_VARIABLE: str(start["round"]),
        MEMORY_FOLDER_VARIABLE: str(memory or ""),
        MEMORY_ITERATION_VARIABLE: "" if start["memory"] is None else str(start["memory"]),
    }
