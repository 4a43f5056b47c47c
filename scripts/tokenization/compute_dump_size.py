#!/usr/bin/env python3
"""Print the bytes of all files of a paths file (paths below ../raw-dataset-link)."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relayrun.errors import run_main
from relayrun.tokenization.dumps.metadata import dump_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths_file", type=Path, metavar="PATHS_FILE")
    print(dump_size(parser.parse_args().paths_file))
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
