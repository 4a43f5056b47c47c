"""`relayrun mixture create | prefixes | verify` and `relayrun dumps merge`: commands on token shards.

`create` makes a mixture: a folder of links to shards, each data set with its weight. `prefixes` prints the
shards below folders as Megatron's --data-path expects them. `verify` reads shards back. `merge` joins shards.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from functools import partial
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import InputError
from relayrun.tokens.mixture.create_mixture import MAX_REPEATS, create_mixture
from relayrun.tokens.mixture.shard_selection import parse_token_count
from relayrun.tokens.shards.checks import ShardCheckResult, verify_shards
from relayrun.tokens.shards.manifest import doubled_texts
from relayrun.tokens.shards.merge import merge_shards
from relayrun.tokens.shards.prefixes import find_prefixes, join_prefixes
from relayrun.tokens.shards.shard import FOLDER_RECORD

log = logging.getLogger(__name__)


def add_create_mixture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add, switch = parser.add_argument, partial(parser.add_argument, action="store_true")
    folders = "one folder a dataset; shards are found at any depth, links are followed"
    add("--folders", nargs="+", required=True, type=Path, metavar="DIR", help=folders)
    weights = "wanted share of the tokens, one a folder, in the same order"
    add("--weights", nargs="+", required=True, type=float, metavar="W", help=weights)
    output = "folder to write; a former mixture there is replaced, anything else refused"
    add("--output", required=True, type=Path, metavar="DIR", help=output)
    add("--seed", type=int, default=0, help="of the shuffle of each dataset's shards (default: 0)")
    total = "tokens in all, for example 300M, 10B, 1.5T; a dataset that has fewer than its share is repeated"
    add("--tokens", metavar="N", help=total)
    switch("--allow-repeats", help="end where the last dataset is used up, not the first: others are repeated")
    repeats = "how often a dataset may be read before the mixture is refused (default: %(default)s)"
    add("--most-repeats", type=int, default=MAX_REPEATS, metavar="N", help=repeats)
    others = "take shards of different tokenizers, with a warning: for one to which tokens were added"
    switch("--allow-other-tokenizer", help=others)
    switch("--replace", help="replace a former mixture that runs of this project read, too")
    switch("--dry-run", help="print the table; write nothing")
    parser.set_defaults(run=run_create_mixture)


def run_create_mixture(arguments: argparse.Namespace) -> int:
    """Make a mixture: a folder of links to token shards, each data set with its weight. Raises RelayrunError."""
    check_outputs({"--output": arguments.output})
    same = ("seed", "allow_repeats", "most_repeats", "allow_other_tokenizer", "dry_run")
    summary = create_mixture(
        arguments.folders,
        arguments.weights,
        arguments.output,
        tokens=parse_token_count(arguments.tokens) if arguments.tokens is not None else None,
        replace_used=arguments.replace,
        report=lambda line: print(line, file=sys.stderr),
        **{name: getattr(arguments, name) for name in same},
    )
    print(summary, end="")
    return 0


def add_merge_shards_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add, order = parser.add_argument, "folders of shards, in the order in which they are to follow"
    add("--input", required=True, nargs="+", type=Path, metavar="DIR", help=order)
    add("--output-prefix", required=True, metavar="P", help="gets P.bin, P.idx and P.record.json")
    add("--multimodal", action="store_true", help="the indices hold a mode of every sequence, as Megatron's may")
    parser.set_defaults(run=run_merge_shards)


def run_merge_shards(options: argparse.Namespace) -> int:
    """Concatenate the token shards of a folder, byte by byte. Raises RelayrunError."""
    check_outputs({"--output-prefix": options.output_prefix})
    prefixes = find_prefixes(options.input, listed=True)
    if (doubled := doubled_texts(prefixes, refuse=True)) is not None:
        log.warning("%s", doubled)
    shard = merge_shards(prefixes, options.output_prefix, multimodal=options.multimodal)
    print(f"{len(prefixes):,} shards, {shard.documents:,} documents, {shard.tokens:,} tokens: {shard.prefix}")
    return 0


def add_prefixes_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    paths = "folders separated by commas, blanks after commas ignored; may be repeated"
    parser.add_argument("-p", "--paths", action="append", required=True, metavar="A,B", help=paths)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print a JSON list")
    form.add_argument("--null", action="store_true", help="end each prefix with a NUL byte, as xargs -0 reads")
    parser.set_defaults(run=run_prefixes, error=parser.error)


def run_prefixes(arguments: argparse.Namespace) -> int:
    """Print the prefixes of all token shards below some folders. Raises RelayrunError."""
    paths = [Path(path.strip()) for value in arguments.paths for path in value.split(",") if path.strip()]
    if not paths:
        arguments.error("-p/--paths names no folder")
    prefixes = find_prefixes(paths, listed=True)
    if (doubled := doubled_texts(prefixes)) is not None:
        log.warning("%s", doubled)
    if arguments.json:
        output = json.dumps(prefixes) + "\n"
    elif arguments.null:
        output = "".join(prefix + "\0" for prefix in prefixes)
    else:
        output = join_prefixes(prefixes) + "\n"
    sys.stdout.buffer.write(os.fsencode(output))  # bytes: a file name need not be UTF-8
    sys.stdout.buffer.flush()
    return 0


def add_verify_shards_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR", help="shards are found at any depth")
    parser.add_argument("--tokenizer", metavar="T", help="gives the size of the vocabulary and the EOD")
    parser.add_argument("--vocabulary-size", type=int, metavar="N", help="ids must lie below it")
    parser.add_argument("--eod", type=int, metavar="ID", help="every document must end with it")
    parser.add_argument("--no-checksums", action="store_true", help="do not compare with the records of tokenization")
    parser.add_argument("--threads", type=int, metavar="N", help="shards at a time (default: one a core)")
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--full", action="store_true", help="tokenize all documents again from their files, slowly")
    source.add_argument("--no-source", action="store_true", help="tokenize none again")
    parser.add_argument("--temp-dir", metavar="T", help="for --full: gets a shard at a time (default: TMPDIR)")
    parser.set_defaults(run=run_verify_shards)


def run_verify_shards(options: argparse.Namespace) -> int:
    """Check token shards, and print every fault. Raises RelayrunError if there is a fault."""
    check_outputs({"--temp-dir": options.temp_dir})
    size, eod = options.vocabulary_size, options.eod
    if options.tokenizer is not None:
        from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
        from relayrun.tokens.tokenize.options import TokenizeOptions

        tokenizer = load_tokenizer(TokenizeOptions(tokenizer=options.tokenizer, append_eod="auto"))
        size, eod = size or tokenizer.size, tokenizer.eos_id if eod is None else eod

    def report(verified: ShardCheckResult) -> None:
        for fault in verified.faults:
            print(f"{verified.prefix}: {fault}", flush=True)

    checked = verify_shards(
        find_prefixes(options.folders),
        vocabulary_size=size,
        eod=eod,
        checksums=not options.no_checksums,
        threads=options.threads,
        report=report,
    )
    wrong = {each.prefix for each in checked if each.faults}
    print(f"{len(checked):,} shards, {sum(each.tokens for each in checked):,} tokens: {len(wrong):,} with faults")
    records = {Path(os.path.realpath(each.prefix + ".bin")).with_name(FOLDER_RECORD) for each in checked}
    if not options.no_source and any(record.is_file() for record in records):
        from relayrun.tokens.tokenize.processes import use_one_thread

        use_one_thread()
        from relayrun.tokens.tokenize.verify import compare_with_source, print_comparison

        compared = compare_with_source(
            [each.prefix for each in checked if not each.faults],
            full=options.full,
            tokenizer=options.tokenizer,
            workers=options.threads or os.cpu_count() or 1,
            temp_dir=options.temp_dir,
            report=print_comparison,
        )
        documents = sum(each.documents for each in compared)
        wrong |= {each.prefix for each in compared if each.fault is not None}
        print(f"{documents:,} documents tokenized again from their files")
    if wrong:
        raise InputError(
            f"{len(wrong):,} of {len(checked):,} shards have faults",
            hint="tokenize their dumps again, which makes these shards anew; `relayrun dumps verify METADATA_FOLDER` "
            "opens finished dumps for that; merge again what was merged",
        )
    return 0


def add_mixture_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun mixture`."""
    commands = parser.add_subparsers(dest="mixture_command", required=True)
    create = "a folder of links to shards, each data set with its weight in tokens"
    add_create_mixture_arguments(commands.add_parser("create", help=create))
    prefixes = "all shards below some folders, as Megatron's --data-path has them"
    add_prefixes_arguments(commands.add_parser("prefixes", help=prefixes))
    verify = "read shards back: sizes, ids, checksums, a sample tokenized again"
    add_verify_shards_arguments(commands.add_parser("verify", help=verify))
