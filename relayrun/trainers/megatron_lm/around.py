"""What stands around Megatron-LM's own command in an attempt: nsys before it, W&B's flags behind it, NCCL's log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

NSYS_TRACE = "nvtx,cudnn,cublas,cuda"


def nsys_command(folder: Path) -> list[str]:
    """What stands before the program of each rank; a file a rank, named by its node and its number.

    Recorded is what lies between cudaProfilerStart and Stop, which `--profile` calls on the chosen ranks.
    """
    return [
        "nsys",
        "profile",
        "-s",
        "none",
        f"--trace={NSYS_TRACE}",
        f"--output={folder}/nsys-trace-hostname-%h-procid-%q{{SLURM_PROCID}}.nsys-rep",
        "--force-overwrite",
        "true",
        "--capture-range=cudaProfilerApi",
        "--capture-range-end=stop",
    ]


def wandb_flags(words: Sequence[str], *, project: str, name: str, folder: Path) -> list[str]:
    """The flags for W&B that are not there yet, where this job has it: WANDB_API_KEY, or WANDB_MODE=offline."""
    if not has_wandb(os.environ):
        return []
    given = {word.partition("=")[0] for word in words}
    wanted = {"--wandb-project": project, "--wandb-exp-name": name, "--wandb-save-dir": str(folder)}
    return [word for flag, value in wanted.items() if flag not in given for word in (flag, value)]


def has_wandb(environment: Mapping[str, str]) -> bool:
    """Whether W&B is on in an environment, by the same rule as for the native trainer."""
    mode = environment.get("WANDB_MODE", "online" if environment.get("WANDB_API_KEY") else "disabled")
    return mode in ("online", "offline")


def nccl_log(folder: Path) -> dict[str, str]:
    """NCCL's words into a file of each process, named by its node and process id."""
    return {
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO"),
        "NCCL_DEBUG_FILE": f"{folder}/nccl-info-hostname-%h-pid-%p.txt",
    }
