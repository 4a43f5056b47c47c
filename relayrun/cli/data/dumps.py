"""`relayrun dumps`: a data set as dumps, one tokenization job each.

`prepare` splits a data set into dumps, `submit` queues their jobs, `status` prints their progress, `tune` measures
worker counts and batch sizes on this node, `verify` checks finished dumps, `size` prints a dump's bytes.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from relayrun.cli.data import shards, tokenize
from relayrun.config.compose.writable import check_outputs
from relayrun.errors import ConfigError, InputError
from relayrun.tokens.readers.inputs import data_endings
from relayrun.tokens.readers.inventory import other_rows
from relayrun.tokens.tokenize import dump_status, tune
from relayrun.tokens.tokenize.dump_jobs import submit_dumps
from relayrun.tokens.tokenize.dumps import DumpsFolder, dump_size, prepare_dumps, print_dumps
from relayrun.tokens.tokenize.job_config import load_tokenization_config
from relayrun.tokens.tokenize.options import TokenizeOptions, add_tokenize_flags
from relayrun.tokens.tokenize.processes import use_one_thread


def add_dump_size_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("paths_file", type=Path, metavar="PATHS_FILE")
    parser.set_defaults(run=run_dump_size)


def run_dump_size(options: argparse.Namespace) -> int:
    """Print the bytes of all files of a paths file. Raises RelayrunError."""
    print(dump_size(options.paths_file))
    return 0


def add_prepare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "default": [], "metavar": "TEXT"}
    known = f"files that end in {data_endings()}"
    place = f"a folder, or a URL that fsspec knows (s3://bucket/x), searched for {known}"
    add("--dataset-folder", required=True, metavar="D", help=place)
    made = "gets raw-dataset-link and dumps/paths_file_{i}.txt"
    add("--preprocessing-metadata-folder", required=True, metavar="M", help=made)
    add("--filter-in", **several, help="keep files whose path below D contains any of these (case-sensitive)")
    add("--filter-out", **several, help="leave out files whose path below D contains any of these")
    given = "take the files that end so, in place of the known ones, for the `reader` of the YAML (.warc.gz)"
    add("--ending", action="append", default=[], metavar="ENDING", help=given)
    add("--all-splits", action="store_true", help="take validation and test sets beside other text, too")
    add("--n-dumps", type=int, metavar="N", help="default: one per 150 GB begun")
    estimate = "for the estimate of hours (default: %(default)s)"
    add("--seconds-per-gb", type=float, default=20.0, metavar="S", help=estimate)
    parser.set_defaults(run=run_split_into_dumps)


def run_split_into_dumps(options: argparse.Namespace) -> int:
    """Split a dataset into dumps: write the paths files that tokenization jobs read. Raises RelayrunError."""
    check_outputs({"--preprocessing-metadata-folder": options.preprocessing_metadata_folder})
    dumps = prepare_dumps(
        options.dataset_folder,
        options.preprocessing_metadata_folder,
        filter_in=options.filter_in,
        filter_out=options.filter_out,
        n_dumps=options.n_dumps,
        all_splits=options.all_splits,
        endings=options.ending,
    )
    print_dumps(dumps, seconds_per_gb=options.seconds_per_gb)
    return 0


def add_submit_dumps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("config", metavar="CONFIG", help="for example configs/data/tokenization-example.yaml")
    parser.add_argument("--executor", choices=("local", "slurm"), help="instead of the config's own")
    parser.add_argument("--wait", action="store_true", help="return when all Slurm jobs have ended")
    parser.set_defaults(run=run_submit_dumps)


def run_submit_dumps(options: argparse.Namespace) -> int:
    """Tokenize or deduplicate the dumps of a dataset, as Slurm jobs or on this machine. Raises RelayrunError."""
    config = load_tokenization_config(options.config)
    if options.executor is not None:
        config = config.model_copy(update={"executor": options.executor})
    if getattr(options, "dumps_command", None) == "dedup":
        from relayrun.tokens.curate.dedup_jobs import deduplicate  # datatrove takes a second to import

        deduplicate(config, wait=options.wait)
        return 0
    if config.dedup is not None:
        hint = "tokenize the output folder of `relayrun dumps dedup`, with a YAML of its own"
        raise ConfigError("these dumps hold the text before `dedup`", where=options.config, hint=hint)
    submit_dumps(config, wait=options.wait)
    if rows := other_rows(inventory := DumpsFolder(config.metadata_folder).inventory):
        hint = "fetch what is missing and prepare again, with --filter-out NOTE if its count is of another version"
        raise InputError("; ".join(rows), where=inventory, hint=hint)
    return 0


SUBCOMMANDS = (
    ("example", "text that every machine has, to try things with", tokenize.add_example_arguments),
    ("tokenizer", "train a tokenizer on a dataset's text, or make one of bytes", tokenize.add_tokenizer_arguments),
    ("shuffle", "shuffle a dataset globally, into parquet files of even size", tokenize.add_shuffle_arguments),
    ("prepare", "split a dataset into dumps, one job each", add_prepare_arguments),
    ("dedup", "duplicates and text of evaluations out of all dumps, in stages", add_submit_dumps_arguments),
    ("submit", "tokenize all dumps of a YAML config, as Slurm jobs or on this machine", add_submit_dumps_arguments),
    ("tokenize", "tokenize the files of one dump: what a job does", tokenize.add_tokenize_arguments),
    ("merge", "the shards of a folder as one shard", shards.add_merge_shards_arguments),
    ("size", "bytes of a dump's files", add_dump_size_arguments),
)
"""Subcommands whose arguments other functions add; most are programs in scripts/ or launchers/ as well."""


def add_dumps_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `relayrun dumps`."""
    commands = parser.add_subparsers(dest="dumps_command", required=True)
    for name, words, add_arguments in SUBCOMMANDS:
        add_arguments(commands.add_parser(name, help=words))
    faults = "check finished dumps, also below a URL, against checksums and files; open those with faults again"
    for name, words, run in (
        ("status", "done, tokens, speed, what is left, failures", run_dump_status),
        ("tune", "try workers and batches on the dataset's own files, on this node", run_tune),
        ("verify", faults, run_verify_dumps),
    ):
        command = commands.add_parser(name, help=words)
        command.add_argument("folder", metavar="METADATA_FOLDER", help="of `relayrun dumps prepare`")
        command.set_defaults(run=run)
    end = "again and again, until all dumps are done, or the rest has failed: exit code 1"
    commands.choices["status"].add_argument("--watch", type=float, metavar="SECONDS", help=end)
    _add_tune_arguments(commands.choices["tune"])
    add, cores = commands.choices["verify"].add_argument, os.cpu_count() or 1
    add("--full", action="store_true", help="tokenize all documents again, slowly (default: a sample of each shard)")
    add("--workers", type=int, default=cores, metavar="N", help="shards at a time (default: %(default)s)")
    add("--temp-dir", metavar="DIR", help="for --full: gets shards (default: TMPDIR)")


