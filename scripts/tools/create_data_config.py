#!/usr/bin/env python3
"""Print the prefixes of all token shards below some folders, for Megatron's --data-path.

    create_data_config.py -p data/mixture,data/extra            one line, separated by spaces
    create_data_config.py -p data/mixture --json > prefixes.json

Links are followed, the order is sorted, and the paths are absolute.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from relayrun.errors import run_main
from relayrun.shards.prefixes import find_prefixes, one_line


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
    arguments = parser.parse_args()
    paths = [Path(path.strip()) for value in arguments.paths for path in value.split(",") if path.strip()]
    if not paths:
        parser.error("-p/--paths names no folder")
    prefixes = find_prefixes(paths)
    if arguments.json:
        output = json.dumps(prefixes) + "\n"
    elif arguments.null:
        output = "".join(prefix + "\0" for prefix in prefixes)
    else:
        output = one_line(prefixes) + "\n"
    sys.stdout.buffer.write(os.fsencode(output))  # bytes: a file name need not be UTF-8
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.exit(run_main(main))
