#!/usr/bin/env python3
"""Split a dataset into dumps: writes the paths files that the tokenization jobs read."""

import sys

from relayrun.cli import as_program, prepare_dumps

if __name__ == "__main__":
    sys.exit(as_program(prepare_dumps, __doc__))
