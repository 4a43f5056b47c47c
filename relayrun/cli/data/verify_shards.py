"""`relayrun mixture verify`, and scripts/tools/verify_dataset.py: whether token shards are whole and true."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import InputError
from relayrun.tokens.shards.prefixes import find_prefixes
from relayrun.tokens.shards.record import FOLDER_RECORD
from relayrun.tokens.shards.verify import VerifiedShard, verify_shards


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
    """Check token shards, and name every fault. Raises RelayrunError where there is one."""
    check_outputs({"--temp-dir": options.temp_dir})
    size, eod = options.vocabulary_size, options.eod
    if options.tokenizer is not None:
        from relayrun.tokens.tokenize.encode.tokenizer import load_tokenizer
        from relayrun.tokens.tokenize.options import TokenizeOptions

        tokenizer = load_tokenizer(TokenizeOptions(tokenizer=options.tokenizer, append_eod="auto"))
        size, eod = size or tokenizer.size, tokenizer.eos_id if eod is None else eod

    def report(verified: VerifiedShard) -> None:
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
        from relayrun.tokens.tokenize.pool import use_one_thread

        use_one_thread()
        from relayrun.tokens.tokenize.retokenize import compare_with_source, print_comparison

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
