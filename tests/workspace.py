"""Everything that a real run needs, small: token shards, a tokenizer, a run config."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, models, pre_tokenizers

from relayrun.config.compose import yaml_file
from relayrun.control.rundir.records import AttemptEnd
from relayrun.control.rundir.run import Run
from relayrun.files import read_json_lines
from relayrun.tokens.shards.shard import ShardWriter
from tests import warm

VOCABULARY = 300

CONFIG: dict[str, Any] = {
    "project": "tests",
    "name": "tiny",
    "model": {
        "num_layers": 2,
        "hidden_size": 64,
        "ffn_hidden_size": 128,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
    },
    "training": {"steps": 20, "micro_batch_size": 2, "global_batch_size": 8, "seq_length": 64, "threads": 1},
    "optimizer": {"lr": 1e-3, "lr_warmup_steps": 2},
    "checkpoint": {"interval": 1000},
    "chain": {"auto_requeue": True},
    "job": {"time": "5", "ntasks_per_node": 2},
    "cluster": {"name": "local", "scheduler": "local"},
}


@dataclass(frozen=True)
class Workspace:
    """A folder with data; `config` writes run configs into it."""

    folder: Path

    @classmethod
    def make(cls, folder: Path, *, seed: int = 1) -> Workspace:
        """Write three shards of random documents over a skewed vocabulary, and a tokenizer of that size."""
        generator = np.random.default_rng(seed)
        for number in range(3):
            lengths = generator.integers(20, 400, 40)
            writer = ShardWriter(folder / "data" / f"shard{number}", np.uint16)
            writer.add(np.minimum(generator.geometric(0.03, lengths.sum()), VOCABULARY - 1), lengths)
            writer.finish()
        words = {"</s>": 0} | {f"w{number}": number for number in range(1, VOCABULARY)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="</s>"))
        tokenizer.add_special_tokens(["</s>"])
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(folder / "tokenizer.json"))
        return cls(folder)

    def config(self, folder: str, **sections: Any) -> Path:
        """A run config whose sections are CONFIG's with these changes; its run directory is `folder` here.

        Its ranks start from a process that has done the imports; `cluster={"python": None}` has them imported.
        """
        values: dict[str, Any] = CONFIG | {
            "cluster": CONFIG["cluster"] | {"python": warm.python()},
            "run_dir": str(self.folder / folder),
            "data": {"tokenizer": str(self.folder / "tokenizer.json"), "datasets": [str(self.folder / "data")]},
        }
        for section, changes in sections.items():
            values[section] = values.get(section, {}) | changes if isinstance(changes, dict) else changes
        path = self.folder / f"{folder}.yaml"
        path.write_text(yaml_file.dump_yaml(values), encoding="utf-8")
        return path

    def run(self, folder: str) -> Run:
        return Run(self.folder / folder)


def ends(run: Run) -> list[AttemptEnd]:
    """The ends of a run's attempts; each attempt that began must have one."""
    numbers = [number for number in run.attempt_numbers() if run.attempt(number).begin.exists()]
    found = [AttemptEnd.read(run.attempt(number).end) for number in numbers]
    assert all(end is not None for end in found), found
    return [end for end in found if end is not None]


def steps(run: Run) -> dict[int, tuple[str, str]]:
    """Loss and gradient norm of every iteration in the merged view, as exact text; no iteration twice."""
    lines = [line for line in read_json_lines(run.metrics_view) if "loss" in line]
    found = {line["iteration"]: (line["loss"].hex(), line["grad_norm"].hex()) for line in lines}
    assert len(found) == len(lines)
    return found
