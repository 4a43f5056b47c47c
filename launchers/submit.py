#!/usr/bin/env python3
"""Submit a training run from a YAML config: `launchers/submit.py configs/runs/demo.yaml [--set a.b=c]`."""

import sys

from relayrun.cli import main

if __name__ == "__main__":
    sys.exit(main(["submit", *sys.argv[1:]]))
