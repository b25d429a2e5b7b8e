"""Pictures of a run as SVG text, readable on white, on paper and on a dark page.

Every colour is a variable of the page's style with the colour on white as its default:
`var(--line, #e5e7eb)`. A page without these variables, such as Prefect's, shows the
picture on white. The template draws the marks, the axes around them and, beneath, the
names of several series.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from gristmill.flows.pages.page_html import TEMPLATES, environment

Point = tuple[float, float]
Series = Mapping[str, Sequence[Point]]
"""Name -> points (x, y)."""
HEIGHT, ROW_HEIGHT, SQUARE_HEIGHT = 180, 30, 374
"""Of a picture, of a row of bars, and of a picture as high as wide, in points."""
MOST_MARKED = 12
"""Points of a curve that are marked."""
MOST_TICKS = 6
MARGIN = 0.05
"""Share of an axis beyond its values."""
HALF_BAR, BIN_BAR = 0.31, 0.92
"""Half the share of a row, and the share of a bin, that a bar fills."""
CUT_SERIES = 3
"""Series with the colour of a threshold."""


class Tick(NamedTuple):
    """A value of an axis, and its text."""

    value: float
    text: str


@dataclass(frozen=True)
class Axis:
    """A side of a picture: the values at its ends, and its ticks."""

    low: float
    high: float
    ticks: Sequence[Tick] = ()
    label: str = ""

    def place(self, value: float, begin: float, end: float) -> float:
        """Place of a value on the line from `begin` to `end`."""
        share = (value - self.low) / (self.high - self.low)
        return round(begin + share * (end - begin), 1)


class Mark(NamedTuple):
    """A line through points, a bar between two corners, dots, or a text at a point."""

    shape: Literal["line", "marked line", "bar", "dots", "text"]
    points: Sequence[Point]
    series: int = 0
    text: str = ""


def draw(
    x: Axis,
    y: Axis,
    marks: Iterable[Mark],
    names: Iterable[str] = (),
    height: float = HEIGHT,
) -> str:
    """Marks between two axes, and the names of several series."""
    template = environment(TEMPLATES).get_template("picture.svg.jinja")
    return template.render(x=x, y=y, marks=marks, names=list(names), height=height)


def draw_rows(
    labels: Sequence[str], x: Axis, marks: Iterable[Mark], names: Iterable[str] = ()
) -> str:
    """Marks in labelled rows, the first on top."""
    ticks = list(map(Tick, range(len(labels)), labels))
    rows = Axis(len(labels) - 0.5, -0.5, ticks)
    return draw(x, rows, marks, names, ROW_HEIGHT * (len(labels) + 1))


def number_axis(values: Iterable[float], label: str) -> Axis:
    """Axis around values, with ticks at multiples of 1, 2 or 5 times a power of ten
    (Heckbert, "Nice Numbers for Graph Labels", Graphics Gems, 1990).
    """
    numbers = list(values) or [0.0]
    beyond = MARGIN * (max(numbers) - min(numbers)) or 0.5
    low, high = min(numbers) - beyond, max(numbers) + beyond
    least = (high - low) / MOST_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= least)
    multiples = range(math.ceil(low / step), math.floor(high / step) + 1)
    ticks = [Tick(step * number, f"{step * number:,.6g}") for number in multiples]
    return Axis(low, high, ticks, label)


def size_axis(values: Iterable[float], label: str) -> Axis:
    """Axis from 0 beyond values."""
    return replace(number_axis([0.0, *values], label), low=0.0)


def curves(series: Series, x_label: str, y_label: str) -> str:
    """Lines over a common axis."""
    marks = []
    for number, points in enumerate(series.values()):
        finite = [point for point in points if math.isfinite(point[1])]
        is_marked = len(points) < MOST_MARKED
        marks.append(Mark("marked line" if is_marked else "line", finite, number))
    drawn = [point for mark in marks for point in mark.points]
    x_axis = number_axis((x for x, _ in drawn), x_label)
    return draw(x_axis, number_axis((y for _, y in drawn), y_label), marks, series)


def steps(
    series: Mapping[str, Sequence[float]], names: Sequence[str], y_label: str
) -> str:
    """Shares that remain of each series from step to step: series -> one share (0 to 1)
    for each of `names`.
    """
    ticks = list(map(Tick, range(len(names)), names))
    marks = [
        Mark("marked line", list(enumerate(values)), number)
        for number, values in enumerate(series.values())
    ]
    return draw(
        Axis(-0.2, len(names) - 0.8, ticks),
        size_axis([1.0], y_label),
        marks,
        series,
    )


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], x_label: str) -> str:
    """Horizontal bars, one per row, cut into named parts; the first row is on top."""
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    marks = []
    for row, (_, parts) in enumerate(rows):
        end = 0.0
        for name, width in parts.items():
            begin, end = end, end + width
            corners = [(begin, row - HALF_BAR), (end, row + HALF_BAR)]
            marks.append(Mark("bar", corners, names.index(name)))
    widths = size_axis((mark.points[1][0] for mark in marks), x_label)
    return draw_rows([label for label, _ in rows], widths, marks, names)


def histogram(
    series: Mapping[str, Sequence[float]], edges: Sequence[float], x_label: str
) -> str:
    """Shares per bin as steps, one line per name; `edges` has one entry more than each
    series.
    """
    marks = []
    for number, counts in enumerate(series.values()):
        shares = np.pad(np.array(counts) / (sum(counts) or 1), 1)
        corners = np.stack([np.repeat(edges, 2), np.repeat(shares, 2)[1:-1]], axis=1)
        marks.append(Mark("line", corners.tolist(), number))
    shares_axis = size_axis(
        (share for mark in marks for _, share in mark.points), "share of documents"
    )
    return draw(number_axis(edges, x_label), shares_axis, marks, series)


def binned_counts(
    edges: Sequence[float],
    counts: Sequence[int],
    x_label: str,
    cut: float | None = None,
) -> str:
    """Bars of equal width for the values below the first edge, between edges, and from
    the last one on; a line marks a threshold, whose neighbourhood is always shown.
    """
    filled = np.flatnonzero(counts).tolist()
    low: float = min(filled, default=0)
    high: float = max(filled, default=len(counts) - 1) + 1
    marks = [
        Mark("bar", [(place, 0), (place + BIN_BAR, counts[place])]) for place in filled
    ]
    documents = size_axis(counts, "documents")
    # Bin i + 1 begins at edge i.
    places = range(1, len(edges) + 1)
    if cut is not None:
        place = float(np.interp(cut, edges, places, left=0.5, right=len(edges) + 0.5))
        low, high = min(low, place - 1), max(high, place + 1)
        ends = [(place, 0.0), (place, documents.high)]
        marks.append(Mark("line", ends, CUT_SERIES))
    shown = [place for place in places if low <= place <= high]
    shown = shown[:: -(-len(shown) // MOST_TICKS)]
    ticks = [Tick(place, f"{edges[place - 1]:g}") for place in shown]
    return draw(Axis(low, high, ticks, x_label), documents, marks)


def dot_map(
    dots: Sequence[tuple[float, float, int]],
    labels: Sequence[tuple[float, float, str]],
) -> str:
    """Dots (x, y, number of their colour) in a square, and texts (x, y, text) over
    them.
    """
    values = [value for x, y, _ in dots for value in (x, y)]
    axis = replace(number_axis(values, ""), ticks=())
    marks = [Mark("dots", [(x, y)], series) for x, y, series in dots]
    marks += [Mark("text", [(x, y)], text=text) for x, y, text in labels]
    return draw(axis, axis, marks, height=SQUARE_HEIGHT)


def intervals(rows: Sequence[tuple[str, float, float, float]], x_label: str) -> str:
    """Forest plot: a value with its interval (label, value, low, high) in each row, the
    first on top, and a line at 0.
    """
    ends = [end for _, _, low, high in rows for end in (low, high)]
    marks = [Mark("line", [(0.0, -0.5), (0.0, len(rows) - 0.5)], CUT_SERIES)]
    for row, (_, value, low, high) in enumerate(rows):
        marks.append(Mark("line", [(low, row), (high, row)]))
        marks.append(Mark("dots", [(value, row)]))
    values = number_axis([0.0, *ends], x_label)
    return draw_rows([label for label, *_ in rows], values, marks)
