"""`relayrun mixture prefixes`, and scripts/tools/create_data_config.py: shards as Megatron's --data-path has them."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from relayrun.tokens.shards.prefixes import find_prefixes, join_prefixes


def add_prefixes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "-p",
        "--paths",
        action="append",
        required=True,
        metavar="A,B",
        help="folders separated by commas, blanks after commas ignored; may be repeated",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list")
    form.add_argument("--null", action="store_true", help="end each prefix with a NUL byte, as xargs -0 reads")
    parser.set_defaults(run=run_prefixes, error=parser.error)


def run_prefixes(arguments: argparse.Namespace) -> int:
    """Print the prefixes of all token shards below some folders. Raises RelayrunError."""
    paths = [Path(path.strip()) for value in arguments.paths for path in value.split(",") if path.strip()]
    if not paths:
        arguments.error("-p/--paths names no folder")
    prefixes = find_prefixes(paths, listed=True)
    if arguments.json:
        output = json.dumps(prefixes) + "\n"
    elif arguments.null:
        output = "".join(prefix + "\0" for prefix in prefixes)
    else:
        output = join_prefixes(prefixes) + "\n"
    sys.stdout.buffer.write(os.fsencode(output))  # bytes: a file name need not be UTF-8
    sys.stdout.buffer.flush()
    return 0
