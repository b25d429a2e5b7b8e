"""Histograms of measured values: bars in units of their drawing, and the place of a
threshold among them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gristmill.flows.pages.page_elements import Bar, Histogram

WIDTH, HEIGHT, TALLEST_BAR = 600, 150, 140
"""Units of the drawing, without the labels under its axis."""
SHORTEST_BAR = 1.0
MOST_LABELS = 6


def draw_histogram(
    edges: Sequence[float],
    counts: Sequence[int],
    cut: float | None,
    caption: str,
    link: Callable[[float | None, float | None], str] = lambda low, high: "",
) -> Histogram:
    """Draw the bins from the first to the last filled one, and those around `cut`.

    Args:
        edges: of the bins.
        counts: of values below the first edge, between edges, and from the last one on:
            one more than edges.
        cut: a threshold, marked by a line.
        caption: of the picture.
        link: address for the ends of a bin; None for an open end.
    """
    used = [bin_ for bin_, count in enumerate(counts) if count]
    if cut is not None:
        nearest = min(range(len(edges)), key=lambda edge: abs(edges[edge] - cut))
        used += [max(nearest - 1, 0), min(nearest + 2, len(counts) - 1)]
    first, last = min(used, default=0), max(used, default=len(counts) - 1)
    width = WIDTH / (last - first + 1)
    highest = max(counts, default=0) or 1
    bars = []
    for bin_ in range(first, last + 1):
        low = edges[bin_ - 1] if bin_ else None
        high = edges[bin_] if bin_ < len(edges) else None
        height = (
            max(TALLEST_BAR * counts[bin_] / highest, SHORTEST_BAR)
            if counts[bin_]
            else 0.0
        )
        title = f"{describe_bin(low, high)}: {counts[bin_]:,}"
        x = round((bin_ - first) * width, 2)
        bars.append(
            Bar(x, round(width * 0.92, 2), round(height, 2), title, link(low, high))
        )
    step = -(-(last - first + 1) // MOST_LABELS)
    labels = [
        (round((bin_ - first) * width, 2), f"{edges[bin_ - 1]:g}")
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
    above = next(
        (index for index, edge in enumerate(edges) if edge > value), len(edges)
    )
    if above == 0:
        return 0.0
    if above == len(edges):
        return above + 1.0
    low, high = edges[above - 1], edges[above]
    return above + (value - low) / (high - low)
