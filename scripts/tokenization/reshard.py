#!/usr/bin/env python3
"""Shuffle a dataset globally: jsonl or parquet files to parquet files of even size, data_0.parquet and on.

    reshard.py --dataset-folder raw/web --output-folder shuffled/web --seed 1
The same files and seed give the same bytes, whatever the memory and the threads. The input stays as it is.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relayrun.errors import run_main


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset-folder", required=True, metavar="D")
    parser.add_argument("--output-folder", required=True, type=Path, metavar="O", help="must not exist yet")
    parser.add_argument("--column", default="text", help="of the text (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file-size", type=float, default=500, metavar="MB", help="default: %(default)s")
    parser.add_argument("--row-group-size", type=int, default=4096, metavar="ROWS", help="default: %(default)s")
    parser.add_argument("--compression", choices=("snappy", "zstd", "gzip", "lz4", "none"), default="snappy")
    parser.add_argument("--memory-limit", type=float, default=4, metavar="GB", help="default: %(default)s")
    parser.add_argument("--temp-dir", type=Path, metavar="T", help="gets as many bytes as the dataset has unpacked")
    parser.add_argument("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    options = parser.parse_args()

    from relayrun.tokenization.reshard import PICTURE, ReshardOptions, reshard  # pyarrow: not paid for --help

    rows = reshard(ReshardOptions(
        dataset_folder=options.dataset_folder,
        output=options.output_folder,
        column=options.column,
        seed=options.seed,
        file_size=int(options.file_size * 1e6),
        row_group_size=options.row_group_size,
        compression=options.compression,
        memory_limit=int(options.memory_limit * 1e9),
        temp_dir=options.temp_dir,
        threads=options.threads,
    ))  # fmt: skip
    print(f"{rows:,} rows; length against position, before and after: {options.output_folder / PICTURE}")


if __name__ == "__main__":
    sys.exit(run_main(main))
