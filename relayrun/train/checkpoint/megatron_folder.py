"""Checkpoint folders of Megatron-LM (`torch_dist`): path, position, and the program's arguments.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/    .metadata  metadata.json  *.distcp  common.pt {args, iteration, optimizer, opt_param_scheduler}

Weights, and the moments of a plain optimizer, have the names of relayrun's own checkpoints, since both save with
megatron-core. Without torch: submit reads such a folder, too.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.config.sections.training import GlobalBatchSizes
from relayrun.control.trainers.megatron_lm_log import TRACKER_FILE
from relayrun.control.trainers.pickle_records import CorruptPickle, is_record
from relayrun.control.trainers.torch_files import read_bounded, read_torch_file
from relayrun.errors import InputError
from relayrun.publishing import InputFiles

_COMMON = "common.pt"
_NAME = re.compile(r"iter_(\d{7,})")

DIRECT_SHARDINGS = ("fully_reshardable",)
"""Forms of a distributed optimizer's state that a run can load directly."""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """Content of `common.pt` of one checkpoint of Megatron-LM."""

    folder: Path
    """Contains .metadata and common.pt."""
    common: dict[str, Any]
    """Plain values, and records of other objects (`pickle_records`)."""

    @property
    def args(self) -> dict[str, Any]:
        """Arguments of the program that saved it, by name."""
        found: dict[str, Any] = vars(self.common["args"])
        return found

    @property
    def iteration(self) -> int:
        return int(self.common["iteration"])

    @property
    def consumed_samples(self) -> int:
        return int(self.args.get("consumed_train_samples") or 0)

    @property
    def batch_sizes(self) -> GlobalBatchSizes:
        """Batch sizes from the arguments. Raises ValueError."""
        ramp = self.args.get("rampup_batch_size")
        return GlobalBatchSizes(
            int(self.args["global_batch_size"]), None if ramp is None else [int(each) for each in ramp]
        )

    @property
    def precision(self) -> str:
        """Value of `training.precision`, or fp16, which relayrun does not support."""
        return "bf16" if self.args.get("bf16") else "fp16" if self.args.get("fp16") else "fp32"

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """Plain part of the optimizer's state; None if it was not saved."""
        found = self.common.get("optimizer")
        return found if isinstance(found, dict) else None

    @property
    def distributed(self) -> str | None:
        """Form of a distributed optimizer's state; None for a plain optimizer."""
        form = (self.optimizer or {}).get("param_state_sharding_type")
        return None if form is None else str(form)

    def no_adam(self) -> str | None:
        """Return why there is no state of Adam; None if there is."""
        name = self.args.get("optimizer", "adam")
        if self.optimizer is not None and name != "adam":
            return f"its optimizer is {name}, and runs here have Adam"
        return "it was saved without its optimizer" if self.optimizer is None else None

    def optimizer_fault(self) -> str | None:
        """Return why a run cannot load the optimizer's state; None if it can."""
        if (words := self.no_adam()) is not None:
            return words
        if self.args.get("use_precision_aware_optimizer"):
            return "its optimizer is the precision-aware one"
        if self.distributed is not None and self.distributed not in DIRECT_SHARDINGS:
            return f"the state of its distributed optimizer has the form {self.distributed}"
        return None

    def fixed_settings(self) -> dict[str, object]:
        """Return the settings, by name, that a run needs to continue with the optimizer's state."""
        return {
            "parallel.use_distributed_optimizer": self.distributed is not None,
            "training.precision": self.precision,
        }

    def progress(self) -> dict[str, Any]:
        """Return the position as in a checkpoint of a run (`TrainingProgress.state`)."""
        sizes, iteration, consumed = self.batch_sizes, self.iteration, self.consumed_samples
        first = 0, 0
        if sizes.consumed_by(iteration) != consumed:  # the batch sizes changed during the run
            first = iteration, consumed
        leg = {"iteration": first[0], "consumed_samples": first[1], **sizes.to_json()}
        return {"iteration": iteration, "consumed_samples": consumed, "legs": [leg], "skipped": []}


def as_checkpoint(found: Any, folder: Path) -> MegatronCheckpoint | None:
    """Return the checkpoint with this content of common.pt; None if it is not from Megatron-LM."""
    if not isinstance(found, dict) or not isinstance(found.get("args"), Namespace):
        return None
    if not isinstance(found.get("iteration"), int) or isinstance(found.get("iteration"), bool):
        return None
    return MegatronCheckpoint(folder=folder, common=found)


def find_megatron_checkpoint(
    path: Path, iteration: int | None = None, read: InputFiles | None = None
) -> MegatronCheckpoint | None:
    """Return the checkpoint of an iteration in a folder of Megatron-LM, or the one in this folder itself.

    `iteration`: None for the one that the tracker file names. `read`: the checkpoint's files are added to it. Returns
    None if this is not a folder of Megatron-LM. Raises InputError if it lacks that checkpoint or the checkpoint is
    incomplete.
    """
    if (path / "metadata.json").is_file():
        folder = path
    elif (path / TRACKER_FILE).is_file():
        folder = path / _chosen(path, iteration)
    else:
        return None
    if read is not None:
        read.add_folder(folder)
    try:
        found = as_checkpoint(read_torch_file(read_bounded(folder / _COMMON)), folder)
    except CorruptPickle:
        return None
    except FileNotFoundError:
        if folder == path:
            return None
        raise InputError(
            f"there is no {_COMMON} in it", where=folder, hint=f"whole checkpoints: {_whole(path) or 'none'}"
        ) from None
    if found is not None and folder == path and iteration not in (None, found.iteration):
        raise InputError(f"this is the checkpoint of iteration {found.iteration}, not {iteration}", where=path)
    return found


def _chosen(path: Path, iteration: int | None) -> str:
    if iteration is not None:
        if not (path / f"iter_{iteration:07}").is_dir():
            raise InputError(
                f"this folder has no checkpoint of iteration {iteration}",
                where=path,
                hint=f"whole checkpoints: {_whole(path) or 'none'}",
            )
        return f"iter_{iteration:07}"
    text = (path / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    if text == "release":
        return text
    if not text.isdecimal():
        raise InputError(f"{TRACKER_FILE} names no iteration: {text[:40]!r}", where=path)
    return f"iter_{int(text):07}"


def _whole(path: Path) -> str:
    found = sorted(
        int(match[1])
        for each in path.iterdir()
        if (match := _NAME.fullmatch(each.name)) and (each / _COMMON).is_file() and (each / ".metadata").is_file()
    )
    return ", ".join(map(str, found))


def is_plain_value(value: Any) -> bool:
    """True if a value contains no record of an object."""
    if is_record(value):
        return False
    if isinstance(value, dict):
        return all(is_plain_value(each) for pair in value.items() for each in pair)
    return all(is_plain_value(each) for each in value) if isinstance(value, (list, tuple, set, frozenset)) else True
