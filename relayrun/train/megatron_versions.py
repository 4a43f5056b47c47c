"""Which versions of megatron-core the ranks run with, and everything in which these differ.

Each function below does one thing that its versions do in different ways, and says since which. It asks megatron-core
what it has, not for its number: a container may hold a state between two versions. What all supported versions do alike
is imported from megatron-core where it is used.

Nothing is imported before it is needed: `check_version` must be able to speak where an import of megatron-core fails.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import logging
import re
from pathlib import Path
from typing import Any

from relayrun.errors import FatalTrainingError

FIRST, BEHIND = (0, 16), (0, 20)
"""Versions are supported from the one, and before the other."""
TRITON = (0, 19)
"""Since then `import megatron.core` needs triton, which it does not declare; torch for GPUs brings it along."""
SUPPORTED = f"{FIRST[0]}.{FIRST[1]} to {BEHIND[0]}.{BEHIND[1] - 1}"

_PART = re.compile(r"^(MAJOR|MINOR|PATCH) = (\d+)$", re.M)


def installed_version() -> tuple[int, ...] | None:
    """Return the version that `import megatron.core` would find, as [major, minor, patch], without importing it.

    None: there is none, or it does not say. A source folder in PYTHONPATH counts, as it does for an import.
    """
    try:
        found = importlib.util.find_spec("megatron.core")
    except ImportError:
        return None
    for folder in (found.submodule_search_locations or []) if found else []:
        try:
            parts = dict(_PART.findall((Path(folder) / "package_info.py").read_text()))
        except (OSError, UnicodeDecodeError):
            continue
        if parts.keys() == {"MAJOR", "MINOR", "PATCH"}:
            return int(parts["MAJOR"]), int(parts["MINOR"]), int(parts["PATCH"])
    return None


def version_problem() -> tuple[str, str] | None:
    """Return why relayrun does not run with the megatron-core of this Python, and what to do; None: it does.

    A version that is not known passes: it is somebody's own.
    """
    version = installed_version()
    if version is None:
        return None
    words = ".".join(map(str, version))
    if not FIRST <= version[:2] < BEHIND:
        return (
            f"megatron-core {words} is not supported: relayrun runs with {SUPPORTED}",
            "pip install 'relayrun[train]' in the ranks' Python, or take a container with one of these versions",
        )
    if version[:2] >= TRITON and importlib.util.find_spec("triton") is None:
        return (
            f"megatron-core {words} imports triton, which is not installed where the ranks run",
            "pip install triton, or megatron-core 0.16.1, which does without",
        )
    return None


def check_version() -> None:
    """Raise FatalTrainingError if relayrun does not run with the megatron-core of this Python."""
    if (found := version_problem()) is not None:
        raise FatalTrainingError(found[0], hint=found[1])


def quiet_megatron() -> None:
    """Leave out what megatron-core says, once a rank, of choices that are made here on purpose.

    Since 0.18 its DistributedDataParallel warns that it was given no layout of the buffers, and makes the same one.
    Since 0.19 GPTModel warns that only its faults are still mended, and names a successor.
    """
    for module in ("distributed.distributed_data_parallel", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{module}").setLevel(logging.ERROR)


def batch_of_context_rank(parts: dict[str, Any]) -> dict[str, Any]:
    """Return this context-parallel rank's part of a batch: tensors [batch, sequence], two parts of each sequence.

    Since 0.18 the function has to be told that the groups are not hybrid ones.
    """
    from megatron.core.utils import get_batch_on_this_cp_rank

    named = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    found: dict[str, Any] = get_batch_on_this_cp_rank(parts, **named)
    return found


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """Return the gradients of one of megatron-core's optimizers that count for the norm, each on one rank alone.

    Since 0.19 the method has another name. Its groups with a norm of their own, of multi-token prediction, are not
    used here.
    """
    find = getattr(optimizer, "get_main_grads_for_grad_norm", None) or optimizer.get_grads_for_grad_norm
    gradients: list[Any] = find()
    return gradients


def with_feed_forward(part: Any, module: type) -> Any:
    """Return the feed-forward part of a layer spec with another class for its module, a subclass of MLP.

    Since 0.18 the part is a functools.partial over `MLP.as_mlp_submodule`, before it is a ModuleSpec.
    """
    if isinstance(part, functools.partial):
        return functools.partial(module.as_mlp_submodule, *part.args, **part.keywords)  # type: ignore[attr-defined]
    part.module = module
    return part


def with_experts(part: Any, module: type) -> Any:
    """Return the part of a layer spec with experts, with another class for these, a subclass of SequentialMLP.

    Since 0.17 the experts are a functools.partial over their class, and since 0.18 the part around them is one too;
    before, both are a ModuleSpec.
    """
    around = part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules
    if isinstance(around.experts, functools.partial):
        around.experts = functools.partial(module, *around.experts.args, **around.experts.keywords)
    else:
        around.experts.module = module
    return part
