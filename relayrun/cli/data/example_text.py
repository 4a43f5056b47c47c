"""`relayrun dumps example`: text that every machine has, to try things with."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.config.compose.writable import check_outputs


def add_example_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--output-folder", required=True, type=Path, metavar="O", help="gets docs/, code/ and heldout/")
    parser.add_argument("--megabytes", type=float, default=24.0, help="text of docs and code (default: %(default)s)")
    parser.set_defaults(run=run_example)


def run_example(options: argparse.Namespace) -> int:
    """Write documentation and sources of this Python installation as parquet. Raises RelayrunError."""
    check_outputs({"--output-folder": options.output_folder})
    from relayrun.lab.demo.corpus import build_corpus  # pyarrow

    made = build_corpus(options.output_folder, megabytes=options.megabytes)
    for each in (made.docs, made.code, made.heldout):
        print(f"{each.folder}: {each.documents:,} documents, {each.bytes / 1e6:.1f} MB")
    return 0
