"""Compares an exported folder with its checkpoint: logits of transformers and of megatron-core, in fp32.

megatron-core loads the checkpoint into its own model on one rank, without any code of the export.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass
from pathlib import Path

import torch

from relayrun.config.compose.schema import DataSection, ParallelSection, RunConfig
from relayrun.config.sections.model import NEEDS_TRANSFORMER_ENGINE
from relayrun.control.scheduler.local_srun import free_port
from relayrun.errors import InputError
from relayrun.train.export.opened import load_model
from relayrun.train.export.source_and_target import CheckpointSource

TOLERANCE = 1e-5
"""Largest difference relative to the largest logit, or to 1: about ten times the noise of fp32."""
BATCH, LENGTH = 2, 256


@dataclass(frozen=True)
class LogitComparison:
    """Logits of both sides on the same random tokens."""

    difference: float
    """Largest absolute difference between two logits."""
    largest: float
    """Largest absolute logit."""
    tokens: int

    @property
    def equal(self) -> bool:
        return self.difference <= TOLERANCE * max(1.0, self.largest)


def compare_logits(source: CheckpointSource, folder: Path, rounded: torch.dtype | None = None) -> LogitComparison:
    """Compare an export with its checkpoint; call it once per process. `rounded`: type of the checkpoint's weights, if
    the exported ones are the fp32 weights that these were rounded from."""
    generator = torch.Generator().manual_seed(0)
    length = min(LENGTH, source.config.training.seq_length)
    tokens = torch.randint(source.manifest.vocabulary_size, (BATCH, length), generator=generator)
    theirs = _transformers(folder, tokens, rounded)
    with warnings.catch_warnings():  # for the authors of torch and megatron-core
        warnings.simplefilter("ignore")
        ours = _megatron(source, tokens)[..., : theirs.shape[-1]]
    return LogitComparison(float((ours - theirs).abs().max()), float(ours.abs().max()), tokens.numel())


def check_logits(source: CheckpointSource, folder: Path, rounded: torch.dtype | None = None) -> LogitComparison:
    """Compare like `compare_logits`. Raises InputError if the logits differ."""
    found = compare_logits(source, folder, rounded)
    if not found.equal:
        raise InputError(
            f"the export is not the checkpoint: logits differ by {found.difference:.3g} (largest logit "
            f"{found.largest:.3g})",
            where=source.folder,
            hint="if the export was rounded (--dtype), that is why; otherwise report this",
        )
    return found


def _transformers(folder: Path, tokens: torch.Tensor, rounded: torch.dtype | None) -> torch.Tensor:
    model = load_model(folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters() if rounded is not None else ():
            parameter.copy_(parameter.to(rounded))
        logits: torch.Tensor = model.eval()(tokens).logits
    return logits


def _megatron(source: CheckpointSource, tokens: torch.Tensor) -> torch.Tensor:
    from relayrun.train import megatron_versions

    megatron_versions.check_version()
    from relayrun.train import distributed
    from relayrun.train.checkpoint import megatron_strategy
    from relayrun.train.checkpoint.reader import CheckedReader
    from relayrun.train.model import cpu_patches
    from relayrun.train.model.gpt import ModelStage

    cpu_patches.patch_for_cpu()
    os.environ |= {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    config = _one_rank(source.config)
    ranks = distributed.start_process_groups(config)
    model = ModelStage(config, ranks, source.manifest.vocabulary_size, eod=source.manifest.eod)
    wanted = {"model": model.sharded_state_dict({})}
    model.load(megatron_strategy.load_state(wanted, CheckedReader(source.folder, source.checksum))["model"])
    model.train_mode(False)
    positions = torch.arange(tokens.shape[1], device=ranks.device).expand(len(tokens), -1)
    with torch.no_grad():
        logits: torch.Tensor = model.chunks[0](
            input_ids=tokens.to(ranks.device), position_ids=positions, attention_mask=None
        )
    distributed.stop_process_groups()
    return logits.cpu()


def _one_rank(config: RunConfig) -> RunConfig:
    """Return the config for one rank, in fp32, with local layers: TransformerEngine's attention lacks fp32."""
    fused = {"apply_rope_fusion": False, "gradient_accumulation_fusion": False}
    training = config.training.model_copy(update={"precision": "fp32", "transformer_impl": "local"} | fused)
    transformer = config.model.transformer
    plain = {name: type(transformer).model_fields[name].default for name in NEEDS_TRANSFORMER_ENGINE}
    model = config.model.model_copy(update={"transformer": transformer.model_copy(update=plain)})
    return config.model_copy(
        update={
            "data": DataSection(tokenizer="none", datasets=["none"]),  # a row is one document, as in transformers
            "training": training,
            "model": model,
            "parallel": ParallelSection(),
            "job": config.job.model_copy(update={"nodes": 1, "ntasks_per_node": 1}),
        }
    )
