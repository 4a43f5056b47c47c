"""`relayrun dumps shuffle`, and scripts/tokenization/reshard.py: a global shuffle of a dataset on disk."""

from __future__ import annotations

import argparse
import math
import os
import signal
import sys
from pathlib import Path

from relayrun.config.compose.writable import check_outputs
from relayrun.errors import RelayrunError
from relayrun.tokens.tokenize.options import TokenizeOptions

SHUFFLE_STAGES = ("check", "begin", "scatter", "measure", "write", "finish")


def _finite_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no size")
    return value


def add_shuffle_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "--dataset-folder", required=True, metavar="D", help="local, or a URL that fsspec knows (s3://bucket/x)"
    )
    parser.add_argument("--output-folder", required=True, type=Path, metavar="O", help="must not exist yet")
    parser.add_argument(
        "--column", default=TokenizeOptions.default("column"), help="of the text (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file-size", type=_finite_number, default=500, metavar="MB", help="default: %(default)s")
    groups = parser.add_mutually_exclusive_group()
    groups.add_argument("--row-group-size", type=int, default=4096, metavar="ROWS", help="default: %(default)s")
    groups.add_argument(
        "--row-group-mb",
        type=_finite_number,
        metavar="MB",
        help="row groups of about so much text, before it is compressed",
    )
    parser.add_argument(
        "--split-rows", type=int, metavar="N", help="cut texts of more than N characters into rows of at most N"
    )
    parser.add_argument(
        "--split-overlap", type=int, default=0, metavar="M", help="characters of a row that the next one repeats"
    )
    parser.add_argument("--compression", choices=("snappy", "zstd", "gzip", "lz4", "none"), default="snappy")
    parser.add_argument(
        "--memory-limit",
        type=_finite_number,
        default=4,
        metavar="GB",
        help="of the process, on several nodes of each (default: %(default)s)",
    )
    parser.add_argument("--temp-dir", type=Path, metavar="T", help="gets as many bytes as the dataset has unpacked")
    parser.add_argument(
        "--threads", type=int, default=1, metavar="N", help="at most, as memory allows (default: %(default)s)"
    )
    parser.add_argument(
        "--on-error",
        choices=("fail", "skip-line"),
        default=TokenizeOptions.default("on_error"),
        help="skip-line: leave out lines and rows without a text in UTF-8, and count them (default: %(default)s)",
    )
    parser.add_argument("--stage", choices=SHUFFLE_STAGES, help="one of several tasks of Slurm: see submit_reshard.sh")
    parser.set_defaults(run=run_shuffle)


def run_shuffle(given: argparse.Namespace) -> int:
    """Shuffle a dataset globally, into parquet files of even size. Raises RelayrunError."""
    check_outputs({"--output-folder": given.output_folder, "--temp-dir": given.temp_dir})
    if given.memory_limit >= 2:
        # Arrow's allocator keeps what it has: to give pages back and clear them again costs CPU time. What it keeps
        # too much is some 150 MB, which a small limit has no room for.
        os.environ.setdefault("MIMALLOC_PURGE_DELAY", "-1")
    # pyarrow: not paid for --help
    from relayrun.tokens.shuffle.reshard import LENGTHS_PICTURE, ReshardOptions, reshard

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # temporary files are removed
    options = ReshardOptions(
        dataset_folder=given.dataset_folder,
        output=given.output_folder,
        column=given.column,
        seed=given.seed,
        file_size=int(given.file_size * 1e6),
        row_group_size=given.row_group_size,
        row_group_bytes=None if given.row_group_mb is None else round(given.row_group_mb * 1e6),
        split_rows=given.split_rows,
        split_overlap=given.split_overlap,
        compression=given.compression,
        memory_limit=int(given.memory_limit * 1e9),
        temp_dir=given.temp_dir,
        threads=given.threads,
        on_error=given.on_error,
    )
    rows: int | None
    if given.stage:
        from relayrun.tokens.shuffle.multi_node import ReshardTask

        if given.stage == "check":
            ReshardTask(options, task=0, tasks=int(os.environ.get("NODES", "1"))).check()
            return 0
        if "SLURM_PROCID" not in os.environ:
            raise RelayrunError("--stage is for the tasks of a Slurm job step", hint="submit_reshard.sh starts them")
        task, tasks = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
        rows = ReshardTask(options, task=task, tasks=tasks).run(given.stage)
    else:
        rows = reshard(options)
    if rows is not None:
        print(f"{rows:,} rows; length against position, before and after: {given.output_folder / LENGTHS_PICTURE}")
    return 0
