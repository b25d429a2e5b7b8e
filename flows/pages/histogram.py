"""Histograms of measured values: bars in units of their drawing, and the place of a
threshold among them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gristmill.flows.pages.page_elements import Bar, Histogram

WIDTH, HEIGHT, TALLEST_BAR = 600, 150, 140
"""Units of the drawing, without the labels under its axis."""
SHORTEST_BAR = 1.0
MOST_LABELS = 6


@dataclass(frozen=True)
class Binned:
    """Numbers of values below the first edge, between edges, and from the last one
    on.
    """

    edges: Sequence[float]
    counts: Sequence[int]


def draw_histogram(
    values: Binned,
    cut: float | None,
    caption: str,
    link: Callable[[float | None, float | None], str] = lambda low, high: "",
) -> Histogram:
    """Draw the bins from the first to the last filled one, and those around `cut`.

    Args:
        values: that are drawn.
        cut: a threshold, marked by a line.
        caption: of the picture.
        link: address for the ends of a bin; None for an open end.
    """
    edges, counts = values.edges, values.counts
    used = [bin_ for bin_, count in enumerate(counts) if count]
    if cut is not None:
        nearest = min(range(len(edges)), key=lambda edge: abs(edges[edge] - cut))
        used += [max(nearest - 1, 0), min(nearest + 2, len(counts) - 1)]
    first, last = min(used, default=0), max(used, default=len(counts) - 1)
    width = WIDTH / (last - first + 1)
    scale = TALLEST_BAR / max(*counts, 1)
    bars = []
    ends = [None, *edges, None]
    for bin_ in range(first, last + 1):
        low, high = ends[bin_ : bin_ + 2]
        count = counts[bin_]
        height = max(scale * count, SHORTEST_BAR) if count else 0.0
        sizes = (round(width * 0.92, 2), round(height, 2))
        title = f"{describe_bin(low, high)}: {count:,}"
        bars.append(
            Bar(round((bin_ - first) * width, 2), *sizes, title, link(low, high))
        )
    step = -(-len(bars) // MOST_LABELS)
    labels = [
        (bars[bin_ - first].x, f"{edges[bin_ - 1]:g}")
        for bin_ in range(max(first, 1), last + 1, step)
    ]
    line = (
        None if cut is None else round((place_on_bins(cut, edges) - first) * width, 2)
    )
    return Histogram(bars, labels, line, caption)


def describe_bin(low: float | None, high: float | None) -> str:
    """The values of a bin, as `10 to 20`, `below 10` or `from 20`."""
    if low is None:
        return f"below {high:g}"
    return f"from {low:g}" if high is None else f"{low:g} to {high:g}"


def place_on_bins(value: float, edges: Sequence[float]) -> float:
    """The place of a value on an axis whose unit is a bin; bin i + 1 begins at edge
    i.
    """
    above = bisect_right(edges, value)
    if above == 0:
        return 0.0
    if above == len(edges):
        return above + 1.0
    low, high = edges[above - 1 : above + 1]
    return above + (value - low) / (high - low)
