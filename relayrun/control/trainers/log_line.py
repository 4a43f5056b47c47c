"""The lines in which Megatron-LM says how far it is, from `training_log` of its megatron/training/training.py.

     [2026-11-22 20:40:12] iteration       12/      16 | consumed samples:           48 | elapsed time per iteration
    (ms): 103.2 | learning rate: 1.000000E-04 | global batch size:     4 | lm loss: 9.555802E+00 | loss scale: 1.0 |
    grad norm: 1.675 | number of skipped iterations:   0 | number of nan iterations:   0 |

(one line in the log). Forks add fields; every field that is a number is kept. Rank 0 also says when it begins a save.
"""

from __future__ import annotations

import math
import re

from relayrun.control.trainers.base import ObservedStep

METRIC_NAMES = {
    "lm loss": "loss",
    "grad norm": "grad_norm",
    "learning rate": "lr",
    "global batch size": "global_batch_size",
    "throughput per GPU (TFLOP/s/GPU)": "model_tflops_per_gpu",
    "tokens/sec/gpu": "tokens_per_second_per_gpu",
}
"""Megatron's names of what `metrics.jsonl` has under a name of its own."""

_ITERATION = re.compile(r"\biteration +(\d+)/ *(\d+) \|")
_FIELD = re.compile(r" ([^|:]+): +([^|]*?) \|")
_SAVING = re.compile(r"saving checkpoint at iteration +(\d+) to ")


def parse_step(line: str) -> ObservedStep | None:
    """The iteration that a line of the log tells of; None where it tells of none."""
    if (found := _ITERATION.search(line)) is None:
        return None
    metrics: dict[str, float] = {}
    seconds: float | None = None
    samples: int | None = None
    for name, text in _FIELD.findall(line[found.end() - 1 :]):
        value = _finite_number(text)
        if value is None:
            continue
        if name == "elapsed time per iteration (ms)":
            seconds = value / 1000
        elif name == "consumed samples":
            samples = int(value)
        else:
            metrics[METRIC_NAMES.get(name, _plain_name(name))] = int(value) if name == "global batch size" else value
    return ObservedStep(iteration=int(found[1]), seconds=seconds, consumed_samples=samples, metrics=metrics)


def parse_save(line: str) -> int | None:
    """The iteration whose save a line says begins; None where it says none."""
    found = _SAVING.search(line)
    return None if found is None else int(found[1])


def _finite_number(text: str) -> float | None:
    """A number; infinite ones are kept out, since JSON has none."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
