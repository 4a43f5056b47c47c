"""What stands around Megatron-LM's own command in an attempt: W&B's flags behind it, and NCCL's log."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from relayrun.control.rundir.run import Run
from relayrun.control.trainers.wandb import wandb_mode


def wandb_flags(words: Sequence[str], *, project: str, name: str) -> list[str]:
    """The flags for W&B that are not there yet, where this job has it: WANDB_API_KEY, or WANDB_MODE=offline."""
    if wandb_mode(os.environ) is None:
        return []
    return _missing_flags(words, {"--wandb-project": project, "--wandb-exp-name": name})


def wandb_folder_flags(words: Sequence[str], run: Run) -> list[str]:
    """The flags of folders that W&B needs where the words turn it on; those that are given stay.

    Megatron-LM's own folder of W&B lies among the checkpoints. It tells W&B the loss, its gradient norm and learning
    rate only where it writes event files of TensorBoard, too.
    """
    if "--wandb-project" not in _flag_names(words):
        return []
    return _missing_flags(words, {"--wandb-save-dir": str(run.path), "--tensorboard-dir": str(run.tensorboard)})


def _missing_flags(words: Sequence[str], wanted: Mapping[str, str]) -> list[str]:
    given = _flag_names(words)
    return [word for flag, value in wanted.items() if flag not in given for word in (flag, value)]


def _flag_names(words: Sequence[str]) -> set[str]:
    return {word.partition("=")[0] for word in words}


def nccl_log_variables(folder: Path) -> dict[str, str]:
    """NCCL's words into a file of each process, named by its node and process id."""
    return {
        "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "INFO"),
        "NCCL_DEBUG_FILE": f"{folder}/nccl-info-hostname-%h-pid-%p.txt",
    }
