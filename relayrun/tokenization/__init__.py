"""Raw text to token shards.

    dumps.py, metadata.py   which files make up a dump, and the folder that remembers it
    reshard.py, reshard_tasks.py         a global shuffle of a dataset before it is split, on one node or several
    rows.py, buckets.py, shuffled.py, lengths.py     its input, its order, its files, its picture
    tokenizer.py            a Hugging Face tokenizer, what stands around a document (framing.py), its size
    engines.py, nasty.py    the libraries that encode, and the proof that they agree; texts.py is what they take
    columns.py, fused.py    files to Arrow's buffers to one .bin/.idx, without a row in between
    pool.py, limit.py       tasks on processes that may die; a job that leaves before its time limit
    record.py, status.py    what is already done
    pipeline.py             one paths file to one folder of shards
    settings.py, jobs.py    every dump of a dataset, here or on Slurm
    writer.py, executor.py               the same as datatrove's steps, for pipelines of your own

`MegatronTokenWriter` can stand behind datatrove's own readers and filters in a pipeline of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayrun.tokenization.writer import MegatronTokenWriter

__all__ = ["MegatronTokenWriter"]


def __getattr__(name: str) -> Any:
    if name == "MegatronTokenWriter":  # on demand: datatrove takes a second to import
        from relayrun.tokenization.writer import MegatronTokenWriter

        return MegatronTokenWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
