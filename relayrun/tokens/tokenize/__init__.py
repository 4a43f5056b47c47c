"""Tokenize raw text into shards.

    dumps, dump_jobs, dump_status, tune, verify   the dumps of a data set
    pipeline, shard_task, shard_folder    one paths file to one folder of shards, task by task
    encode/                               the tokenizer, and the libraries that encode
    options, job_config                   settings: flags of a command; YAML and environment variables
    processes                             worker processes, file locks, the time limit of a job
    datatrove_pipeline                    `MegatronTokenWriter`, the last step of a datatrove pipeline
    train_tokenizer                       byte-level BPE trained on a data set

In: files of text. Out: shards and `tokenization.json`, which names the inputs of each. See `relayrun help
tokenization`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayrun.tokens.tokenize.datatrove_pipeline import MegatronTokenWriter

__all__ = ["MegatronTokenWriter"]


def __getattr__(name: str) -> Any:
    if name == "MegatronTokenWriter":  # on demand: datatrove takes a second to import
        from relayrun.tokens.tokenize.datatrove_pipeline import MegatronTokenWriter

        return MegatronTokenWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
