"""Text that ranks tokenize while training reads it: files, fragments, blocks of rows, lanes, samples.

In: text files frozen at the submit, and cursors of lanes. Out: samples, and the cursor behind each. `relayrun help
streams` explains it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa


def open(path: str | Sequence[str], **options: Any) -> Iterator[pa.Table]:
    """Give the rows of parquet files as tables; see `relayrun.tokens.streams.tables.open_tables` for the options."""
    from relayrun.tokens.streams.tables import open_tables  # pyarrow, which a look at token shards does without

    return open_tables(path, **options)
