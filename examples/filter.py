#!/usr/bin/env python3
"""A filter of datatrove in front of our writer: jsonl files, short documents left out, Megatron shards.

examples/filter.py data/ tokenizer/ tokens/
"""

from __future__ import annotations

import sys

from datatrove.data import Document
from datatrove.pipeline.filters import LambdaFilter
from datatrove.pipeline.readers import JsonlReader

from relayrun.tokens.tokenize import MegatronTokenWriter
from relayrun.tokens.tokenize.datatrove_pipeline import KillAwareExecutor

TASKS = 4


def long_enough(document: Document) -> bool:
    return len(document.text) >= 20


def main(data: str, tokenizer: str, output: str) -> None:
    pipeline = [JsonlReader(data), LambdaFilter(long_enough), MegatronTokenWriter(output, tokenizer)]
    # datatrove's own LocalPipelineExecutor serves as well, but waits for ever when a worker is killed
    executor = KillAwareExecutor(pipeline, tasks=TASKS, workers=2, logging_dir=f"{output}/logs")
    executor.run_ranks(range(TASKS))


if __name__ == "__main__":
    main(*sys.argv[1:])
