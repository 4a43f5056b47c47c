"""`relayrun dumps example | tokenizer | shuffle | tokenize`: from raw text to token shards.

`tokenize` and `shuffle` are also programs in scripts/tokenization/. This module does not import numpy: `tokenize`
limits the number of threads before it imports the libraries that start them.
"""

from __future__ import annotations

import argparse
import math
import os
from dataclasses import fields
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import ConfigError
from relayrun.tokens.tokenize.encode.tokenizer_files import BYTE_SPECIAL_TOKENS, write_byte_tokenizer
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from relayrun.tokens.tokenize.options import STEP_FIELDS, TokenizeOptions, add_tokenize_flags, options_from_flags


def add_example_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("--output-folder", required=True, type=Path, metavar="O", help="gets docs/, code/ and heldout/")
    parser.add_argument("--megabytes", type=float, default=24.0, help="text of docs and code (default: %(default)s)")
    parser.set_defaults(run=run_example)


def run_example(options: argparse.Namespace) -> int:
    """Write documentation and sources of this Python installation as parquet. Raises RelayrunError."""
    check_outputs({"--output-folder": options.output_folder})
    from relayrun.lab.corpus import build_corpus  # pyarrow

    for each in build_corpus(options.output_folder, megabytes=options.megabytes).values():
        print(f"{each.folder}: {each.documents:,} documents, {each.bytes / 1e6:.1f} MB")
    return 0


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no size")
    return value


def add_shuffle_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add, default = parser.add_argument, TokenizeOptions.default
    add("--dataset-folder", required=True, metavar="D", help="local, or a URL that fsspec knows (s3://bucket/x)")
    add("--output-folder", required=True, type=Path, metavar="O", help="must not exist yet")
    add("--column", default=default("column"), help="of the text (default: %(default)s)")
    add("--seed", type=int, default=0)
    add("--file-size", type=_finite, default=500, metavar="MB", help="default: %(default)s")
    groups = parser.add_mutually_exclusive_group()
    groups.add_argument("--row-group-size", type=int, default=4096, metavar="ROWS", help="default: %(default)s")
    size = "row groups of about so much text, before it is compressed"
    groups.add_argument("--row-group-mb", type=_finite, metavar="MB", help=size)
    add("--split-rows", type=int, metavar="N", help="cut texts of more than N characters into rows of at most N")
    add("--split-overlap", type=int, default=0, metavar="M", help="characters of a row that the next one repeats")
    add("--compression", choices=("snappy", "zstd", "gzip", "lz4", "none"), default="snappy")
    add("--memory-limit", type=_finite, default=4, metavar="GB", help="default: %(default)s")
    add("--temp-dir", type=Path, metavar="T", help="gets as many bytes as the dataset has unpacked (default: TMPDIR)")
    add("--threads", type=int, default=1, metavar="N", help="at most, as memory allows (default: %(default)s)")
    bad = "skip-line: leave out lines and rows without a text in UTF-8, and count them (default: %(default)s)"
    add("--on-error", choices=("fail", "skip-line"), default=default("on_error"), help=bad)
    add("--check", action="store_true", help="look at files, columns and memory alone; write nothing")
    parser.set_defaults(run=run_global_shuffle)


def run_global_shuffle(given: argparse.Namespace) -> int:
    """Shuffle a dataset globally, into parquet files of even size. Raises RelayrunError."""
    check_outputs({"--output-folder": given.output_folder, "--temp-dir": given.temp_dir})
    if given.memory_limit >= 2:
        # Arrow's allocator keeps its pages: returning and clearing them costs CPU time. It keeps up to 150 MB
        # more than it needs, too much for a small limit.
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    # pyarrow: slow import, not needed for --help
    from relayrun.tokens.shuffle.reshard import ReshardOptions, make_shuffle_plan, reshard

    names = {field.name for field in fields(ReshardOptions)} & vars(given).keys()
    options = ReshardOptions(
        **{name: getattr(given, name) for name in names - {"file_size", "memory_limit"}},
        output=given.output_folder,
        file_size=int(given.file_size * 1e6),
        row_group_bytes=None if given.row_group_mb is None else round(given.row_group_mb * 1e6),
        memory_limit=int(given.memory_limit * 1e9),
    )
    if given.check:
        make_shuffle_plan(options)
        return 0
    rows = reshard(options)
    print(f"{rows:,} rows in {given.output_folder}")
    return 0


def add_tokenize_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add, place = parser.add_argument, "folder that the paths start at, or a URL that fsspec knows (s3://bucket/x)"
    add("--output-folder", "--path", required=True, metavar="O", help="gets the shards")
    add("--dataset", required=True, metavar="D", help=place)
    add("--paths-file", required=True, metavar="P", help="paths below D, one a line")
    add("--logging-dir", metavar="L", help="gets a copy of the tokenizer (default: logs in O)")
    add("--steps", metavar="CONFIG", help="pass documents through the reader and the pipeline of this YAML")
    add_tokenize_flags(parser)
    parser.set_defaults(run=run_tokenize)


def run_tokenize(given: argparse.Namespace) -> int:
    """Tokenize the files of one dump into Megatron shards (.bin and .idx). Raises RelayrunError."""
    options = options_from_flags(given)
    if given.steps is not None:
        config = load_tokenization_config(given.steps)
        options = options.model_copy(update={name: getattr(config, name) for name in STEP_FIELDS})
    check_outputs({"--output-folder": given.output_folder, "--logging-dir": given.logging_dir})

    from relayrun.tokens.tokenize.processes import use_one_thread

    use_one_thread()
    from relayrun.tokens.tokenize.pipeline import tokenize_paths_file  # slow import, not needed for --help

    result = tokenize_paths_file(
        options,
        output_folder=given.output_folder,
        dataset=given.dataset,
        paths_file=given.paths_file,
        logging_dir=given.logging_dir,
    )
    print(result.summary())
    return 0


def add_tokenizer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add, column = parser.add_argument, TokenizeOptions.default("column")
    folders = "folders or URLs with the files that `relayrun dumps prepare` takes; each gives an equal share"
    add("--dataset-folder", nargs="+", metavar="D", help=folders)
    add("--output-folder", required=True, type=Path, metavar="T", help="gets tokenizer.json")
    add("--vocabulary-size", type=int, default=4096, metavar="N", help="with 256 bytes (default: %(default)s)")
    add("--column", default=column, help="of the text (default: %(default)s)")
    add("--bytes", action="store_true", help="without training: every byte is a token, as models of genomes have it")
    parser.set_defaults(run=run_tokenizer)


def run_tokenizer(options: argparse.Namespace) -> int:
    """Make a tokenizer, and print its path. Raises RelayrunError."""
    check_outputs({"--output-folder": options.output_folder})
    if options.bytes:
        if options.dataset_folder:
            raise ConfigError("--bytes reads no text", where="--dataset-folder", hint="leave one of the two out")
        made, special = write_byte_tokenizer(options.output_folder), ", ".join(BYTE_SPECIAL_TOKENS.values())
        print(f"{made}: a token for each byte, its id the byte; {special} are the tokens 0 to 3")
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
