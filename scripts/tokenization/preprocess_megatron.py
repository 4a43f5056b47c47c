#!/usr/bin/env python3
"""Tokenize the files of one dump into Megatron shards (.bin and .idx)."""

from __future__ import annotations

import argparse
import sys

from relayrun.errors import run_main


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--tokenizer-name-or-path",
        "--model-identifier",
        required=True,
        metavar="T",
        help="a tokenizer.json, a folder that holds one, or a hub name",
    )
    parser.add_argument("--output-folder", "--path", required=True, metavar="O", help="gets the shards")
    parser.add_argument(
        "--dataset",
        required=True,
        metavar="D",
        help="folder that the paths start at, or a URL that fsspec knows (s3://bucket/x)",
    )
    parser.add_argument("--paths-file", required=True, metavar="P", help="paths below D, one a line")
    parser.add_argument(
        "--n-tasks",
        type=int,
        default=8,
        metavar="N",
        help="number of shards, at most one per file (default: %(default)s)",
    )
    parser.add_argument(
        "--n-workers", type=int, default=-1, metavar="N", help="shards made at a time; -1: as many as tasks (default)"
    )
    parser.add_argument("--column", "--text-field", default="text", help="column of the text (default: %(default)s)")
    parser.add_argument("--eos-token", metavar="TOKEN", help="ends every document (default: the tokenizer's own)")
    parser.add_argument(
        "--append-eod",
        nargs="?",
        choices=("yes", "no", "auto"),
        const="yes",
        default="yes",
        help="auto: warn and go on where the tokenizer has no EOS (default: %(default)s)",
    )
    parser.add_argument("--bos", action="store_true", help="put the tokenizer's BOS in front of every document")
    parser.add_argument(
        "--special-text", action="store_true", help="text of a special token in a document becomes that token"
    )
    parser.add_argument("--keep-empty", action="store_true", help="keep documents without text, as Megatron-LM does")
    parser.add_argument(
        "--engine",
        choices=("auto", "huggingface", "fastokens", "gigatoken"),
        default="auto",
        help="auto: the fastest that gives Hugging Face's ids (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-documents",
        "--tokenization-batch-size",
        type=int,
        default=10_000,
        metavar="N",
        help="most documents tokenized at a time (default: %(default)s)",
    )
    parser.add_argument(
        "--batch-bytes",
        type=int,
        default=4_000_000,
        metavar="N",
        help="most bytes of them, a longer document alone (default: %(default)s)",
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="skip: leave out files that cannot be read (default: %(default)s)",
    )
    parser.add_argument("--cache-dir", metavar="C", help="where tokenizers of the Hugging Face hub are kept")
    parser.add_argument("--logging-dir", metavar="L", help="gets a copy of the tokenizer (default: logs in O)")
    options = vars(parser.parse_args())

    from relayrun.tokenization.pool import one_thread

    one_thread()
    from relayrun.tokenization.pipeline import tokenize  # pyarrow, tokenizers: not paid for --help

    print(tokenize(**options).summary())
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
