"""The losses of a small model of each family, trained by relayrun and with transformers alone.

    python benchmarks/models.py [--steps 50]

Of each family one file of configs/models is shrunk: two layers, 64 channels, four experts; every other setting stays.
transformers makes the model with random weights, `relayrun import hf` takes them, and a run trains them in fp32 on one
rank. Then the class of transformers is trained on the same samples, with torch's AdamW and clipped gradients. The
figures are both losses of every iteration. About three minutes.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import _results
import numpy as np
import torch

from relayrun import places
from relayrun.config.compose import yaml_file
from relayrun.config.compose.schema import ModelSection
from relayrun.errors import RelayrunError, run_main
from relayrun.files import read_json_lines
from relayrun.lab import small_run
from relayrun.tokens.mixture import audit
from relayrun.train.export import huggingface, model_families
from relayrun.train.export.model_mapping import ModelMapping

FAMILIES = {"Llama": "llama3-8b", "Qwen3": "qwen3-8b", "Mixtral": "mixtral-8x7b", "Apertus": "apertus-8b"}
SHRUNK = {"num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 96, "num_attention_heads": 4, "num_query_groups": 2}
VOCABULARY, SEQ_LENGTH, BATCH, LR, DECAY, CLIP = 512, 64, 8, 1e-3, 0.1, 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="relayrun-models-"))
    try:
        figures = {name: compare(folder / name, name, options.steps) for name in FAMILIES}
    finally:
        shutil.rmtree(folder)
    print(f"written to {_results.write('models', {'steps': options.steps, 'families': figures})}")
    return 0


def compare(folder: Path, family: str, steps: int) -> dict[str, Any]:
    """Train a family twice; return the losses."""
    torch.manual_seed(small_run.SEED)
    torch.set_num_threads(1)
    mapping = next(each for each in model_families.BUILT_IN_MAPPINGS if each.name == family)
    model = _transformers_model(mapping, _shrunk(FAMILIES[family]))
    data = small_run.random_data(folder / "data", vocabulary=VOCABULARY, longest=300, documents=400)
    model.save_pretrained(folder / "hf")
    made = huggingface.import_huggingface(folder / "hf", folder / "start")
    sections = {
        "model": made.model.model_dump(mode="json") | {"hidden_dropout": 0.0, "attention_dropout": 0.0},
        "data": data,
        "training": {
            "steps": steps,
            "micro_batch_size": BATCH,
            "global_batch_size": BATCH,
            "seq_length": SEQ_LENGTH,
            "precision": "fp32",
            "threads": 1,
        },
        "optimizer": {"lr": LR, "lr_decay_style": "constant", "weight_decay": DECAY, "clip_grad": CLIP},
        "checkpoint": {"interval": steps, "load": str(folder / "start"), "finetune": True},
        "job": {"time": "00:20:00"},
        "cluster": {"name": "local", "scheduler": "local"},
    }
    config = small_run.write_config(folder, small_run.run_config_values(folder, "benchmark", "small", sections))
    run = small_run.run_in(folder, "small")
    with (folder / "log").open("w") as log:
        if small_run.start_submit(config, stdout=log, stderr=log).wait():
            raise RelayrunError((folder / "log").read_text()[-2000:])
    ours = [line["loss"] for line in read_json_lines(run.metrics_view) if "loss" in line]
    samples = audit.audited_samples(audit.audit_run(run), range(steps * BATCH))
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples])).long()
    theirs = _train(model, tokens.split(BATCH))
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(f"{family}: {ours[0]:.4f} to {ours[-1]:.4f}, beside transformers within {largest:.2g}", flush=True)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"config": FAMILIES[family], "parameters": parameters, "relayrun": ours, "transformers": theirs}


def _shrunk(name: str) -> ModelSection:
    values = yaml_file.read_yaml(places.CODE_ROOT / "configs" / "models" / f"{name}.yaml").values["model"]
    transformer = values.get("transformer", {})
    small = {"kv_channels": 32, "num_moe_experts": 4}
    transformer |= {setting: value for setting, value in small.items() if setting in transformer}
    transformer.pop("moe_aux_loss_coeff", None)
    return ModelSection.model_validate({**values, **SHRUNK, "transformer": transformer})


def _transformers_model(mapping: ModelMapping, model: ModelSection) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(model.rotary_base)}
    if model.rope_scaling_factor is not None:
        rope |= {"rope_type": "llama3", "factor": model.rope_scaling_factor, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": huggingface.ROPE_CONTEXT}
    values = {name: getattr(model, setting) for name, setting in model_families.CONFIG_NAMES.items()}
    own = {name: getattr(model.transformer, setting) for setting, name in mapping.settings.items()}
    config = AutoConfig.for_model(
        mapping.model_type,
        **mapping.config | values | {name: value for name, value in own.items() if value is not None},
        vocab_size=VOCABULARY,
        max_position_embeddings=2 * huggingface.ROPE_CONTEXT,
        rope_parameters=rope,
        tie_word_embeddings=not model.untie_embeddings_and_output_weights,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=None,  # else its row is zero and has no gradient
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).float()  # xIELU begins in bf16


def _train(model: Any, batches: Any) -> list[float]:
    """Train with torch's AdamW; norms and other vectors have no weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for tokens in batches:
        logits = model(tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    sys.exit(run_main(main))
