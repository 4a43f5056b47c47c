"""Small native trainings on this machine: every loss to the last bit, and what their checkpoints hold."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.checkpoints import contents, flatten, raw
from tests.workspace import Workspace

from .masks import environment, write_json

STEPS, CUT = 10, 5
"""Iterations of a run, and the one behind which it is submitted again."""

RUNS: dict[str, dict[str, Any]] = {
    "shards": {
        "training": {"steps": STEPS, "stop_after": CUT, "eval_interval": CUT, "eval_steps": 1},
        "checkpoint": {"interval": CUT},
        "data": {
            "datasets": [],
            "split": 0.2,
            "mixture": {
                "first": {"path": "DATA/shard0", "weight": 0.3},
                "others": {"path": ["DATA/shard1", "DATA/shard2"], "weight": 0.7},
            },
        },
    },
    "documents": {
        "training": {"steps": STEPS, "stop_after": CUT, "loss_mean": "token"},
        "checkpoint": {"interval": CUT},
        "data": {
            "datasets": ["DATA"],
            "order": "document-window",
            "document_window": {"window": 32, "overlap": 4, "packing": "best_fit"},
            "reset_position_ids": True,
            "reset_attention_mask": True,
        },
        "parallel": {"use_distributed_optimizer": True},
        "optimizer": {"weight_decay": 0.1, "clip_grad": 0.5},
    },
}
"""Settings of runs with two ranks, of which the second half is an attempt of its own. DATA: the folder of shards."""

EXACT = (
    "iteration",
    "loss",
    "grad_norm",
    "lr",
    "consumed_samples",
    "consumed_tokens",
    "global_batch_size",
    "skipped",
    "validation",
)
"""Fields of a line of metrics.jsonl that a run gives again."""


def run(name: str, space: Workspace) -> Path:
    """Train a run in two attempts; return its run directory."""
    sections = json.loads(json.dumps(RUNS[name]).replace("DATA", str(space.folder / "data")))
    sections["data"]["tokenizer"] = str(space.folder / "tokenizer.json")
    sections |= {"cluster": {"name": "local", "scheduler": "local", "python": None}}
    config = space.config(name, **sections)
    for further in ([], ["--resume", "--set", "training.stop_after=null"]):
        command = [sys.executable, "-P", "-m", "relayrun", "submit", str(config), *further]
        done = subprocess.run(
            command, cwd=space.folder, env=environment(), capture_output=True, text=True, check=False, timeout=600
        )
        if done.returncode:
            raise RuntimeError(f"{command}: exit status {done.returncode}\n{done.stdout}{done.stderr}")
    return space.folder / name


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Return the lines of the merged view, with numbers as exact texts and without what takes time."""
    found = []
    for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        values = json.loads(line)
        if kept := {key: _exact(values[key]) for key in EXACT if key in values}:
            found.append(kept)
    return found


def _exact(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _exact(each) for key, each in value.items()}
    return value.hex() if isinstance(value, float) else value


def tensors(checkpoint: Path) -> dict[str, str]:
    """Return what a checkpoint holds by key: a hash of each tensor, and each plain value."""
    import torch

    found = {}
    for key, value in flatten(contents(checkpoint)).items():
        if isinstance(value, torch.Tensor):
            digest = hashlib.sha256(raw(value)).hexdigest()
            found[key] = f"{value.dtype} {list(value.shape)} {digest}"
        else:
            found[key] = f"{type(value).__name__} {_short(value)}"
    return found


def _short(value: object) -> str:
    text = value.hex() if isinstance(value, (float, bytes)) else repr(value)
    return text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest()


VARYING = (".metadata", "checksums.json")
"""Files of a checkpoint whose bytes differ each time: torch writes a number of its own, and there is its hash."""


def files(checkpoint: Path) -> dict[str, str]:
    """Return the hash of every file of a checkpoint that a run gives again, and the names of the others."""
    paths = sorted(path for path in checkpoint.rglob("*") if path.is_file())
    return {
        path.relative_to(checkpoint).as_posix(): "differs each time"
        if path.name in VARYING
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in paths
    }


def record(folder: Path) -> None:
    """Write the metrics and the checkpoints of all runs."""
    with tempfile.TemporaryDirectory(prefix="record-training-") as place:
        space = Workspace.make(Path(place))
        for name in RUNS:
            run_dir = run(name, space)
            write_json(folder / name / "metrics.json", metrics(run_dir))
            for checkpoint in sorted((run_dir / "checkpoints").glob("iter_*")):
                write_json(folder / name / f"{checkpoint.name}.files.json", files(checkpoint))
                write_json(folder / name / f"{checkpoint.name}.tensors.json", tensors(checkpoint))
