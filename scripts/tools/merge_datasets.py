#!/usr/bin/env python3
"""Merge the token shards of a folder into one shard, byte by byte, without reading a token.

merge_datasets.py --input tokens/web/dump-0 --output-prefix tokens/web-merge/dump-0-merged
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relayrun.config.writable import check_outputs
from relayrun.errors import run_main
from relayrun.shards.merge import merge
from relayrun.shards.prefixes import find_prefixes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", required=True, nargs="+", type=Path, metavar="DIR", help="folders of shards")
    parser.add_argument("--output-prefix", required=True, metavar="P", help="gets P.bin and P.idx")
    options = parser.parse_args()
    check_outputs({"--output-prefix": options.output_prefix})
    prefixes = find_prefixes(options.input)
    shard = merge(prefixes, options.output_prefix)
    print(f"{len(prefixes):,} shards, {shard.documents:,} documents, {shard.tokens:,} tokens: {shard.prefix}")


if __name__ == "__main__":
    sys.exit(run_main(main))
