"""Long texts split into rows of bounded length: a shuffle moves pieces of documents in place of documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from relayrun.errors import InputError


@dataclass(frozen=True, kw_only=True)
class RowSplit:
    """Split of a text into rows of at most `size` characters; each row repeats the last `overlap` characters of the
    former.

    A text of n characters is one row if n ≤ size, else ceil((n - overlap) / (size - overlap)), as document windows are.
    Raises InputError if the overlap leaves a row without new text.
    """

    size: int
    overlap: int = 0

    def __post_init__(self) -> None:
        if self.size < 1:
            raise InputError("must be at least 1", where="--split-rows")
        if not 0 <= self.overlap < self.size:
            raise InputError(
                f"must be at least 0 and below the {self.size:,} characters of a row", where="--split-overlap"
            )

    @property
    def growth(self) -> float:
        """Largest size of the rows of a text over the size of the text."""
        return self.size / (self.size - self.overlap)

    def rows(self, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the number of rows of texts of these lengths, in characters."""
        step = self.size - self.overlap
        return np.where(lengths <= self.size, 1, -(-(lengths - self.overlap) // step))

    def apply(self, table: pa.Table, column: str) -> pa.Table:
        """Return the rows of a table with split texts; other columns are repeated. `column`: of large_string."""
        texts = table[column].combine_chunks()
        lengths = pc.fill_null(pc.utf8_length(texts), 0).to_numpy(zero_copy_only=False)
        counts = self.rows(lengths)
        if (counts == 1).all():
            return table
        pieces: list[pa.Array] = []
        step, done = self.size - self.overlap, 0
        for row in np.flatnonzero(counts > 1).tolist():
            text = texts[row].as_py()
            pieces.append(texts[done:row])
            starts = range(0, int(counts[row]) * step, step)
            pieces.append(pa.array([text[start : start + self.size] for start in starts], texts.type))
            done = row + 1
        cut = pa.concat_arrays([*pieces, texts[done:]])
        place = table.column_names.index(column)  # dropped below: a whole text, repeated, may take gigabytes
        rest = table.drop_columns([column])
        if rest.num_columns:
            rest = rest.take(np.repeat(np.arange(len(table)), counts))
            return rest.add_column(place, table.schema.field(column), cut)
        return pa.table([cut], table.schema)
