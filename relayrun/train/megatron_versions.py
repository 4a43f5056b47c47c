"""Supported versions of megatron-core, and everything in which they differ.

Each function below does one thing that the versions do differently, and says since which version. It inspects
megatron-core instead of its version number, since a container may hold a state between two versions. megatron-core is
imported inside the functions: `check` must work if that import fails.
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
"""First supported version, and first unsupported version after it."""
TRITON = (0, 19)
"""Since this version `import megatron.core` needs triton, which it does not declare; torch for GPUs brings it."""
SUPPORTED = f"{FIRST[0]}.{FIRST[1]} to {BEHIND[0]}.{BEHIND[1] - 1}"

_PART = re.compile(r"^(MAJOR|MINOR|PATCH) = (\d+)$", re.M)


def installed_version() -> tuple[int, ...] | None:
    """Return the version [major, minor, patch] that `import megatron.core` would find, without importing it.

    None if it is missing or has no version. A source folder in PYTHONPATH counts, as for an import.
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
    """Return why relayrun does not run with the installed megatron-core, and a hint; None if it does.

    An unknown version passes.
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
    """Suppress warnings of megatron-core about choices that relayrun makes on purpose.

    Since 0.18 DistributedDataParallel warns that it got no buffer layout, and makes the same layout. Since 0.19
    GPTModel warns that it gets only bug fixes, and names a successor.
    """
    for module in ("distributed.distributed_data_parallel", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{module}").setLevel(logging.ERROR)


def batch_of_context_rank(parts: dict[str, Any]) -> dict[str, Any]:
    """Return this context-parallel rank's part of a batch: tensors [batch, sequence], two parts of each sequence.

    Since 0.18 the function must be told that the groups are not hybrid, and without a group it takes all ranks.
    """
    from megatron.core.parallel_state import get_context_parallel_group
    from megatron.core.utils import get_batch_on_this_cp_rank

    named = {"is_hybrid_cp": False} if "is_hybrid_cp" in inspect.signature(get_batch_on_this_cp_rank).parameters else {}
    found: dict[str, Any] = get_batch_on_this_cp_rank(parts, cp_group=get_context_parallel_group(), **named)
    return found


def gradients_for_norm(optimizer: Any) -> list[Any]:
    """Return the gradients of a megatron-core optimizer that count for the norm, each on one rank only.

    Since 0.19 the method has another name. Groups with a norm of their own (multi-token prediction) are not used.
    """
    find = getattr(optimizer, "get_main_grads_for_grad_norm", None) or optimizer.get_grads_for_grad_norm
    gradients: list[Any] = find()
    return gradients


def with_feed_forward(part: Any, module: type) -> Any:
    """Return the feed-forward part of a layer spec with `module`, a subclass of MLP, as its class.

    Since 0.18 the part is a functools.partial over `MLP.as_mlp_submodule`, before a ModuleSpec.
    """
    if isinstance(part, functools.partial):
        return functools.partial(module.as_mlp_submodule, *part.args, **part.keywords)  # type: ignore[attr-defined]
    part.module = module
    return part


def with_experts(part: Any, module: type) -> Any:
    """Return the expert part of a layer spec with `module`, a subclass of SequentialMLP, as the class of the experts.

    Since 0.17 the experts are a functools.partial over their class, since 0.18 the part around them, too; before, both
    are a ModuleSpec.
    """
    around = part.keywords["submodules"] if isinstance(part, functools.partial) else part.submodules
    if isinstance(around.experts, functools.partial):
        around.experts = functools.partial(module, *around.experts.args, **around.experts.keywords)
    else:
        around.experts.module = module
    return part
