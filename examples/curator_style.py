#!/usr/bin/env python3
"""jsonl files to Megatron shards with the option names of NeMo Curator's MegatronTokenizerWriter.

examples/curator_style.py data/ tokenizer/ tokens/
"""

from __future__ import annotations

import sys

from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.readers import JsonlReader

from relayrun.tokens.tokenize import MegatronTokenWriter


def main(data: str, tokenizer: str, output: str) -> None:
    stages = [
        JsonlReader(data, text_key="text"),
        MegatronTokenWriter(
            path=output,
            model_identifier=tokenizer,
            text_field="text",
            append_eod=True,
            tokenization_batch_size=1000,
        ),
    ]
    LocalPipelineExecutor(stages, tasks=1, workers=1, logging_dir=f"{output}/logs").run()


if __name__ == "__main__":
    main(*sys.argv[1:])
