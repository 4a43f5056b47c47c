"""Lengths of the texts of a shuffle: the plot before and after, and long texts split into rows of bounded length.

The plot shows the mean length of the texts over their position in the data set. With a `RowSplit`, a shuffle moves
pieces of documents instead of documents.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from relayrun.errors import InputError

_STRETCHES = 256
"""A file with as many rows is resolved into at least so many stretches, and at most twice as many."""
_STRETCHES_OF_ALL = 65_536
"""The limit for all files of a data set together: with many files each has fewer stretches, at least one."""
_POINTS = 200
"""Points of a panel, at most: equal in both, whatever was read or written at a time."""


class LengthProfile:
    """Lengths in bytes of the texts of files in their order, as totals of equal stretches of rows.

    A stretch is one row at first, and doubles whenever a file has too many stretches. So memory is bounded, and the
    result depends neither on the rows per batch nor on which task reads which files.
    """

    def __init__(self, files: int = 1) -> None:
        """`files`: number of files of the whole data set."""
        self._most = 2 * max(1, min(_STRETCHES, _STRETCHES_OF_ALL // files))
        self._done: list[npt.NDArray[np.float64]] = []
        """Rows and bytes of the stretches of each finished file."""
        self._begin_file()

    def _begin_file(self) -> None:
        self._each = 1
        self._totals: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self._rest_rows = self._rest_total = 0
        """Rows and bytes of the last, incomplete stretch."""

    def add(self, texts: pa.ChunkedArray) -> None:
        """Add the next texts; a missing text has length 0."""
        sums = np.cumsum(pc.fill_null(pc.binary_length(texts), 0).to_numpy(), dtype=np.int64)
        if not sums.size:
            return
        while self._totals.size + (self._rest_rows + sums.size) // self._each >= self._most:
            self._double()
        ends = np.arange(self._each - self._rest_rows, sums.size + 1, self._each)
        if ends.size:
            at_ends = self._rest_total + sums[ends - 1]
            self._totals = np.concatenate([self._totals, np.diff(at_ends, prepend=0)])
            self._rest_rows = sums.size - int(ends[-1])
            self._rest_total += int(sums[-1] - at_ends[-1])
        else:
            self._rest_rows += sums.size
            self._rest_total += int(sums[-1])

    def _double(self) -> None:
        if self._totals.size % 2:  # the first half of a doubled stretch
            self._rest_rows += self._each
            self._rest_total += int(self._totals[-1])
            self._totals = self._totals[:-1]
        self._totals, self._each = self._totals[::2] + self._totals[1::2], 2 * self._each

    def end_file(self) -> None:
        """Begin the next file."""
        self._done.append(self._of_file())
        self._begin_file()

    def array(self) -> npt.NDArray[np.float64]:
        """Return rows and bytes of every stretch, shape [stretches, 2]."""
        return np.concatenate([*self._done, self._of_file()])

    def _of_file(self) -> npt.NDArray[np.float64]:
        found = np.stack([np.full(self._totals.size, self._each), self._totals], axis=1)
        rest = np.array([[self._rest_rows, self._rest_total]])[: 1 if self._rest_rows else 0]
        return np.concatenate([found, rest]).astype(np.float64)


LengthPoints = tuple[list[float], list[float], float]
"""Middles in rows and mean lengths of equal shares of a data set, and the mean length of all texts."""


def draw_lengths(points: Sequence[LengthPoints], file: Path) -> None:
    """Write a PNG of the lengths before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharex=True, sharey=True)
    for panel, title, (rows, means, mean) in zip(panels, ("before", "after"), points, strict=True):
        panel.scatter(rows, means, s=8)
        panel.axhline(mean, color="0.5", linewidth=1, linestyle="--")
        panel.set(title=f"{title}; dashed: the mean of all, {mean:,.0f}", xlabel="row", xlim=(0, None), ylim=(0, None))
    panels[0].set_ylabel("mean length of text, bytes")
    FigureCanvasAgg(figure).print_png(file)


def length_points(stretches: npt.NDArray[np.float64]) -> LengthPoints:
    """Return the points of all arrays of `LengthProfile.array` in the order of the data set. If a share ends inside a
    stretch, the bytes of the stretch are split by rows."""
    rows, sizes = (np.concatenate([[0.0], np.cumsum(column)]) for column in stretches.T)
    edges = np.linspace(0, rows[-1], min(int(rows[-1]), _POINTS) + 1)
    means = np.diff(np.interp(edges, rows, sizes)) / np.diff(edges)
    return ((edges[:-1] + edges[1:]) / 2).tolist(), means.tolist(), float(sizes[-1] / rows[-1])


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
