#!/usr/bin/env python3
"""Make a mixture: a folder of links to token shards, each dataset with its weight in tokens.

    create_data_mixture.py --folders data/web data/code --weights 0.8 0.2 --output data/mixture

Weights are normalised, and hold to the document: the last shard of a dataset is cut by a shorter .idx over a linked
.bin. The mixture ends where a dataset is used up, unless --tokens or --allow-repeats is given. The table that is
printed, with its forecast (`lasts`: after how many tokens of the mixture a dataset has been read once), is written
to OUTPUT/dataset_mixture_summary.txt, and as JSON with every shard beside it.
"""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.shards import add_create_mixture_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_create_mixture_arguments, __doc__))
