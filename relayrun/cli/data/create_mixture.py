"""`relayrun mixture create`, and scripts/tools/create_data_mixture.py: data sets with weights as a folder of links."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.tokens.mixture.folder import create_mixture
from relayrun.tokens.mixture.refusals import MAX_REPEATS
from relayrun.tokens.mixture.select import parse_token_count


def add_create_mixture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
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
        default=MAX_REPEATS,
        metavar="N",
        help=f"how often a dataset may be read before the mixture is refused (default: {MAX_REPEATS})",
    )
    parser.add_argument(
        "--whole-shards",
        action="store_true",
        help="cut none: weights hold to one shard (for readers that take all of a .bin)",
    )
    parser.add_argument(
        "--allow-other-tokenizer",
        action="store_true",
        help="take shards of different tokenizers, with a warning: for one to which tokens were added",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the table; write nothing")
    parser.set_defaults(run=run_create_mixture)


def run_create_mixture(arguments: argparse.Namespace) -> int:
    """Make a mixture: a folder of links to token shards, each dataset with its weight. Raises RelayrunError."""
    check_outputs({"--output": arguments.output})
    summary = create_mixture(
        arguments.folders,
        arguments.weights,
        arguments.output,
        seed=arguments.seed,
        tokens=parse_token_count(arguments.tokens) if arguments.tokens is not None else None,
        allow_repeats=arguments.allow_repeats,
        most_repeats=arguments.most_repeats,
        whole_shards=arguments.whole_shards,
        allow_other_tokenizer=arguments.allow_other_tokenizer,
        dry_run=arguments.dry_run,
        report=lambda line: print(line, file=sys.stderr),
    )
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # names need not be UTF-8
    print(summary, end="")
    return 0
