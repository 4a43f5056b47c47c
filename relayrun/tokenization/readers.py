"""A datatrove reader that takes file names literally.

datatrove's own readers go through fsspec, which gives `::`, `*`, blanks at the ends of a line and
undecodable bytes a meaning of their own. Rows keep their order, and task r of n reads files r, r + n,
r + 2n, ... as datatrove's readers do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from datatrove.data import Document
from datatrove.pipeline.base import PipelineStep

from relayrun.tokenization.columns import join, read_column


class LiteralPathsReader(PipelineStep):  # type: ignore[misc]  # datatrove is untyped
    """Yields the documents of parquet and jsonl(.gz, .zst) files; drops null documents and counts them.

    `files` are paths below `folder`, `column` is the name of the text column (parquet) or key (jsonl).
    Raises InputError naming the file if it is missing, torn, or has no such column of text.
    """

    name = "Literal paths"
    type = "Reader"

    def __init__(self, folder: str, files: Sequence[str], column: str = "text") -> None:
        super().__init__()
        self.folder = folder
        self.files = list(files)
        self.column = column

    def run(self, data: Iterator[Document] | None, rank: int = 0, world_size: int = 1) -> Iterator[Document]:
        if data:
            yield from data
        for file in self.files[rank::world_size]:
            row = nulls = 0
            for array in read_column(join(self.folder, file), self.column):
                for value in array:  # one by one: a list would hold every text twice
                    text = value.as_py()
                    if text is None:
                        nulls += 1
                    else:
                        yield Document(text=text, id=f"{file}/{row}")
                    row += 1
            self.stat_update("files")
            if nulls:
                self.stat_update("null documents", value=nulls, unit="file")
