"""Raw text to token shards.

    dumps/       a dataset in dumps of about equal size: their folder, their jobs, where they stand, which settings suit
    datatrove/   the same as datatrove's steps, for pipelines of your own
    pipeline     one paths file to one folder of shards, task by task (fused, pool), and what is done (record, progress)
    retokenize   shards against the files that they were made from
    encode/      the tokenizer, the libraries that encode, and the proof that they agree
    readers/     files in a folder or a store to texts and rows of a bounded size
    options      how documents are tokenized, with every default; flags and settings: the same on a command line, in a
                 config, in the environment
    limit        a job that leaves before its time limit; locks

`MegatronTokenWriter` can stand behind datatrove's own readers and filters in a pipeline of your own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relayrun.tokens.tokenize.writer import MegatronTokenWriter

__all__ = ["MegatronTokenWriter"]


def __getattr__(name: str) -> Any:
    if name == "MegatronTokenWriter":  # on demand: datatrove takes a second to import
        from relayrun.tokens.tokenize.writer import MegatronTokenWriter

        return MegatronTokenWriter
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
