"""Raw text to token shards.

    dumps.py, metadata.py   which files make up a dump, and the folder that remembers it
    tokenizer.py            a Hugging Face tokenizer, its end-of-document token and its size
    readers.py, writer.py   datatrove steps: files to documents, documents to .bin/.idx
    executor.py, record.py  datatrove's executor on processes that may die; what is already done
    pipeline.py             one paths file to one folder of shards
    settings.py, jobs.py    every dump of a dataset, here or on Slurm

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
