"""Checks of an exported folder: transformers and lm-evaluation-harness open it, and its logits are the checkpoint's.

`check_opens` makes the model on torch's device `meta`: names and shapes are compared, no weight is read into memory.
`compare_logits` computes in fp32; megatron-core loads the checkpoint into its own model on one rank, without any code
of the export. Code that lies in the folder is not run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from relayrun.config.compose.schema import DataSection, ParallelSection, RunConfig
from relayrun.config.sections.model import NEEDS_TRANSFORMER_ENGINE
from relayrun.control.scheduler.local_srun import free_port
from relayrun.errors import InputError
from relayrun.files import read_json
from relayrun.train.export.source_and_target import CheckpointSource

_IDS_COMPARED = 64


def check_opens(source: CheckpointSource, folder: Path) -> list[str]:
    """Open an export; return what its user will notice, one line each. Raises InputError if transformers does not open
    it, or lm_eval, where it is installed, does not."""
    if missing := [name for name in ("transformers", "accelerate") if find_spec(name) is None]:
        return [f"not opened: {missing[0]} is not installed here"]
    name = "config.json"
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # warnings of libraries for their callers
            model = load_model(folder, device_map="meta", dtype="auto", trust_remote_code=False)
            name = "tokenizer_config.json"
            return _check_tokenizer(source, folder, model)
    except InputError:
        raise
    except Exception as error:  # each version of the libraries has others
        if "auto_map" in read_json(folder / name):
            return [f"not opened: {name} names code of its own (auto_map), which is not run here"]
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        hint = f"see {name}, and whether a newer transformers has the class"
        raise InputError(f"cannot be opened: {type(error).__name__}: {said}", where=folder, hint=hint) from None


def _check_tokenizer(source: CheckpointSource, folder: Path, model: Any) -> list[str]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    own, rows = source.tokenizer.tokenizer, model.config.vocab_size
    text = own.decode(list(range(min(_IDS_COMPARED, rows))))
    notes, opens = [], f"transformers opens the tokenizer as {type(tokenizer).__name__}, "
    if tokenizer.encode(text, add_special_tokens=False) != own.encode(text, add_special_tokens=False).ids:
        notes.append(f"{opens}which gives other ids than the run's tokenizer")
    if len(tokenizer) > rows:
        notes.append(f"{opens}with {len(tokenizer)} entries for {rows} rows of embeddings")
    if find_spec("lm_eval") is not None:
        logging.getLogger("lm_eval").setLevel(logging.ERROR)
        try:
            from lm_eval.models.huggingface import HFLM
        except ImportError as error:
            return [*notes, f"not opened by lm_eval, which cannot be imported: {error}"]
        if HFLM(pretrained=model, tokenizer=tokenizer).prefix_token_id is None:
            notes.append("lm_eval finds no token that begins or ends a text: some of its tasks need one")
    return notes


def load_model(folder: Path, **options: Any) -> Any:
    """Load the model of a folder. Raises InputError unless its weights are those of the class."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    disable_progress_bar()
    set_verbosity_error()  # among others, that it computes xIELU without a kernel; a missing weight is an error below
    model, found = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    for what in ("missing", "unexpected", "mismatched"):
        if names := sorted(map(str, found[f"{what}_keys"])):
            raise InputError(
                f"the class {type(model).__name__} of transformers has other weights: {names[0]} is {what}",
                where=folder,
                hint="give each weight the name that the class has, in the mapping",
            )
    return model


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
