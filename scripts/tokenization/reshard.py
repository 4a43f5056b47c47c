#!/usr/bin/env python3
"""Shuffle a dataset globally: parquet, JSON lines, csv or arrow files to parquet files of even size, data_0 and on.

    reshard.py --dataset-folder raw/web --output-folder shuffled/web --seed 1
The same files and seed give the same bytes, whatever the memory and the threads. The input stays as it is.
As a Slurm job: submit_reshard.sh.
"""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.tokenize import add_shuffle_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_shuffle_arguments, __doc__))
