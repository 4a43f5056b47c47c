"""The part `export`: logits of an exported model, by transformers, against megatron-core's of the checkpoint."""

from __future__ import annotations

import shutil

from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.ranks import run_and_record_program
from relayrun.lab.gpucheck.setup import CheckSetup, PartFigures

EXPORT_STEPS = 3


def measure_export(setup: CheckSetup, figures: PartFigures) -> None:
    """Train a few iterations, export, compare. Raises CheckFailed."""
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
    run = runs.train_run(setup, "export", sections, steps=EXPORT_STEPS)
    folder = setup.path / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    run_and_record_program(setup, figures, "relayrun.lab.gpucheck.programs.export", run_dir=run.path, folder=folder)
    runs.remove_checkpoints(run)
    shutil.rmtree(folder, ignore_errors=True)
