"""The picture of a shuffle: mean length of the texts against their place in the dataset, before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_MOST_POINTS = 500


@dataclass
class Lengths:
    """Number and mean length in bytes of the texts of every stretch, in the order in which they come."""

    stretches: list[tuple[int, float]] = field(default_factory=list)

    def add(self, texts: pa.ChunkedArray) -> None:
        if len(texts):
            self.stretches.append((len(texts), float(pc.mean(pc.binary_length(texts)).as_py() or 0)))

    def array(self) -> npt.NDArray[np.float64]:
        """Shape [stretches, 2]."""
        return np.array(self.stretches, np.float64).reshape(-1, 2)


def draw(before: Sequence[npt.NDArray[np.float64]], after: Sequence[npt.NDArray[np.float64]], file: Path) -> None:
    """Write a PNG of what `Lengths.array` gave for the parts of the dataset, in their order, before and after."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, title, parts in zip(panels, ("before", "after"), (before, after), strict=True):
        panel.scatter(*_points(np.concatenate(parts)), s=4)
        panel.set(title=title, xlabel="row", xlim=(0, None), ylim=(0, None))
    panels[0].set_ylabel("mean length of text, bytes")
    FigureCanvasAgg(figure).print_png(file)


def _points(stretches: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Where stretches end, in rows, and their mean lengths; neighbours are one point where there are too many."""
    rows, means = stretches.T
    starts = np.arange(0, rows.size, -(-rows.size // _MOST_POINTS))
    counts = np.add.reduceat(rows, starts)
    return np.cumsum(counts), np.add.reduceat(rows * means, starts) / counts
