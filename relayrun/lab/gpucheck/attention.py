"""The part `attention`: which kernel runs, how fast for whole sequences and for packed documents."""

from __future__ import annotations

from relayrun.lab.gpucheck.ranks import run_and_record_program
from relayrun.lab.gpucheck.setup import CheckFailed, CheckSetup, PartFigures


def measure_attention(setup: CheckSetup, figures: PartFigures) -> None:
    """Measure one layer's attention. Raises CheckFailed where whole sequences could not be measured."""
    found = run_and_record_program(setup, figures, "relayrun.lab.gpucheck.programs.attention")
    if "not_measured" in found["whole"]:
        raise CheckFailed(f"attention of whole sequences: {found['whole']['not_measured']}")
