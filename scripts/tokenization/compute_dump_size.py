#!/usr/bin/env python3
"""Print the bytes of all files of a paths file (paths below ../raw-dataset-link)."""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.dumps import add_dump_size_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_dump_size_arguments, __doc__))