def _add_tune_arguments(parser: argparse.ArgumentParser) -> None:
    add_tokenize_flags(parser, ("tokenizer", "column", "engine"))
    parser.add_argument("--steps", metavar="CONFIG", help="with the reader and the pipeline of this YAML")
    numbers: dict[str, Any] = {"type": int, "nargs": "+", "metavar": "N"}
    sizes = ", ".join(f"{size:,}" for size in tune.TRIED_BATCH_BYTES)
    add = parser.add_argument
    add("--workers", **numbers, help="numbers to try (default: 1, and a quarter, half and all of the cores)")
    add("--batch-bytes", **numbers, help=f"bounds of a batch to try (default: {sizes})")
    measured = "that each pair is measured, start-up aside (default: %(default)s)"
    add("--seconds", type=float, default=10.0, metavar="S", help=measured)
    add("--temp-dir", metavar="DIR", help="on the file system that the dumps go to (default: TMPDIR)")


def run_dump_status(options: argparse.Namespace) -> int:
    """Print the status of the dumps of a metadata folder."""
    if options.watch is not None:
        return 0 if dump_status.watch_status(options.folder, max(options.watch, 0.1)) else 1
    table = dump_status.status_table(dump_status.read_status(options.folder))
    inventory = DumpsFolder(options.folder).inventory
    print(table, *dump_status.dedup_status(options.folder), *other_rows(inventory), sep="\n")
    return 0


def run_tune(options: argparse.Namespace) -> int:
    """Print the speed of some settings, and the settings that suit this node."""
    check_outputs({"--temp-dir": options.temp_dir})
    print(tune.trial_row(None), flush=True)
    trials = tune.run_trials(
        options.folder,
        TokenizeOptions(tokenizer=options.tokenizer, column=options.column, engine=options.engine, append_eod="auto"),
        workers=options.workers or tune.default_workers(),
        batch_bytes=options.batch_bytes or tune.TRIED_BATCH_BYTES,
        seconds=options.seconds,
        temp_dir=options.temp_dir,
        steps=options.steps,
        report=lambda trial: print(tune.trial_row(trial), flush=True),
    )
    best = tune.recommend_trial(trials)
    settings = f"workers: {best.workers}, batch_bytes: {best.batch_bytes}, and tasks: {best.workers} or more"
    print(f"recommended for this node: {settings}")
    print(tune.forecast(best, options.folder, options.steps))
    return 0


def run_verify_dumps(options: argparse.Namespace) -> int:
    """Print the faults of the finished dumps of a metadata folder."""
    check_outputs({"--temp-dir": options.temp_dir})
    use_one_thread()
    from relayrun.tokens.tokenize.verify import verify_dumps  # numpy, which may start threads

    verified = verify_dumps(
        options.folder,
        full=options.full,
        workers=options.workers,
        temp_dir=options.temp_dir,
        report=lambda each: print(each.summary(), flush=True),
    )
    return 1 if any(each.faults for each in verified) else 0
