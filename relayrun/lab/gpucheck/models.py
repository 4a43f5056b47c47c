"""The parts `models`, `layouts` and `export`: correctness of models on this device.

Each variant trains a small model in bf16 on one batch, so that its loss must fall; the same weights then compute the
loss in fp32. `export` compares the logits of an exported model in transformers with megatron-core's.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from relayrun.config.compose import resolve, yaml_file
from relayrun.errors import RelayrunError
from relayrun.files import write_atomic
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures, run_and_record_program
from relayrun.lab.small_run import Sections, merge_sections

EXPORT_STEPS = 3


def measure_export(setup: CheckSetup, figures: PartFigures) -> None:
    """Train a few iterations, export, compare logits. Raises CheckFailed."""
    sizes = setup.sizes
    sections = {
        "model": dict(sizes.resumed_model),
        "data": runs.data_with_tokenizer(setup),
        "training": {
            "steps": EXPORT_STEPS,
            "micro_batch_size": sizes.resumed_batch,
            "global_batch_size": sizes.resumed_batch * setup.ranks,
            "seq_length": sizes.resumed_seq_length,
        },
    }
    run = runs.start_run(setup, "export", sections).wait(EXPORT_STEPS)
    folder = setup.path / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    run_and_record_program(setup, figures, "models:export_and_compare", run_dir=run.path, folder=folder)
    runs.remove_checkpoints(run)
    shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class ModelVariant:
    """A model, optimizer or data type to try."""

    what: str
    """Description in one line."""
    sections: Sections = field(default_factory=dict)
    """Differences from a Llama trained by Adam in bf16."""
    exact: Sections | None = field(default_factory=dict)
    """Differences from `sections` for the loss in fp32; None: skip it."""


MODEL_VARIANTS, LAYOUT_VARIANTS = (
    {name: ModelVariant(**values) for name, values in variants.items()}
    for variants in yaml_file.read_yaml(Path(__file__).with_name("variants.yaml")).values.values()
)
"""Variants of one rank, and of two ranks, each on its own GPU."""


def measure_models(setup: CheckSetup, figures: PartFigures) -> None:
    """Try every variant on one rank. Raises CheckFailed if the ranks' program fails as a whole."""
    if not try_variants(setup, figures, MODEL_VARIANTS, ranks=1):
        raise CheckFailed("no variant could be tried")


def measure_layouts(setup: CheckSetup, figures: PartFigures) -> None:
    """Try every layout on two GPUs, each in a start of the ranks of its own."""
    if setup.gpus == 1:
        figures.add("layouts", {"what": "layouts of two ranks", "not_measured": "this machine has one GPU"})
        return
    for name, variant in LAYOUT_VARIANTS.items():
        try:
            try_variants(setup, figures, {name: variant}, ranks=2)
        except CheckFailed as error:  # other layouts have ranks of their own
            figures.add(name, {"what": variant.what, "failed": error.message})


def try_variants(setup: CheckSetup, figures: PartFigures, variants: Mapping[str, ModelVariant], *, ranks: int) -> bool:
    """Record the result of each variant; return True if any could be tried. Raises CheckFailed."""
    folder = setup.path / "models"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name, variant in variants.items():
        try:
            text = variant_config_text(setup, name, variant.sections, ranks=ranks, precision="bf16")
            write_atomic(folder / f"{name}.yaml", text)
            if variant.exact is not None:
                exact = merge_sections(variant.sections, variant.exact)
                text = variant_config_text(setup, name, exact, ranks=ranks, precision="fp32")
                write_atomic(folder / f"{name}-exact.yaml", text)
        except RelayrunError as error:
            (folder / f"{name}.yaml").unlink(missing_ok=True)
            figures.add(name, {"what": variant.what, "not_measured": error.message})
    if not any(folder.iterdir()):
        return False
    found = run_and_record_program(setup, figures, "models:train_every_config", ranks=ranks, configs=folder)
    for name, one in found.items():
        figures.add(name, {"what": variants[name].what} | one)
    return True


def variant_config_text(setup: CheckSetup, name: str, sections: Sections, *, ranks: int, precision: str) -> str:
    """Return the resolved run config of a variant. Raises ConfigError."""
    sizes = setup.sizes
    common = {
        "model": sizes.resumed_model,
        "training": {
            "steps": 100,
            "micro_batch_size": sizes.resumed_batch,
            "global_batch_size": sizes.resumed_batch * ranks,
            "seq_length": sizes.resumed_seq_length,
            "precision": precision,
        },
        "optimizer": {"lr": 3e-3, "lr_warmup_steps": 1},
        "parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "job": {"time": "01:00:00", "ntasks_per_node": ranks, "gpus_per_node": min(ranks, setup.gpus)},
    }
    made = merge_sections(runs.check_run_values(setup, f"models-{name}", common), sections)
    if made["model"].get("transformer", {}).get("multi_latent_attention"):  # it has no grouped queries
        made["model"]["num_query_groups"] = made["model"]["num_attention_heads"]
    return resolve.dump_run_config(runs.compose_values(setup, made))
