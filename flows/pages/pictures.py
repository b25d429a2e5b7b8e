"""Pictures of a run as SVG text, drawn with matplotlib, readable on white, on paper and
on a dark page.

Every colour is a variable of the page's style with the colour on white as its default:
`var(--line, #e5e7eb)`. A page without these variables, such as Prefect's, shows the
picture on white.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Concatenate, ParamSpec

import numpy as np

P = ParamSpec("P")
Series = Mapping[str, Sequence[tuple[float, float]]]
"""Name -> points (x, y)."""
MOST_LEVEL = 5
"""Names of steps that have room beside each other; more of them are written aslant."""
MOST_TICKS = 6
COLOURS = (
    "#2563eb",
    "#d97706",
    "#059669",
    "#dc2626",
    "#7c3aed",
    "#0891b2",
    "#be185d",
    "#4d7c0f",
)
ON_DARK = (
    "#60a5fa",
    "#fbbf24",
    "#34d399",
    "#f87171",
    "#a78bfa",
    "#22d3ee",
    "#f472b6",
    "#a3e635",
)
"""The same colours where the page is dark."""
PAPER, INK, LINE, EDGE = "#ffffff", "#111827", "#e5e7eb", "#9ca3af"
VARIABLES = {
    PAPER: "paper",
    INK: "ink",
    LINE: "line",
    EDGE: "edge",
    **{colour: f"series-{number}" for number, colour in enumerate(COLOURS)},
}
"""Colours of a picture -> the variables of a page that replace them."""
WIDTH_INCHES, HEIGHT_INCHES = 5.2, 2.5
"""Small, so that letters can still be read where a phone shrinks the picture to its
width.
"""
STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "gristmill",
    "font.family": "sans-serif",
    "font.size": 8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": LINE,
    "axes.edgecolor": EDGE,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 3,
    "text.color": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
}
"""Settings of matplotlib."""
MOST_DRAWN = 64
"""Pictures that are kept, some 20 kB each."""
_drawn: dict[str, str] = {}


def picture(draw: Callable[Concatenate[Any, P], None]) -> Callable[P, str]:
    """A picture of what `draw` puts into axes, with the names of several series beneath
    it, where no curve can run through them. Kept ones are returned for the same
    arguments.
    """

    @wraps(draw)
    def draw_or_find(*args: P.args, **kwargs: P.kwargs) -> str:
        key = json.dumps(
            [draw.__name__, args, kwargs], default=lambda numbers: numbers.tolist()
        )
        if key in _drawn:
            return _drawn[key]
        while len(_drawn) >= MOST_DRAWN:
            _drawn.pop(next(iter(_drawn)))
        import matplotlib as mpl
        from cycler import cycler
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure

        mpl.use("svg")
        mpl.rcParams.update({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)})
        figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
        axes = figure.add_subplot()
        draw(axes, *args, **kwargs)
        _, names = axes.get_legend_handles_labels()
        if len(names) > 1:
            figure.legend(ncols=min(4, len(names)), loc="outside lower center")
        buffer = io.StringIO()
        # `savefig` draws each picture twice, once to know how large it is.
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None}
        )
        _, tag, svg = buffer.getvalue().partition("<svg")
        for colour, variable in VARIABLES.items():
            svg = svg.replace(colour, f"var(--{variable}, {colour})")
        _drawn[key] = tag + svg
        return _drawn[key]

    return draw_or_find


@picture
def curves(axes: Any, series: Series, x_label: str, y_label: str) -> None:
    """Lines over a common axis."""
    for name, points in series.items():
        marker = "o" if len(points) < 12 else ""
        axes.plot(*zip(*points, strict=True), label=name, marker=marker)
    axes.set(xlabel=x_label, ylabel=y_label)


@picture
def steps(
    axes: Any,
    series: Mapping[str, Sequence[float]],
    names: Sequence[str],
    y_label: str,
) -> None:
    """Shares that remain of each series from step to step: series -> one share (0 to 1)
    for each of `names`.
    """
    for name, shares in series.items():
        axes.plot(shares, label=name, marker="o")
    is_aslant = len(names) > MOST_LEVEL
    axes.set_xticks(
        range(len(names)),
        names,
        rotation=30 if is_aslant else 0,
        ha="right" if is_aslant else "center",
    )
    axes.set(ylim=(0, 1.03), ylabel=y_label)
    axes.yaxis.set_major_formatter("{x:.0%}")


@picture
def stacked_bars(
    axes: Any, rows: Sequence[tuple[str, Mapping[str, float]]], x_label: str
) -> None:
    """Horizontal bars, one per row, cut into named parts; the first row is on top."""
    axes.figure.set_figheight(0.42 * len(rows) + 1.0)
    labels = [label for label, _ in rows]
    begins = np.zeros(len(rows))
    for name in dict.fromkeys(name for _, parts in rows for name in parts):
        widths = np.array([parts.get(name, 0.0) for _, parts in rows])
        axes.barh(labels, widths, left=begins, label=name, height=0.62)
        begins = begins + widths
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set(xlabel=x_label)


@picture
def histogram(
    axes: Any,
    series: Mapping[str, Sequence[float]],
    edges: Sequence[float],
    x_label: str,
) -> None:
    """Shares per bin as steps, one line per name; `edges` has one entry more than each
    series.
    """
    for name, counts in series.items():
        shares = np.array(counts) / (sum(counts) or 1)
        axes.stairs(shares, edges, label=name, linewidth=1.6)
    axes.set(xlabel=x_label, ylabel="share of documents")


@picture
def binned_counts(
    axes: Any,
    edges: Sequence[float],
    counts: Sequence[int],
    x_label: str,
    cut: float | None = None,
) -> None:
    """Bars of equal width for the values below the first edge, between edges, and from
    the last one on; a line marks a threshold, whose neighbourhood is always shown.
    """
    filled = np.flatnonzero(counts)
    low = float(min(filled, default=0))
    high = float(max(filled, default=len(counts) - 1) + 1)
    # Bin i + 1 begins at edge i.
    places = np.arange(1, len(edges) + 1)
    if cut is not None:
        place = np.interp(cut, edges, places, left=0.5, right=len(edges) + 0.5)
        axes.axvline(place, color=COLOURS[3])
        low, high = min(low, float(place) - 1), max(high, float(place) + 1)
    axes.bar(range(len(counts)), counts, 0.92, align="edge")
    ticks = places[(places >= low) & (places <= high)]
    ticks = ticks[:: -(-len(ticks) // MOST_TICKS)]
    axes.set_xticks(ticks, [f"{edges[tick - 1]:g}" for tick in ticks])
    axes.set(xlim=(low, high), xlabel=x_label, ylabel="documents")


@picture
def dot_map(
    axes: Any,
    dots: Sequence[tuple[float, float, int]],
    labels: Sequence[tuple[float, float, str]],
) -> None:
    """Dots (x, y, number of their colour) in a square, and texts (x, y, text) over
    them.
    """
    axes.figure.set_figheight(WIDTH_INCHES)
    xs, ys, series = np.reshape(dots, (-1, 3)).T
    colours = [COLOURS[int(number) % len(COLOURS)] for number in series]
    axes.scatter(xs, ys, s=8, c=colours, alpha=0.6, linewidths=0)
    for x, y, text in labels:
        axes.text(x, y, text, weight="bold", ha="center", va="center")
    axes.set_aspect("equal", adjustable="datalim")
    axes.set_axis_off()
