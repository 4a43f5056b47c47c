"""`relayrun dumps`: where the dumps of a tokenization stand, what is wrong with them, which settings suit a node."""

from __future__ import annotations

import argparse
import os
import typing

from relayrun.cli.data import (
    download,
    dump_size,
    example_text,
    merge_shards,
    prepare_dumps,
    reshard,
    submit_dumps,
    tokenize,
    train_tokenizer,
)
from relayrun.config.compose.writable import check_outputs
from relayrun.tokens.tokenize import dump_status, tune
from relayrun.tokens.tokenize.options import EngineName, TokenizeOptions
from relayrun.tokens.tokenize.pool import use_one_thread

SUBCOMMANDS = (
    ("example", "text that every machine has, to try things with", example_text.add_example_arguments),
    (
        "download",
        "files of a data set of the Hugging Face hub, their checksums compared",
        download.add_download_arguments,
    ),
    (
        "tokenizer",
        "train a tokenizer on a dataset's text, or make one of bytes",
        train_tokenizer.add_tokenizer_arguments,
    ),
    ("shuffle", "shuffle a dataset globally, into parquet files of even size", reshard.add_shuffle_arguments),
    ("prepare", "split a dataset into dumps, one job each", prepare_dumps.add_prepare_arguments),
    (
        "submit",
        "tokenize all dumps of a YAML config, as Slurm jobs or on this machine",
        submit_dumps.add_submit_dumps_arguments,
    ),
    ("tokenize", "tokenize the files of one dump: what a job does", tokenize.add_tokenize_arguments),
    ("merge", "the shards of a folder as one shard", merge_shards.add_merge_shards_arguments),
    ("size", "bytes of a dump's files", dump_size.add_dump_size_arguments),
)
"""Subcommands with modules of their own, most of them also programs in scripts/ or launchers/."""


def add_dumps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun dumps`."""
    commands = parser.add_subparsers(dest="dumps_command", required=True)
    for name, words, add in SUBCOMMANDS:
        add(commands.add_parser(name, help=words))
    status_command = commands.add_parser("status", help="done, tokens, speed, what is left, failures")
    tune_command = commands.add_parser("tune", help="try workers and batches on the dataset's own files, on this node")
    verify_command = commands.add_parser(
        "verify", help="check finished dumps against their checksums and files; open those with faults again"
    )
    for each in (status_command, tune_command, verify_command):
        each.add_argument("folder", metavar="METADATA_FOLDER", help="as written by prepare_dumps.py")
    status_command.add_argument(
        "--watch",
        type=float,
        metavar="SECONDS",
        help="again and again, until all dumps are done, or the rest has failed: exit code 1",
    )
    tune_command.add_argument(
        "--tokenizer-name-or-path",
        required=True,
        metavar="T",
        help="a tokenizer.json, a folder that holds one, or a hub name",
    )
    tune_command.add_argument(
        "--column", default=TokenizeOptions.default("column"), help="column of the text (default: %(default)s)"
    )
    tune_command.add_argument(
        "--engine",
        choices=typing.get_args(EngineName),
        default=TokenizeOptions.default("engine"),
        help="as for preprocess_megatron.py (default: %(default)s)",
    )
    tune_command.add_argument(
        "--workers",
        type=int,
        nargs="+",
        metavar="N",
        help="numbers to try (default: 1, and a quarter, half and all of the cores)",
    )
    sizes = ", ".join(f"{size:,}" for size in tune.TRIED_BATCH_BYTES)
    tune_command.add_argument(
        "--batch-bytes", type=int, nargs="+", metavar="N", help=f"bounds of a batch to try (default: {sizes})"
    )
    tune_command.add_argument(
        "--seconds",
        type=float,
        default=10.0,
        metavar="S",
        help="that each pair is measured, start-up aside (default: %(default)s)",
    )
    tune_command.add_argument(
        "--temp-dir", metavar="DIR", help="on the file system that the dumps go to (default: TMPDIR)"
    )
    verify_command.add_argument(
        "--full", action="store_true", help="tokenize all documents again, slowly (default: a sample of each shard)"
    )
    verify_command.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, metavar="N", help="shards at a time (default: %(default)s)"
    )
    verify_command.add_argument("--temp-dir", metavar="DIR", help="for --full: gets shards (default: TMPDIR)")
    for each in (status_command, tune_command, verify_command):
        each.set_defaults(run=run_dumps)


def run_dumps(options: argparse.Namespace) -> int:
    """Print where the dumps of a metadata folder stand, what is wrong with them, or which settings suit this node."""
    if options.dumps_command == "status":
        if options.watch is not None:
            return 0 if dump_status.watch_status(options.folder, max(options.watch, 0.1)) else 1
        print(dump_status.status_table(dump_status.read_status(options.folder)))
        return 0
    check_outputs({"--temp-dir": options.temp_dir})
    if options.dumps_command == "verify":
        return _verify_dumps(options)

    print(tune.trial_row(None), flush=True)
    trials = tune.run_trials(
        options.folder,
        TokenizeOptions(
            tokenizer=options.tokenizer_name_or_path, column=options.column, engine=options.engine, append_eod="auto"
        ),
        workers=options.workers or tune.default_workers(),
        batch_bytes=options.batch_bytes or tune.TRIED_BATCH_BYTES,
        seconds=options.seconds,
        temp_dir=options.temp_dir,
        report=lambda trial: print(tune.trial_row(trial), flush=True),
    )
    print(tune.config_advice(tune.recommend_trial(trials)))
    return 0


def _verify_dumps(options: argparse.Namespace) -> int:
    use_one_thread()
    from relayrun.tokens.tokenize.verify import VerifiedDump, verify_dumps  # numpy, which may start threads

    def report(verified: VerifiedDump) -> None:
        print(verified.summary(), flush=True)

    verified = verify_dumps(
        options.folder,
        full=options.full,
        workers=options.workers,
        temp_dir=options.temp_dir,
        report=report,
    )
    return 1 if any(each.faults for each in verified) else 0
