#!/usr/bin/env python3
"""Tokenize the files of one dump into Megatron shards (.bin and .idx)."""

from __future__ import annotations

import argparse
import sys

from relayrun.config.writable import check_outputs
from relayrun.errors import run_main
from relayrun.tokenization.flags import add_flags, from_flags


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-folder", "--path", required=True, metavar="O", help="gets the shards")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="D",
        help="folder that the paths start at, or a URL that fsspec knows (s3://bucket/x)",
    )
    parser.add_argument("--paths-file", required=True, metavar="P", help="paths below D, one a line")
    parser.add_argument("--logging-dir", metavar="L", help="gets a copy of the tokenizer (default: logs in O)")
    add_flags(parser)
    given = parser.parse_args()
    options = from_flags(given)
    check_outputs({"--output-folder": given.output_folder, "--logging-dir": given.logging_dir})

    from relayrun.tokenization.pool import one_thread

    one_thread()
    from relayrun.tokenization.pipeline import tokenize  # pyarrow, tokenizers: not paid for --help

    result = tokenize(
        options,
        output_folder=given.output_folder,
        dataset=given.dataset,
        paths_file=given.paths_file,
        logging_dir=given.logging_dir,
    )
    print(result.summary())
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
