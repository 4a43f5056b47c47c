"""The part `attention`: which kernel runs, how fast for whole sequences and for packed documents."""

from __future__ import annotations

from relayrun.gpucheck.ranks import run_program
from relayrun.gpucheck.setup import CheckFailed, Figures, Setup


def measure(setup: Setup, figures: Figures) -> None:
    """Measure one layer's attention. Raises CheckFailed where whole sequences could not be measured."""
    try:
        found = run_program(setup, "relayrun.gpucheck.programs.attention")
    except CheckFailed as error:
        for name, value in (error.found or {}).items():
            figures.add(name, value)
        raise
    for name, value in found.items():
        figures.add(name, value)
    if "not_measured" in found["whole"]:
        raise CheckFailed(f"attention of whole sequences: {found['whole']['not_measured']}")
