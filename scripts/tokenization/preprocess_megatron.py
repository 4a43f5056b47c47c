#!/usr/bin/env python3
"""Tokenize the files of one dump into Megatron shards (.bin and .idx)."""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.tokenize import add_tokenize_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_tokenize_arguments, __doc__))
