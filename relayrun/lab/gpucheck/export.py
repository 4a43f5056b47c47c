"""The part `export`: logits of an exported model, by transformers, against megatron-core's of the checkpoint."""

from __future__ import annotations

import shutil

from relayrun.lab.gpucheck import runs
from relayrun.lab.gpucheck.ranks import add_program
from relayrun.lab.gpucheck.setup import Figures, Setup

STEPS = 3


def measure(setup: Setup, figures: Figures) -> None:
    """Train a few iterations, export, compare. Raises CheckFailed."""
    sizes = setup.sizes
    sections = {
        "model": dict(sizes.resumed_model),
        "data": runs.real_data(setup),
        "training": {
            "steps": STEPS,
            "micro_batch_size": sizes.resumed_batch,
            "global_batch_size": sizes.resumed_batch * setup.ranks,
            "seq_length": sizes.resumed_seq_length,
        },
    }
    run = runs.train(setup, "export", sections, steps=STEPS)
    folder = setup.path / "exported"
    shutil.rmtree(folder, ignore_errors=True)
    add_program(setup, figures, "relayrun.lab.gpucheck.programs.export", run_dir=run.path, folder=folder)
    runs.forget(run)
    shutil.rmtree(folder, ignore_errors=True)
