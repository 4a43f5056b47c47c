#!/usr/bin/env python3
"""Make a mixture: a folder of links to token shards, each dataset with its weight in tokens.

    create_data_mixture.py --folders data/web data/code --weights 0.8 0.2 --output data/mixture

Weights are normalised, and hold to the document: the last shard of a dataset is cut by a shorter .idx over a linked
.bin. The mixture ends where a dataset is used up, unless --tokens or --allow-repeats is given. The table that is
printed, with its forecast (`lasts`: after how many tokens of the mixture a dataset has been read once), is written
to OUTPUT/dataset_mixture_summary.txt, and as JSON with every shard beside it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relayrun.config.writable import check_outputs
from relayrun.data.mixture.folder import create_mixture
from relayrun.data.mixture.refusals import MOST_REPEATS
from relayrun.data.mixture.select import parse_tokens
from relayrun.errors import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folders",
        nargs="+",
        required=True,
        type=Path,
        metavar="DIR",
        help="one folder a dataset; shards are found at any depth, links are followed",
    )
    parser.add_argument(
        "--weights",
        nargs="+",
        required=True,
        type=float,
        metavar="W",
        help="wanted share of the tokens, one a folder, in the same order",
    )
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="DIR",
        help="folder to write; a former mixture there is replaced, anything else refused",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the shuffle of each dataset's shards (default: 0)")
    parser.add_argument(
        "--tokens",
        metavar="N",
        help="tokens in all, for example 300M, 10B, 1.5T; a dataset that has fewer than its share is repeated",
    )
    parser.add_argument(
        "--allow-repeats",
        action="store_true",
        help="end where the last dataset is used up, not the first: others are repeated",
    )
    parser.add_argument(
        "--most-repeats",
        type=int,
        default=MOST_REPEATS,
        metavar="N",
        help=f"how often a dataset may be read before the mixture is refused (default: {MOST_REPEATS})",
    )
    parser.add_argument(
        "--whole-shards",
        action="store_true",
        help="cut none: weights hold to one shard (for readers that take all of a .bin)",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the table; write nothing")
    arguments = parser.parse_args()
    check_outputs({"--output": arguments.output})
    summary = create_mixture(
        arguments.folders,
        arguments.weights,
        arguments.output,
        seed=arguments.seed,
        tokens=parse_tokens(arguments.tokens) if arguments.tokens is not None else None,
        allow_repeats=arguments.allow_repeats,
        most_repeats=arguments.most_repeats,
        whole_shards=arguments.whole_shards,
        dry_run=arguments.dry_run,
        report=lambda line: print(line, file=sys.stderr),
    )
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names need not be UTF-8
    print(summary, end="")


if __name__ == "__main__":
    sys.exit(run_main(main))
