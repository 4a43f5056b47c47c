#!/usr/bin/env python3
"""Split a dataset into dumps: writes the paths files that the tokenization jobs read."""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.dumps import add_prepare_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_prepare_arguments, __doc__))
