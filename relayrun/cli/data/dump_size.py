"""`relayrun dumps size`, and scripts/tokenization/compute_dump_size.py: the bytes of a dump's files."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.tokens.tokenize.metadata import dump_size


def add_dump_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("paths_file", type=Path, metavar="PATHS_FILE")
    parser.set_defaults(run=run_dump_size)


def run_dump_size(options: argparse.Namespace) -> int:
    """Print the bytes of all files of a paths file. Raises RelayrunError."""
    print(dump_size(options.paths_file))
    return 0
