"""GPUs among the options of sbatch: asked for by `--gpus-per-node` or in another way, never in two ways."""

from __future__ import annotations

import re
from collections.abc import Mapping


def asks_for_gpus(options: Mapping[str, str | None]) -> bool:
    """Whether one of these options asks for GPUs, so that `--gpus-per-node` must not."""
    by_name = any(name in options for name in ("gpus", "gpus-per-task", "gpus-per-socket"))
    listed = f"{options.get('gres') or ''},{options.get('tres-per-task') or ''}"
    return by_name or any(_is_gpu_resource(part) for part in listed.split(","))


def gres_with_gpus(gres: str, gpus: str) -> str:
    """The option `gres` with other GPUs: their number, or type and number; without GPUs where `gpus` is 0.

    A type in `gres` stays where `gpus` names none.
    """
    parts = []
    for part in gres.split(","):
        if not _is_gpu_resource(part):
            parts.append(part)
        elif gpus != "0":
            kind = [word for word in part.partition("(")[0].split(":")[1:] if not word.isdecimal()]
            parts.append(":".join(["gpu", *(kind if gpus.isdecimal() else []), gpus]))
    return ",".join(parts)


def gpu_options_like_script(options: Mapping[str, str], script: Mapping[str, str | None]) -> dict[str, str]:
    """A job's options, read back from Slurm, for a script whose own options ask for GPUs in their way."""
    found = dict(options)
    if "gpus-per-node" in found and asks_for_gpus(script):
        gpus = found.pop("gpus-per-node").partition("(")[0]
        if gres := script.get("gres"):
            found["gres"] = gres_with_gpus(gres, gpus)
    return found


def _is_gpu_resource(part: str) -> bool:
    return re.match(r"(gres[/:])?gpu\b", part) is not None
