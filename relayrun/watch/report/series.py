"""Many points as few: a chart shows the least and the greatest value of each of its pixels, so no spike is lost."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

PIXELS = 600
"""Columns of a chart; two points each."""

Points = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points in the order of x; `y` is finite."""

    x: Points
    y: Points
    left_out: int = 0
    """Points that are no finite number; 0 where none is, as where nobody measures it."""

    @property
    def size(self) -> int:
        return int(self.x.size)

    def after(self, x: float) -> Series:
        """Return the points from this x on."""
        there = self.x >= x
        return Series(x=self.x[there], y=self.y[there])


EMPTY_SERIES = Series(x=np.zeros(0), y=np.zeros(0))


def reduce_points(x: Points, y: Points, *, pixels: int = PIXELS) -> Series:
    """Return the points, or where there are more than two a pixel, the least and the greatest of each pixel.

    The first and the last point stay, so that charts of one run have one axis. `x` rises. Values that are
    no finite number are left out, and counted.
    """
    finite = np.isfinite(y) & np.isfinite(x)
    left_out = int((~finite).sum()) if finite.any() else 0
    x, y = x[finite], y[finite]
    if x.size <= 2 * pixels:
        return Series(x=x, y=y, left_out=left_out)
    column = np.minimum((x - x[0]) * (pixels / (x[-1] - x[0])), pixels - 1).astype(np.int64)
    starts = np.flatnonzero(np.diff(column, prepend=-1))
    order = np.lexsort((y, column))  # within a column by value
    ends = np.append(starts[1:], x.size) - 1
    places = np.unique(np.concatenate([[0], order[starts], order[ends], [x.size - 1]]))
    return Series(x=x[places], y=y[places], left_out=left_out)


def axis_ticks(low: float, high: float, most: int = 5, *, whole: bool = False) -> list[float]:
    """Return round numbers between two values, at most about so many; `whole`: integers alone."""
    if not high > low:
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / (most + 1)))
    steps = (factor * power for factor in (1, 2, 2.5, 5, 10))
    step = next(step for step in steps if math.floor((high - low) / step + 1e-9) <= most)
    if whole:
        step = math.ceil(step)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def short_number(value: float) -> str:
    """A number for an axis: `1.2M`, `350`, `0.03`, `3e-05`."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"
