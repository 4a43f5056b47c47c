"""`python -m relayrun.lab.gpucheck.part MODULE:FUNCTION SETUP FIGURES`: one part of a check, in a process of its own.

The function gets the `CheckSetup` and the `PartFigures`. What it raises is printed, the last line of the log says why.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from relayrun.errors import run_main
from relayrun.lab.gpucheck.setup import CheckSetup, PartFigures


def main() -> int:
    """Measure one part; what it raises goes on, but for a RelayrunError, which is printed as its message."""
    what, setup, figures = sys.argv[1:4]
    module, _, name = what.partition(":")
    getattr(importlib.import_module(module), name)(CheckSetup.read(Path(setup)), PartFigures(Path(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
