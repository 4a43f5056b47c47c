#!/usr/bin/env python3
"""Print the prefixes of all token shards below some folders, for Megatron's --data-path.

    create_data_config.py -p data/mixture,data/extra            one line, separated by spaces
    create_data_config.py -p data/mixture --json > prefixes.json

Links are followed, and the paths are absolute. Folders come in the order given, the shards of each sorted.
"""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.shards import add_prefixes_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_prefixes_arguments, __doc__))
