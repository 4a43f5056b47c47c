"""Charts as inline SVG: lines, bands and bars, and the reduction of many points to a chart's width.

Shapes are stretched to the available width; labels are HTML and keep their size. `reduce_points` keeps the minimum and
the maximum of each pixel, so that no spike is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from relayrun.watch.report.html import Markup, join_markup, tag

PIXELS = 600
"""Columns of a chart, with two points each."""

Points = npt.NDArray[np.float64]
WIDTH, HEIGHT = 1000.0, 100.0
"""Size of a chart in SVG units."""


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


def short_number(value: float) -> str:
    """Format a number for an axis: `1.2M`, `350`, `0.03`, `3e-05`."""
    size = abs(value)
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    return f"{value:.4g}"


@dataclass(frozen=True, kw_only=True)
class ChartLine:
    """One line of a chart."""

    name: str
    series: Series
    colour: int = 0
    """Index of a colour of the style sheet."""
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class ChartMark:
    """An event at a position of the x axis."""

    x: float
    words: str
    kind: str = "attempt"


def line_chart(
    title: str,
    drawn: Sequence[ChartLine],
    *,
    marks: Sequence[ChartMark] = (),
    unit: str = "",
    x_name: str = "iteration",
    x_words: Callable[[float], str] = short_number,
    from_zero: bool = False,
) -> Markup:
    """Return a chart of lines over a common x axis; empty if no line has a point."""
    there = [line for line in drawn if line.series.size]
    if not there:
        return Markup("")
    left, right = min(float(line.series.x[0]) for line in there), max(float(line.series.x[-1]) for line in there)
    low, high = min(float(line.series.y.min()) for line in there), max(float(line.series.y.max()) for line in there)
    low = min(low, 0.0) if from_zero else low
    margin = 0.04 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = (low if from_zero and low == 0 else low - margin), high + margin
    if right <= left:
        left, right = left - 1, right + 1

    def at(x: float) -> float:
        return (x - left) / (right - left) * WIDTH

    def up(y: float) -> float:
        return HEIGHT - (y - low) / (high - low) * HEIGHT

    shapes: list[Markup] = [
        tag("line", x1=0, x2=WIDTH, y1=_coordinate(up(y)), y2=_coordinate(up(y)), class_="grid")
        for y in axis_ticks(low, high, 4)
    ]
    for mark in marks:
        if left <= mark.x <= right:
            place = _coordinate(at(mark.x))
            shapes.append(tag("line", tag("title", mark.words), x1=place, x2=place, y1=0, y2=HEIGHT, class_=mark.kind))
    for line in there:
        points = list(zip(line.series.x.tolist(), line.series.y.tolist(), strict=True))
        colour = f"c{line.colour % 8}"
        if not line.dots or len(points) > 1:
            text = " ".join(f"{_coordinate(at(x))},{_coordinate(up(y))}" for x, y in points)
            shapes.append(tag("path", d=f"M{text}", class_=f"line {colour}"))
        if line.dots or len(points) == 1:
            # lines of no length with round ends: a circle would be stretched
            text = "".join(f"M{_coordinate(at(x))},{_coordinate(up(y))}h0" for x, y in points)
            shapes.append(tag("path", d=text, class_=f"dots {colour}"))
    y_labels = [(1 - up(y) / HEIGHT, short_number(y)) for y in axis_ticks(low, high, 4)]
    x_labels = [(at(x) / WIDTH, x_words(x)) for x in axis_ticks(left, right, 4, whole=x_name == "iteration")]
    named = [(line.name, f"c{line.colour % 8}") for line in there] if len(there) > 1 else []
    return _figure(title, unit, shapes, x_labels, y_labels, x_name=x_name, named=named)


def band_chart(
    title: str,
    columns: Sequence[Mapping[str, float]],
    names: Sequence[tuple[str, str]],
    labels: Sequence[tuple[float, str]],
) -> Markup:
    """Return a chart of stacked shares over time; the shares of a column sum to at most 1.

    `names`: each share with its class in the style sheet. `labels`: positions on the time axis (0 to 1) with text.
    """
    if not columns:
        return Markup("")
    width = WIDTH / len(columns)
    paths: dict[str, list[str]] = {name: [] for name, _ in names}
    for number, column in enumerate(columns):
        low = HEIGHT
        for name, _ in names:
            high = column.get(name, 0.0) * HEIGHT
            if high > 0.02:
                up, right, down = _coordinate(-high), _coordinate(width), _coordinate(high)
                paths[name].append(f"M{_coordinate(number * width)},{_coordinate(low)}v{up}h{right}v{down}z")
                low -= high
    shapes = [tag("path", tag("title", name), d="".join(paths[name]), class_=css) for name, css in names if paths[name]]
    y_labels = [(share, f"{share:.0%}") for share in (0.0, 0.5, 1.0)]
    named = [(name, css) for name, css in names if paths[name]]
    return _figure(title, "share of the nodes' time", shapes, labels, y_labels, x_name="time", named=named)


def bar_chart(parts: Sequence[tuple[str, str, float]]) -> Markup:
    """Return one bar of parts, each with name, class and share."""
    at = 0.0
    shapes = []
    for name, css, share in parts:
        width = share * WIDTH
        if width > 0:
            left, wide = _coordinate(at), _coordinate(width)
            words = tag("title", f"{name}: {share:.1%}")
            shapes.append(tag("rect", words, x=left, y=0, width=wide, height=HEIGHT, class_=css))
        at += width
    label = ", ".join(f"{name} {share:.1%}" for name, _, share in parts if share)
    return tag("div", _svg(shapes), class_="bar", role="img", aria_label=label)


def _figure(
    title: str,
    unit: str,
    shapes: Sequence[Markup],
    x_labels: Sequence[tuple[float, str]],
    y_labels: Sequence[tuple[float, str]],
    *,
    x_name: str,
    named: Sequence[tuple[str, str]],
) -> Markup:
    caption = tag("figcaption", tag("b", title), f", {unit}" if unit else None)
    y_axis = [tag("span", text, style=f"bottom:{share:.2%}") for share, text in y_labels]
    x_axis = [tag("span", text, style=f"left:{share:.2%}", class_=_label_side(share)) for share, text in x_labels]
    key = [tag("span", tag("i", class_=css), name) for name, css in named]
    return tag(
        "figure",
        caption,
        tag(
            "div",
            tag("div", *y_axis, class_="y"),
            tag("div", _svg(shapes), class_="plot", role="img", aria_label=title),
            tag("div", *x_axis, class_="x"),
            class_="chart",
        ),
        tag("div", tag("span", x_name, class_="axis"), *key, class_="key"),
    )


def _label_side(share: float) -> str | None:
    """Class of a label that would extend beyond the end of its axis."""
    return "first" if share < 0.08 else "last" if share > 0.92 else None


def _svg(shapes: Sequence[Markup]) -> Markup:
    return tag("svg", join_markup(shapes), viewBox=f"0 0 {WIDTH:.0f} {HEIGHT:.0f}", preserveAspectRatio="none")


def _coordinate(value: float) -> str:
    """Two decimals: far below a pixel."""
    return f"{value:.2f}".rstrip("0").rstrip(".")
