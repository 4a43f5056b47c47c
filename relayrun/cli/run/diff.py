"""`relayrun diff`: what differs in the settings of two run configs or runs."""

from __future__ import annotations

import argparse

from relayrun.cli.run import config
from relayrun.config.compose.differences import config_differences


def add_diff_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun diff`."""
    parser.add_argument("names", nargs=2, metavar="CONFIG", help="a run config, or RUN[:REVISION]")
    parser.set_defaults(run=run_diff)


def run_diff(options: argparse.Namespace) -> int:
    """Print a line for each setting that differs; the exit code is 1 if any does. Raises RelayrunError."""
    found = config_differences(*(config.read_config(name, [])[0] for name in options.names))
    print("\n".join(found) if found else "the settings of both are the same")
    return 1 if found else 0
