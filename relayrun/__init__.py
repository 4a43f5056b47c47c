"""relayrun: language-model pretraining on Slurm as a relay of jobs that never loses work."""

from pathlib import Path

__version__ = "0.1.0"

ROOT = Path(__file__).resolve().parents[1]
"""The folder that holds `launchers/` and `configs/`; relative paths in a config start here."""
