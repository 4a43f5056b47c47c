"""`relayrun mixture`: token shards as data sets of a run: mixed by weight, listed, checked."""

from __future__ import annotations

import argparse

from relayrun.cli.data import create_mixture, shard_prefixes, verify_shards


def add_mixture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun mixture`."""
    commands = parser.add_subparsers(dest="mixture_command", required=True)
    create = commands.add_parser("create", help="a folder of links to shards, each data set with its weight in tokens")
    create_mixture.add_create_mixture_arguments(create)
    prefixes = commands.add_parser("prefixes", help="all shards below some folders, as Megatron's --data-path has them")
    shard_prefixes.add_prefixes_arguments(prefixes)
    verify = commands.add_parser("verify", help="read shards back: sizes, ids, checksums, a sample tokenized again")
    verify_shards.add_verify_shards_arguments(verify)
