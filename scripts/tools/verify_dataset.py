#!/usr/bin/env python3
"""Check token shards: header, sizes, lengths, ids below the vocabulary, EOD at ends, checksums, and ids of a sample of
documents against the files that they were made from. Names every fault.

verify_dataset.py tokens/web --tokenizer tokenizer/
"""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.shards import add_verify_shards_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_verify_shards_arguments, __doc__))
