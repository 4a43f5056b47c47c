#!/usr/bin/env python3
"""Merge the token shards of a folder into one shard, byte by byte, without reading a token.

merge_datasets.py --input tokens/web/dump-0 --output-prefix tokens/web-merge/dump-0-merged

Folders come in the order given, the shards of each sorted. The result's record (P.record.json) names the tokenizer of
its inputs and the checksums of its files.
"""

import sys

from relayrun.cli import as_program
from relayrun.cli.data.shards import add_merge_shards_arguments

if __name__ == "__main__":
    sys.exit(as_program(add_merge_shards_arguments, __doc__))
