#!/usr/bin/env python3
"""Make a mixture: a folder of links to token shards, each dataset with its weight in tokens.

    create_data_mixture.py --folders data/web data/code --weights 0.8 0.2 --output data/mixture

Weights are normalised. No shard is repeated or cut; the mixture ends where a dataset is used up.
The table that is printed is written to OUTPUT/dataset_mixture_summary.txt, and as JSON beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relayrun.data.mixture import create_mixture
from relayrun.errors import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folders", nargs="+", required=True, type=Path, metavar="DIR",
                        help="one folder a dataset; shards are found at any depth, links are followed")  # fmt: skip
    parser.add_argument("--weights", nargs="+", required=True, type=float, metavar="W",
                        help="wanted share of the tokens, one a folder, in the same order")  # fmt: skip
    parser.add_argument("--output", required=True, type=Path, metavar="DIR",
                        help="folder to write; a former mixture there is replaced, anything else refused")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle of each dataset's shards (default: 0)")
    arguments = parser.parse_args()
    summary = create_mixture(arguments.folders, arguments.weights, arguments.output, seed=arguments.seed,
                             report=lambda line: print(line, file=sys.stderr))  # fmt: skip
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names need not be UTF-8
    print(summary, end="")


if __name__ == "__main__":
    sys.exit(run_main(main))
