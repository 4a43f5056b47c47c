"""A checkpoint folder of Megatron-LM (`torch_dist`): where it is, where it stands, and what its arguments were.

    DIR/latest_checkpointed_iteration.txt
    DIR/iter_0000100/    .metadata  metadata.json  *.distcp  common.pt {args, iteration, optimizer, opt_param_scheduler}

Weights, and the moments of a plain optimizer, lie under the names that relayrun's own checkpoints have, since both
save with megatron-core. Without torch: a submit looks at such a folder, too.
"""

from __future__ import annotations

import re
from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relayrun.config.sections.training import BatchSizes
from relayrun.control.trainers.megatron_lm_program import TRACKER_FILE
from relayrun.errors import InputError
from relayrun.train.checkpoint import safe_pickle
from relayrun.train.checkpoint.safe_pickle import UnreadablePickle, is_inert

_COMMON = "common.pt"
_NAME = re.compile(r"iter_(\d{7,})")

DIRECT_SHARDINGS = ("fully_reshardable",)
"""Forms of a distributed optimizer's state that a run reads as they lie."""


@dataclass(frozen=True)
class MegatronCheckpoint:
    """What `common.pt` of one checkpoint of Megatron-LM says."""

    folder: Path
    """With .metadata and common.pt."""
    common: dict[str, Any]
    """Values, and inert records of what is none (`safe_pickle`)."""

    @property
    def args(self) -> dict[str, Any]:
        """The arguments of the program that saved it, by name."""
        found: dict[str, Any] = vars(self.common["args"])
        return found

    @property
    def iteration(self) -> int:
        return int(self.common["iteration"])

    @property
    def consumed_samples(self) -> int:
        return int(self.args.get("consumed_train_samples") or 0)

    @property
    def batch_sizes(self) -> BatchSizes:
        """As of its arguments. Raises ValueError."""
        ramp = self.args.get("rampup_batch_size")
        return BatchSizes(int(self.args["global_batch_size"]), None if ramp is None else [int(each) for each in ramp])

    @property
    def precision(self) -> str:
        """What `training.precision` calls it, or fp16, which no run here has."""
        return "bf16" if self.args.get("bf16") else "fp16" if self.args.get("fp16") else "fp32"

    @property
    def optimizer(self) -> dict[str, Any] | None:
        """The plain part of the optimizer's state; None where it was not saved."""
        found = self.common.get("optimizer")
        return found if isinstance(found, dict) else None

    @property
    def distributed(self) -> str | None:
        """The form of a distributed optimizer's state; None for a plain optimizer."""
        form = (self.optimizer or {}).get("param_state_sharding_type")
        return None if form is None else str(form)

    def optimizer_fault(self) -> str | None:
        """Why a run cannot go on with the optimizer's state as it lies here; None where it can."""
        if self.optimizer is None:
            return "it was saved without its optimizer"
        name = self.args.get("optimizer", "adam")
        if name != "adam":
            return f"its optimizer is {name}, and runs here have Adam"
        if self.args.get("use_precision_aware_optimizer"):
            return "its optimizer is the precision-aware one"
        if self.distributed is not None and self.distributed not in DIRECT_SHARDINGS:
            return f"the state of its distributed optimizer has the form {self.distributed}"
        return None

    def progress(self) -> dict[str, Any]:
        """Where it stands, as a checkpoint of a run says it (`Progress.state`)."""
        sizes, iteration, consumed = self.batch_sizes, self.iteration, self.consumed_samples
        first = 0, 0
        if sizes.consumed_by(iteration) != consumed:  # its batch sizes have changed on the way
            first = iteration, consumed
        leg = {"iteration": first[0], "consumed_samples": first[1], **sizes.to_json()}
        return {"iteration": iteration, "consumed_samples": consumed, "legs": [leg], "skipped": []}


def parse_common(data: bytes, folder: Path) -> MegatronCheckpoint | None:
    """Return what a common.pt with this content says; None where it is not one of Megatron-LM."""
    try:
        found = safe_pickle.read_pickle(data)
    except UnreadablePickle:
        return None
    if not isinstance(found, dict) or not isinstance(found.get("args"), Namespace):
        return None
    if not isinstance(found.get("iteration"), int) or isinstance(found.get("iteration"), bool):
        return None
    return MegatronCheckpoint(folder=folder, common=found)


def find_megatron_checkpoint(path: Path, iteration: int | None = None) -> MegatronCheckpoint | None:
    """Return the checkpoint of an iteration in a folder of Megatron-LM, or the one that is this folder.

    `iteration`: None for the one that the tracker names. Returns None where this is no folder of Megatron-LM. Raises
    InputError if it is one without that checkpoint, or with a torn one.
    """
    if (path / "metadata.json").is_file():
        folder = path
    elif (path / TRACKER_FILE).is_file():
        folder = path / _chosen(path, iteration)
    else:
        return None
    try:
        found = parse_common((folder / _COMMON).read_bytes(), folder)
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
    """Whether a value holds nothing but values."""
    if is_inert(value):
        return False
    if isinstance(value, dict):
        return all(is_plain_value(each) for pair in value.items() for each in pair)
    return all(is_plain_value(each) for each in value) if isinstance(value, (list, tuple, set, frozenset)) else True
