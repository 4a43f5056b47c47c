"""`relayrun dumps tokenizer`: a tokenizer of one's own, trained on a dataset's text."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.config.writable import check_outputs
from relayrun.tokenization.options import TokenizeOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--dataset-folder",
        required=True,
        nargs="+",
        metavar="D",
        help="folders or URLs with the files that `relayrun dumps prepare` takes; each gives an equal share",
    )
    parser.add_argument("--output-folder", required=True, type=Path, metavar="T", help="gets tokenizer.json")
    parser.add_argument(
        "--vocabulary-size", type=int, default=4096, metavar="N", help="with 256 bytes (default: %(default)s)"
    )
    parser.add_argument(
        "--column", default=TokenizeOptions.default("column"), help="of the text (default: %(default)s)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Train a tokenizer and say where it is. Raises RelayrunError."""
    check_outputs({"--output-folder": options.output_folder})
    from relayrun.tokenization.train_tokenizer import BEGIN, END, train_tokenizer  # pyarrow

    made = train_tokenizer(
        options.dataset_folder, options.output_folder, column=options.column, vocabulary_size=options.vocabulary_size
    )
    print(f"{made}: byte-level BPE; {BEGIN} is token 0, and {END}, which ends every document, token 1")
    return 0
