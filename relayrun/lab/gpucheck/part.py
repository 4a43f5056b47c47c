"""`python -m relayrun.lab.gpucheck.part MODULE:FUNCTION SETUP FIGURES`: one part of a check, in its own process.

The function gets a `CheckSetup` and a `PartFigures`. Errors are printed, the reason in the last line of the log.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from relayrun.errors import run_main
from relayrun.lab.gpucheck.setup import CheckSetup, PartFigures


def main() -> int:
    """Measure one part; a RelayrunError is printed as its message, other errors propagate."""
    what, setup, figures = sys.argv[1:4]
    module, _, name = what.partition(":")
    getattr(importlib.import_module(module), name)(CheckSetup.read(Path(setup)), PartFigures(Path(figures)))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
