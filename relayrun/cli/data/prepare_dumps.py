"""`relayrun dumps prepare`, and scripts/tokenization/prepare_dumps.py: a dataset as dumps, one job each."""

from __future__ import annotations

import argparse

from relayrun.config.compose.writable import check_outputs
from relayrun.tokens.tokenize.split import prepare_dumps, print_dumps


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--dataset-folder",
        required=True,
        metavar="D",
        help="a folder, or a URL that fsspec knows (s3://bucket/x), searched for parquet, "
        "JSON lines (.jsonl, .json, also .gz and .zst), .csv(.gz) and .arrow files",
    )
    parser.add_argument(
        "--preprocessing-metadata-folder",
        required=True,
        metavar="M",
        help="gets raw-dataset-link and dumps/paths_file_{i}.txt",
    )
    parser.add_argument(
        "--filter-in",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="keep files whose path below D contains any of these (case-sensitive)",
    )
    parser.add_argument(
        "--filter-out",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="leave out files whose path below D contains any of these",
    )
    parser.add_argument("--n-dumps", type=int, metavar="N", help="default: one per 150 GB begun")
    parser.add_argument(
        "--seconds-per-gb",
        type=float,
        default=20.0,
        metavar="S",
        help="for the estimate of hours (default: %(default)s)",
    )
    parser.set_defaults(run=run_prepare)


def run_prepare(options: argparse.Namespace) -> int:
    """Split a dataset into dumps: write the paths files that the tokenization jobs read. Raises RelayrunError."""
    check_outputs({"--preprocessing-metadata-folder": options.preprocessing_metadata_folder})
    dumps = prepare_dumps(
        options.dataset_folder,
        options.preprocessing_metadata_folder,
        filter_in=options.filter_in,
        filter_out=options.filter_out,
        n_dumps=options.n_dumps,
    )
    print_dumps(dumps, seconds_per_gb=options.seconds_per_gb)
    return 0
