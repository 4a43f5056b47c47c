"""Charts: lines as paths of SVG, and the reduction of many points to a chart's width.

`templates/macros.html` draws them. `reduce_points` keeps the minimum and the maximum of each pixel, so that no spike is
lost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relayrun.progress import short_number

PIXELS = 600
"""Columns of a chart, with two points each."""
SMOOTH, READINGS = 60, 100
"""Points of a smoothed line, and places of a chart where a pointer reads its values."""

Points = npt.NDArray[np.float64]
WIDTH, HEIGHT = 1000.0, 100.0
"""Size of a chart in units of SVG, as in the template."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points sorted by x; `y` is finite."""

    x: Points
    y: Points
    left_out: int = 0
    """Number of points that are not finite; 0 if none is finite, as for a metric that is not measured."""

    @property
    def size(self) -> int:
        return int(self.x.size)

    def after(self, x: float) -> Series:
        """Return the points from this x on."""
        there = self.x >= x
        return Series(x=self.x[there], y=self.y[there])

    def smoothed(self) -> Series:
        """Return the medians of `SMOOTH` pieces; the points themselves if they are few."""
        pieces = SMOOTH if self.size > 4 * SMOOTH else self.size
        x, y = (np.array([np.median(each) for each in np.array_split(v, pieces)]) for v in (self.x, self.y))
        return Series(x=x, y=y)


EMPTY_SERIES = Series(x=np.zeros(0), y=np.zeros(0))


def reduce_points(x: Points, y: Points, *, pixels: int = PIXELS) -> Series:
    """Return the points, reduced to the minimum and maximum of each pixel if there are more than two per pixel.

    The first and the last point are kept, so that charts of one run have one axis. `x` increases. Values that are not
    finite are dropped and counted.
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
    """Return at most about `most` round numbers between two values; `whole`: integers only."""
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


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One line of a chart."""

    name: str
    series: Series
    colour: int = 0
    """Index of a colour of the style sheet."""
    dots: bool = False

    @property
    def css(self) -> str:
        return f"c{self.colour % 8}"

    def layers(self) -> list[tuple[Series, str]]:
        """Return what is drawn, with its class: of many points also their smoothed line, over a faint one of all."""
        faint, line = (self.series, f"{self.css} faint"), (self.series.smoothed(), self.css)
        return [faint, line] if self.series.size > 4 * SMOOTH else [line]

    def reading(self, x: float) -> str:
        """Return the value nearest to an iteration, in words."""
        return f"{self.name} {short_number(self.series.y[np.abs(self.series.x - x).argmin()])}".strip()


@dataclass(frozen=True, kw_only=True)
class ChartMark:
    """An event at a position of the x axis."""

    x: float
    words: str
    kind: str = "attempt"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """A chart as the template draws it. Labels have a share of their axis, and a text."""

    title: str
    unit: str
    x_name: str
    paths: Sequence[tuple[str, str, str]]
    """Class, path and words of each shape."""
    x_labels: Sequence[tuple[float, str]]
    y_labels: Sequence[tuple[float, str]]
    key: Sequence[tuple[str, str]] = ()
    """Names with their class."""
    grid: Sequence[str] = ()
    marks: Sequence[tuple[str, ChartMark]] = ()
    readings: Sequence[str] = ()
    """Values at equal steps of the x axis, in words."""


def line_chart(
    title: str, drawn: Sequence[ChartLine], *, marks: Sequence[ChartMark] = (), unit: str = "", from_zero: bool = False
) -> Chart | None:
    """Return a chart of lines over iterations; None if no line has a point."""
    there = [line for line in drawn if line.series.size]
    if not there:
        return None
    left, right = min(float(line.series.x[0]) for line in there), max(float(line.series.x[-1]) for line in there)
    low, high = min(float(line.series.y.min()) for line in there), max(float(line.series.y.max()) for line in there)
    low = min(low, 0.0) if from_zero else low
    margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero and low == 0 else low - margin), high + margin
    if right <= left:
        left, right = left - 1, right + 1

    def at(x: float) -> float:
        return (x - left) / (right - left)

    def up(y: float) -> float:
        return (y - low) / (high - low)

    paths = []
    for line, series, css in ((each, *layer) for each in there for layer in each.layers()):
        places = zip(series.x.tolist(), series.y.tolist(), strict=True)
        points = [f"{_coordinate(at(x) * WIDTH)},{_coordinate((1 - up(y)) * HEIGHT)}" for x, y in places]
        if not line.dots or len(points) > 1:
            paths.append((f"line {css}", f"M{' '.join(points)}", ""))
        if line.dots or len(points) == 1:
            # lines of no length with round ends: a circle would be stretched
            paths.append((f"dots {css}", "".join(f"M{point}h0" for point in points), ""))
    ticks = axis_ticks(low, high, 4)
    return Chart(
        title=title,
        unit=unit,
        x_name="iteration",
        paths=paths,
        x_labels=[(at(x), short_number(x)) for x in axis_ticks(left, right, 4, whole=True)],
        y_labels=[(up(y), short_number(y)) for y in ticks],
        key=[(line.name, line.css) for line in there] if len(there) > 1 else (),
        grid=[_coordinate((1 - up(y)) * HEIGHT) for y in ticks],
        marks=[(_coordinate(at(mark.x) * WIDTH), mark) for mark in marks if left <= mark.x <= right],
        readings=[
            f"iteration {x:,.0f}: {', '.join(line.reading(x) for line in there)}"
            for x in np.linspace(left, right, READINGS).tolist()
        ],
    )


def _coordinate(value: float) -> str:
    """Two decimals: far below a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
