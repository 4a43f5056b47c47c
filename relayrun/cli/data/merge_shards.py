"""`relayrun dumps merge`, and scripts/tools/merge_datasets.py: the shards of a folder as one shard."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import find_prefixes


def add_merge_shards_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--input",
        required=True,
        nargs="+",
        type=Path,
        metavar="DIR",
        help="folders of shards, in the order in which they are to follow",
    )
    parser.add_argument("--output-prefix", required=True, metavar="P", help="gets P.bin, P.idx and P.record.json")
    parser.add_argument(
        "--multimodal", action="store_true", help="the indices hold a mode of every sequence, as Megatron's may"
    )
    parser.set_defaults(run=run_merge_shards)


def run_merge_shards(options: argparse.Namespace) -> int:
    """Merge the token shards of a folder into one, byte by byte. Raises RelayrunError."""
    check_outputs({"--output-prefix": options.output_prefix})
    prefixes = find_prefixes(options.input, listed=True)
    shard = merge_shards(prefixes, options.output_prefix, multimodal=options.multimodal)
    print(f"{len(prefixes):,} shards, {shard.documents:,} documents, {shard.tokens:,} tokens: {shard.prefix}")
    return 0
