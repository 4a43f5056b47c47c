#!/usr/bin/env python3
"""Exact deduplication with datatrove, then our writer: of equal texts one stays.

    examples/exact_deduplication.py data/ tokenizer/ tokens/
Three stages, each a pipeline: a hash of every document, the pairs of equal hashes, the documents that stay.
"""

from __future__ import annotations

import sys

from datatrove.data import Document
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import ExactDedupConfig, ExactDedupFilter, ExactDedupSignature, ExactFindDedups
from datatrove.pipeline.readers import JsonlReader

from relayrun.tokens.tokenize import MegatronTokenWriter

TASKS = 2


def text(document: Document) -> bytes:
    return document.text.encode()


def main(data: str, tokenizer: str, output: str) -> None:
    config = ExactDedupConfig(content_getter=text)
    signatures, duplicates, logs = (f"{output}/{name}" for name in ("signatures", "duplicates", "logs"))
    stages = [
        (TASKS, [JsonlReader(data), ExactDedupSignature(signatures, config)]),
        (1, [ExactFindDedups(signatures, duplicates, config)]),
        (TASKS, [JsonlReader(data), ExactDedupFilter(duplicates, config), MegatronTokenWriter(output, tokenizer)]),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{logs}/{number}").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
