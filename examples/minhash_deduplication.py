#!/usr/bin/env python3
"""Fuzzy deduplication by MinHash with datatrove, then our writer: of texts that are almost equal one stays.

    examples/minhash_deduplication.py data/ tokenizer/ tokens/
Words are what white space separates; datatrove has word tokenizers for many languages, with packages of their own.
"""

from __future__ import annotations

import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup import (
    MinhashConfig,
    MinhashDedupBuckets,
    MinhashDedupCluster,
    MinhashDedupFilter,
    MinhashDedupSignature,
)
from datatrove.pipeline.readers import JsonlReader
from datatrove.utils.hashing import HashConfig
from datatrove.utils.word_tokenizers import WordTokenizer

from relayrun.tokens.tokenize import MegatronTokenWriter

TASKS = 2


class Words(WordTokenizer):
    """What white space separates."""

    def word_tokenize(self, text: str) -> list[str]:
        return text.split()

    def sent_tokenize(self, text: str) -> list[str]:
        return text.splitlines()

    def span_tokenize(self, text: str) -> list[tuple[int, int]]:
        return [(0, len(text))]


def main(data: str, tokenizer: str, output: str) -> None:
    # datatrove hands text to the hash, which xxhash takes as bytes alone since its version 4
    config = MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8, hash_config=HashConfig(hash_fc="sha1"))
    signatures, buckets, removed, logs = (f"{output}/{name}" for name in ("signatures", "buckets", "removed", "logs"))
    stages = [
        (TASKS, [JsonlReader(data), MinhashDedupSignature(signatures, config, Words())]),
        (config.num_buckets, [MinhashDedupBuckets(signatures, buckets, config=config)]),
        (1, [MinhashDedupCluster(buckets, removed, config=config)]),
        (TASKS, [JsonlReader(data), MinhashDedupFilter(removed), MegatronTokenWriter(output, tokenizer)]),
    ]
    for number, (tasks, pipeline) in enumerate(stages):
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{logs}/{number}").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
