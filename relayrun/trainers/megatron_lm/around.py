"""What stands around Megatron-LM's own command in an attempt: W&B's flags behind it, and NCCL's log."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from relayrun.trainers.wandb import wandb_mode


def wandb_flags(words: Sequence[str], *, project: str, name: str, folder: Path) -> list[str]:
    """The flags for W&B that are not there yet, where this job has it: WANDB_API_KEY, or WANDB_MODE=offline."""
    if wandb_mode(os.environ) is None:
        return []
    given = {word.partition("=")[0] for word in words}
    wanted = {"--wandb-project": project, "--wandb-exp-name": name, "--wandb-save-dir": str(folder)}
    return [word for flag, value in wanted.items() if flag not in given for word in (flag, value)]


def nccl_log(folder: Path) -> dict[str, str]:
    """NCCL's words into a file of each process, named by its node and process id."""
    return {
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO"),
        "NCCL_DEBUG_FILE": f"{folder}/nccl-info-hostname-%h-pid-%p.txt",
    }
