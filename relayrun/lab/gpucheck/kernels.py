"""The parts `kernels` and `layouts`: every kernel of training once, and models split over two ranks.

`kernels` calls single kernels, then trains a small model of each variant, and compares the logits of an exported model
in transformers with megatron-core's. A variant trains in bf16 on one batch, so that its loss must fall; the same
weights then compute the loss in fp32.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relayrun.config.compose import resolve, yaml_file
from relayrun.errors import RelayrunError
from relayrun.files import write_atomic
from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures, run_program
from relayrun.lab.small_run import Sections, merge_sections

EXPORT_STEPS = 3


def measure_kernels(setup: CheckSetup, figures: PartFigures) -> None:
    """Try every kernel and every variant, and beside them an export. Raises CheckFailed if one could not begin."""
    small = runs.small_run_sections(setup, steps=EXPORT_STEPS, ranks=setup.ranks)
    run = runs.start_run(setup, "export", {**small, "data": runs.data_with_tokenizer(setup)})
    with ThreadPoolExecutor(1) as pool:
        exported = pool.submit(measure_export, setup, run)
        failures = []
        try:
            try_variants(setup, MODEL_VARIANTS, lambda found: figures.add("kernels", found), ranks=1)
        except CheckFailed as error:
            failures.append(str(error))
        try:
            figures.add("export", exported.result())
        except CheckFailed as error:
            failures.append(str(error))
    if failures:
        raise CheckFailed("; ".join(failures))


def measure_export(setup: CheckSetup, chain: runs.LocalChain) -> dict[str, Any]:
    """Export what the run has trained, and compare logits. Raises CheckFailed."""
    run, folder = chain.wait(EXPORT_STEPS), setup.path / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    found: dict[str, Any] = run_program(setup, "kernels:export_and_compare", run_dir=run.path, folder=folder)
    runs.remove_checkpoints(run)
    shutil.rmtree(folder, ignore_errors=True)
    return found


def try_rows(
    setup: CheckSetup, program: str, record: Callable[[dict[str, Any]], object], *, ranks: int = 1, **arguments: Any
) -> None:
    """Run a program that writes a row after the other, and once more for the rows behind one in which it died. `record`
    gets all rows so far. Raises CheckFailed if the program dies before a row."""
    found: dict[str, Any] = {}
    while True:
        died: CheckFailed | None = None
        skip = ",".join(["", *found])
        try:
            made = run_program(
                setup, program, ranks=ranks, record=lambda made: record(found | made), skip=skip, **arguments
            )
        except CheckFailed as error:
            died, made = error, error.found or {}
            if not made:
                raise
            last = made[list(made)[-1]]
            last["failed"] = f"{last.get('failed', '')}: {error.message}"
        found.update(made)
        record(found)
        if died is None:
            return


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


def measure_layouts(setup: CheckSetup, figures: PartFigures) -> None:
    """Try every layout on two GPUs, each in a start of the ranks of its own."""
    for name, variant in LAYOUT_VARIANTS.items():
        try:
            try_variants(setup, {name: variant}, figures.update, ranks=2)
        except CheckFailed as error:  # other layouts have ranks of their own
            figures.add(name, {"what": variant.what, "failed": error.message})


def try_variants(
    setup: CheckSetup, variants: Mapping[str, ModelVariant], record: Callable[[dict[str, Any]], object], *, ranks: int
) -> None:
    """Record the result of each variant. Raises CheckFailed if the ranks cannot begin."""
    folder = setup.path / "models"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    about = {name: {"what": variant.what} for name, variant in variants.items()}
    refused: dict[str, Any] = {}
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
            refused[name] = about[name] | {"not_measured": error.message}
    record(refused)
    if any(folder.iterdir()):
        try_rows(
            setup,
            "kernels:try_every_kernel",
            lambda found: record(refused | {name: about.get(name, {}) | one for name, one in found.items()}),
            ranks=ranks,
            configs=folder,
        )


def variant_config_text(setup: CheckSetup, name: str, sections: Sections, *, ranks: int, precision: str) -> str:
    """Return the resolved run config of a variant. Raises ConfigError."""
    changes: dict[str, dict[str, Any]] = {
        "training": {"precision": precision},
        "optimizer": {"lr": 3e-3, "lr_warmup_steps": 1},
        "parallel": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        "job": {"time": "01:00:00", "ntasks_per_node": ranks, "gpus_per_node": min(ranks, setup.gpus)},
    }
    common = merge_sections(runs.small_run_sections(setup, steps=100, ranks=ranks), changes)
    made = merge_sections(runs.check_run_values(setup, f"models-{name}", common), sections)
    if made["model"].get("transformer", {}).get("multi_latent_attention"):  # it has no grouped queries
        made["model"]["num_query_groups"] = made["model"]["num_attention_heads"]
    return resolve.dump_run_config(runs.compose_values(setup, made))
