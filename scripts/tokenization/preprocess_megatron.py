#!/usr/bin/env python3
"""Tokenize the files of one dump into Megatron shards (.bin and .idx)."""

import sys

from relayrun.cli import as_program, tokenize

if __name__ == "__main__":
    sys.exit(as_program(tokenize, __doc__))
