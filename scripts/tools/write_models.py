#!/usr/bin/env python3
"""Write the section of each family in docs/reference/models.md: sizes by formula, losses of benchmarks/models.py.

Run it after a change of configs/models or of benchmarks/results/models.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ModelSection, RunConfig
from relayrun.train.export.model_families import mapping_for_model
from relayrun.train.model.size import count_parameters, flops_per_token, memory_bytes, pad_to_multiple

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "models.md"
RESULTS = ROOT / "benchmarks" / "results" / "models.json"
BEGIN, END = "<!-- scripts/tools/write_models.py wrote this -->\n", "<!-- up to here -->\n"
VOCABULARY = {"apertus": 131_072, "llama": 128_256, "mixtral": 32_000, "og2": 512, "qwen3": 151_936}
SEQ_LENGTH, GPUS = 4096, 8


def sections() -> str:
    """Return a section for each family as Markdown."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "configs" / "models").glob("*.yaml")):
        model = ModelSection.model_validate(yaml_file.read_yaml(path).values["model"])
        found.setdefault(mapping_for_model(model).name, []).append(_row(path.stem, model))
    return "\n".join(_section(family, rows) for family, rows in found.items())


def _row(name: str, model: ModelSection) -> str:
    vocabulary = next(size for family, size in VOCABULARY.items() if name.startswith(family))
    padded = pad_to_multiple(vocabulary, model.make_vocab_size_divisible_by)
    values = {
        "project": "models",
        "name": "card",
        "model": model.model_dump(mode="json"),
        "data": {"tokenizer": "none", "datasets": ["none"]},
        "training": {"steps": 1, "micro_batch_size": 1, "global_batch_size": GPUS, "seq_length": SEQ_LENGTH},
        "optimizer": {"lr": 1e-4},
        "parallel": {"use_distributed_optimizer": True},
        "checkpoint": {"interval": 1},
        "job": {"time": "1", "ntasks_per_node": GPUS, "gpus_per_node": GPUS},
        "cluster": {"name": "none", "scheduler": "local"},
    }
    values["training"] |= {"precision": "bf16"}  # type: ignore[operator]
    memory = memory_bytes(RunConfig.model_validate(values), vocabulary)
    parts = (
        f"{part / 1e9:,.1f}" if part >= 5e7 else "< 0.1" for part in (memory.state, memory.activations, memory.loss)
    )
    flops = flops_per_token(model, padded, SEQ_LENGTH) / 1e9
    return f"| `{name}` | {count_parameters(model, padded):,} | {flops:,.2f} | {' | '.join(parts)} |"


def _section(family: str, rows: list[str]) -> str:
    made = json.loads(RESULTS.read_text(encoding="utf-8"))
    tried, versions = made["figures"]["families"][family], made["versions"]
    ours, theirs = tried["relayrun"], tried["transformers"]
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return f"""### {family}

| file | parameters | GFLOPs per token | GB: state | activations | loss |
|---|---|---|---|---|---|
{chr(10).join(rows)}

`{tried["config"]}`, shrunk to {tried["parameters"]:,} parameters: the loss of {len(ours)} iterations falls from
{ours[0]:.4f} to {ours[-1]:.4f}, and differs from that of transformers by at most {largest:.1g}.
It ran on {made["cpus"]} CPUs ({made["machine"]}, torch {versions["torch"]}, megatron-core {versions["megatron-core"]}).
"""


def written(page: str) -> str:
    """Return the page with today's sections between its marks."""
    before, _, rest = page.partition(BEGIN)
    return before + BEGIN + "\n" + sections() + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.exit(0)
