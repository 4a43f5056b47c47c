"""`relayrun dumps tokenizer`: a tokenizer of one's own, trained on a dataset's text, or of bytes alone."""

from __future__ import annotations

import argparse
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import ConfigError
from relayrun.tokens.tokenize.encode.byte_tokenizer import BYTE_SPECIAL_TOKENS, write_byte_tokenizer
from relayrun.tokens.tokenize.options import TokenizeOptions


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--dataset-folder",
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
    parser.add_argument(
        "--bytes", action="store_true", help="without training: every byte is a token, as models of genomes have it"
    )
    parser.set_defaults(run=run_tokenizer)


def run_tokenizer(options: argparse.Namespace) -> int:
    """Make a tokenizer and say where it is. Raises RelayrunError."""
    check_outputs({"--output-folder": options.output_folder})
    if options.bytes:
        if options.dataset_folder:
            raise ConfigError("--bytes reads no text", where="--dataset-folder", hint="leave one of the two out")
        made = write_byte_tokenizer(options.output_folder)
        print(
            f"{made}: a token for each byte, its id the byte; {', '.join(BYTE_SPECIAL_TOKENS.values())} are the tokens 0 to 3"
        )
        return 0
    if not options.dataset_folder:
        raise ConfigError(
            "a tokenizer is trained on text", hint="give --dataset-folder, or --bytes for a tokenizer of bytes alone"
        )
    from relayrun.tokens.tokenize.train_tokenizer import BOS_TOKEN, EOS_TOKEN, train_tokenizer  # pyarrow

    made = train_tokenizer(
        options.dataset_folder, options.output_folder, column=options.column, vocabulary_size=options.vocabulary_size
    )
    print(f"{made}: byte-level BPE; {BOS_TOKEN} is token 0, and {EOS_TOKEN}, which ends every document, token 1")
    return 0
