"""However it was split over ranks, what was trained gives in transformers the logits that megatron-core gives."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.export.models import SHAPES, VOCABULARY, write_tokenizer

Make = Callable[..., Any]

pytestmark = pytest.mark.slow

TENSOR = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PIPELINE = {"pipeline_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
TIED = {"untie_embeddings_and_output_weights": False}
SCALED = {"rope_scaling_factor": 8.0, "rotary_base": 100}
"""With a base so small that the 16 channels of a head have long, short and middle wavelengths."""

QWEN, EXPERTS, APERTUS = ({"transformer": SHAPES[kind]} for kind in ("Qwen3", "Mixtral", "Apertus"))

LONG = pytest.mark.long
CASES = [
    pytest.param(2, TENSOR, SCALED, id="TP2-grouped-scaled"),
    pytest.param(2, DISTRIBUTED, TIED | {"num_query_groups": 4}, id="DP2-tied-multi-head", marks=LONG),
    pytest.param(2, PIPELINE | DISTRIBUTED, TIED | SCALED, id="PP2-tied-grouped-scaled", marks=LONG),
    pytest.param(
        2,
        PIPELINE | {"num_layers_per_virtual_pipeline_stage": 1},
        {"num_query_groups": 1},
        id="PP2-virtual-one-group",
        marks=LONG,
    ),
    pytest.param(4, TENSOR | PIPELINE | DISTRIBUTED, SCALED, id="TP2-PP2-grouped-scaled", marks=LONG),
    pytest.param(4, TENSOR | PIPELINE, TIED, id="TP2-PP2-tied", marks=LONG),
    pytest.param(2, TENSOR, QWEN, id="TP2-qwen3", marks=LONG),
    pytest.param(4, TENSOR | PIPELINE | DISTRIBUTED, QWEN | TIED, id="TP2-PP2-qwen3-tied", marks=LONG),
    pytest.param(2, {"expert_model_parallel_size": 2} | DISTRIBUTED, EXPERTS, id="EP2-mixtral", marks=LONG),
    pytest.param(2, TENSOR, EXPERTS, id="TP2-mixtral", marks=LONG),
    pytest.param(4, PIPELINE | {"expert_model_parallel_size": 2}, EXPERTS, id="PP2-EP2-mixtral", marks=LONG),
    pytest.param(2, TENSOR, APERTUS, id="TP2-apertus", marks=LONG),
    pytest.param(4, TENSOR | PIPELINE, APERTUS, id="TP2-PP2-apertus", marks=LONG),
]

SWAPPED = """
import sys
from pathlib import Path
from safetensors.torch import load_file, save_file
from relayrun.errors import InputError
from relayrun.train.export import compare_logits
from relayrun.train.export.source_and_target import find_checkpoint
from relayrun.control.rundir.run import Run
folder = Path(sys.argv[2])
weights = load_file(folder / "model.safetensors")
name = "model.layers.1.self_attn.q_proj.weight"
weights[name] = weights[name].view(4, 2, 8, 64).transpose(1, 2).reshape(64, 64).contiguous()
save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
try:
    compare_logits.check_logits(find_checkpoint(Run(Path(sys.argv[1]))), folder)
except InputError as error:
    print(error)
"""
"""Rotary halves interleaved, as another convention has them."""


def run_python(*arguments: str | Path) -> str:
    done = warm.run([sys.executable, *arguments])
    assert done.returncode == 0, done.stderr
    # torch, with a toolkit; megatron-core, of an Apertus
    known = ("No CUDA runtime is found", "Unknown MLP type")
    said = [line for line in done.stderr.splitlines() if not any(words in line for words in known)]
    assert said == []
    return done.stdout


def assert_same_weights(trained: Path, imported: Path) -> None:
    """Compare whole tensors, whatever layout they come from; of a vocabulary's padding nothing is exported."""
    import torch

    from tests.checkpoints import whole_tensors

    found = []
    for folder in (trained, imported):
        tensors = whole_tensors(folder)
        weights = {name: tensors[name] for name in tensors if not name.startswith("optimizer.")}
        padded = ("embedding.word_embeddings.weight", "output_layer.weight")
        found.append({name: value[:VOCABULARY] if name in padded else value for name, value in weights.items()})
    assert found[0].keys() == found[1].keys()
    assert [name for name, value in found[0].items() if not torch.equal(value, found[1][name])] == []


@pytest.mark.parametrize(("ranks", "parallel", "model"), CASES)
def test_logits_of_an_export_are_those_of_megatron_core(
    harness: Make, tmp_path: Path, ranks: int, parallel: dict[str, Any], model: dict[str, Any]
) -> None:
    made = harness(
        data={"tokenizer": str(write_tokenizer(tmp_path / "tokenizer.json"))},
        training={"steps": 4, "eval_steps": 1},
        optimizer={"lr": 3e-2, "lr_warmup_steps": 1, "lr_decay_style": "constant"},
        model={"num_layers": 4} | model,
        parallel=parallel,
        job={"ntasks_per_node": ranks},
    )
    made.train()
    output = tmp_path / "out"
    said = run_python("-m", "relayrun.cli", "export", "hf", made.run.path, "--output", output, "--test-logits")
    match = re.search(r"differ by at most (\S+) \(largest logit (\S+)\)", said)
    assert match is not None, said
    assert float(match[1]) <= 1e-5
    assert float(match[2]) > 0.5, "weights that learned nothing would show nothing"
    if model is APERTUS:
        run_python("-m", "relayrun.cli", "import", "hf", output, "--output", tmp_path / "back")
        assert_same_weights(made.run.checkpoint(4), tmp_path / "back")
    if model is SCALED and ranks == 2:
        swapped = tmp_path / "swapped.py"
        swapped.write_text(SWAPPED)
        assert "the export is not the checkpoint: logits differ by" in run_python(swapped, made.run.path, output)
