"""Small training runs of the experiments: model, random data, run config and submit.

Fault tests and the GPU check make their runs with these functions, in a folder that holds `configs/NAME.yaml` and the
run directories `runs/NAME`. A run is submitted as a user submits it, with launchers/submit.py.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.control.rundir.run import Run
from relayrun.tokens.shards.shard import ShardWriter, token_dtype

SEED = 28
Sections = Mapping[str, Mapping[str, Any]]


def run_in(folder: Path, name: str) -> Run:
    return Run(folder / "runs" / name)


def run_config_values(folder: Path, project: str, name: str, *sections: Sections) -> dict[str, Any]:
    """Return a run config as plain values; settings of later sections take precedence."""
    head = {"project": project, "name": name, "run_dir": str(run_in(folder, name).path)}
    return head | merge_sections(*sections)


def merge_sections(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections of all parts; settings of later parts take precedence."""
    merged: dict[str, Any] = {}
    for part in parts:
        for name, values in part.items():
            merged[name] = {**merged.get(name, {}), **values} if isinstance(values, Mapping) else values
    return merged


def write_config(folder: Path, values: Mapping[str, Any]) -> Path:
    """Write a run config to `configs/NAME.yaml`; return its path."""
    path = folder / "configs" / f"{values['name']}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml_file.dump_yaml(dict(values)), encoding="utf-8")
    return path


def start_submit(config: Path, overrides: Sequence[str] = (), **options: Any) -> subprocess.Popen[Any]:
    """Start the submit of a run config; with the local scheduler it runs the jobs, too. `options`: those of Popen."""
    changes = [word for text in overrides for word in ("--set", text)]
    command = [sys.executable, str(places.shared_file("launchers/submit.py")), str(config), *changes]
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, **{"cwd": places.CODE_ROOT} | options)


def random_data(folder: Path, *, vocabulary: int, longest: int, documents: int) -> dict[str, Any]:
    """Write random documents of 20 to `longest` tokens and a tokenizer, once; return them as section `data`."""
    if not (folder / "tokenizer.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator = np.random.default_rng(SEED)
        lengths = generator.integers(20, longest, documents)
        writer = ShardWriter(folder / "shard", token_dtype(vocabulary))
        writer.add(np.minimum(generator.geometric(10 / vocabulary, lengths.sum()), vocabulary - 1), lengths)
        writer.finish()
        words = {"</s>": 0} | {f"w{number}": number for number in range(1, vocabulary)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
        tokenizer.add_special_tokens(["</s>"])
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
    return {"tokenizer": str(folder / "tokenizer.json"), "datasets": [str(folder)], "mock_data": False}
