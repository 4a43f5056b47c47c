#!/usr/bin/env python3
"""Tokenize every dump of a dataset, as Slurm jobs or on this machine, from a YAML config."""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.dumps import add_submit_dumps_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_submit_dumps_arguments, __doc__))
