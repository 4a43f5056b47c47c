"""`relayrun dumps tokenize`, and scripts/tokenization/preprocess_megatron.py: files of text as token shards."""

from __future__ import annotations

import argparse

from relayrun.config.compose.writable import check_outputs
from relayrun.tokens.tokenize.flags import add_tokenize_flags, options_from_flags


def add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--output-folder", "--path", required=True, metavar="O", help="gets the shards")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="D",
        help="folder that the paths start at, or a URL that fsspec knows (s3://bucket/x)",
    )
    parser.add_argument("--paths-file", required=True, metavar="P", help="paths below D, one a line")
    parser.add_argument("--logging-dir", metavar="L", help="gets a copy of the tokenizer (default: logs in O)")
    add_tokenize_flags(parser)
    parser.set_defaults(run=run_tokenize)


def run_tokenize(given: argparse.Namespace) -> int:
    """Tokenize the files of one dump into Megatron shards (.bin and .idx). Raises RelayrunError."""
    options = options_from_flags(given)
    check_outputs({"--output-folder": given.output_folder, "--logging-dir": given.logging_dir})

    from relayrun.tokens.tokenize.pool import use_one_thread

    use_one_thread()
    from relayrun.tokens.tokenize.pipeline import tokenize_paths_file  # pyarrow, tokenizers: not paid for --help

    result = tokenize_paths_file(
        options,
        output_folder=given.output_folder,
        dataset=given.dataset,
        paths_file=given.paths_file,
        logging_dir=given.logging_dir,
    )
    print(result.summary())
    return 0
