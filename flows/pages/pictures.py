"""Pictures of a run as SVG text, drawn with matplotlib, readable on white, on paper and on a dark page.

Every colour is a variable of the page's style with the colour on white behind it: `var(--line, #e5e7eb)`. A page
without these variables, such as Prefect's, shows the picture on white.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, Literal, ParamSpec

P = ParamSpec("P")
MOST_TICKS = 8
MOST_LEVEL = 5
"""Names of steps that have room beside each other; more of them are written aslant."""
COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
ON_DARK = ("#60a5fa", "#fbbf24", "#34d399", "#f87171", "#a78bfa", "#22d3ee", "#f472b6", "#a3e635")
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
"""Small, so that letters can still be read where a phone shrinks the picture to its width."""
MOST_DRAWN = 64
"""Pictures that are kept, of some 20 kB each, and not drawn again."""
_drawn: dict[str, str] = {}


def drawn_once(draw: Callable[P, str]) -> Callable[P, str]:
    """Give the picture that was drawn of the same before, if it is kept."""

    @wraps(draw)
    def find(*args: P.args, **kwargs: P.kwargs) -> str:
        key = json.dumps([draw.__name__, args, kwargs], default=lambda numbers: numbers.tolist())
        if key not in _drawn:
            while len(_drawn) >= MOST_DRAWN:
                _drawn.pop(next(iter(_drawn)))
            _drawn[key] = draw(*args, **kwargs)
        return _drawn[key]

    return find


def _figure(layout: Literal["constrained"] | None = "constrained") -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {
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
            "text.color": INK,
            "axes.labelcolor": INK,
            "xtick.color": INK,
            "ytick.color": INK,
            "figure.facecolor": PAPER,
            "axes.facecolor": PAPER,
        }
    )
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout=layout)
    return figure, figure.add_subplot()


def _svg(figure: Any) -> str:
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    # `savefig` draws each picture twice, once to know how large it is.
    FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return re.sub("|".join(VARIABLES), _as_variable, text[text.index("<svg") :])


def _as_variable(colour: re.Match[str]) -> str:
    return f"var(--{VARIABLES[colour[0]]}, {colour[0]})"


def _legend(figure: Any, names: Sequence[str]) -> None:
    """Name the series under the picture, where no curve can run through their names."""
    if len(names) > 1:
        figure.legend(ncols=min(4, len(names)), loc="outside lower center")


@drawn_once
def curves(series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """Lines over a common axis: name -> points."""
    figure, axes = _figure()
    for (name, points), colour in zip(series.items(), COLOURS * 4, strict=False):
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            label=name,
            color=colour,
            linewidth=1.6,
            marker="o" if len(points) < 12 else "",
            markersize=3,
        )
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(figure, list(series))
    return _svg(figure)


@drawn_once
def steps(series: Mapping[str, Sequence[float]], names: Sequence[str], y_label: str) -> str:
    """What is left of each series from step to step: name -> one share per name, from 0 to 1."""
    figure, axes = _figure()
    for (name, shares), colour in zip(series.items(), COLOURS * 4, strict=False):
        axes.plot(range(len(names)), shares, label=name, color=colour, linewidth=1.6, marker="o", markersize=3)
    axes.set_xticks(
        range(len(names)),
        names,
        rotation=30 if len(names) > MOST_LEVEL else 0,
        ha="right" if len(names) > MOST_LEVEL else "center",
    )
    axes.set_ylim(0, 1.03)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_ylabel(y_label)
    _legend(figure, list(series))
    return _svg(figure)


@drawn_once
def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], x_label: str) -> str:
    """Horizontal bars, one per row, cut into named parts; the first row is on top."""
    figure, axes = _figure()
    figure.set_figheight(0.42 * len(rows) + 1.0)
    names = list(dict.fromkeys(name for _, parts in rows for name in parts))
    left = [0.0] * len(rows)
    for name, colour in zip(names, COLOURS * 4, strict=False):
        widths = [parts.get(name, 0.0) for _, parts in rows]
        axes.barh([label for label, _ in rows], widths, left=left, label=name, color=colour, height=0.62)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x_label)
    _legend(figure, names)
    return _svg(figure)


@drawn_once
def histogram(series: Mapping[str, Sequence[float]], edges: Sequence[float], x_label: str) -> str:
    """Shares per bin as steps, one line per name; `edges` has one entry more than each series."""
    figure, axes = _figure()
    for (name, counts), colour in zip(series.items(), COLOURS * 4, strict=False):
        total = sum(counts) or 1
        axes.stairs([count / total for count in counts], edges, label=name, color=colour, linewidth=1.6)
    axes.set_xlabel(x_label)
    axes.set_ylabel("share of documents")
    _legend(figure, list(series))
    return _svg(figure)


@drawn_once
def reliability(bins: Sequence[Mapping[str, float]]) -> str:
    """Accuracy over confidence, beside the line of perfect calibration; a point's area is its number of items."""
    figure, axes = _figure()
    # As wide as every picture: a narrower one would be drawn larger, its letters too.
    axes.set_box_aspect(1)
    figure.set_figheight(HEIGHT_INCHES * 1.2)
    total = sum(one["items"] for one in bins) or 1
    axes.plot([0, 1], [0, 1], color=EDGE, linewidth=1.0, linestyle="--")
    axes.scatter(
        [one["confidence"] for one in bins],
        [one["accuracy"] for one in bins],
        [20 + 400 * one["items"] / total for one in bins],
        color=COLOURS[0],
        alpha=0.75,
        linewidths=0,
        clip_on=False,
    )
    axes.set_xlim(0, 1.02)
    axes.set_ylim(-0.02, 1.02)
    axes.set_xlabel("confidence")
    axes.set_ylabel("accuracy")
    return _svg(figure)


@drawn_once
def cut_histogram(counted: Mapping[str, Sequence[float]], cut: float | None, x_label: str) -> str:
    """How often each value was measured, and where a cut lies.

    Args:
        counted: `edges` and `counts` (one more) as in `gristmill.dataprep.conservation`.
        cut: drawn as a line.
    """
    edges, counts = list(counted["edges"]), list(counted["counts"])
    filled = [index for index, count in enumerate(counts) if count]
    first, last = (max(filled[0] - 1, 0), min(filled[-1] + 1, len(edges))) if filled else (0, len(edges))
    if cut is not None:
        nearest = min(range(len(edges)), key=lambda index: abs(edges[index] - cut))
        first, last = min(first, max(nearest - 1, 0)), max(last, min(nearest + 2, len(edges)))
    labels = [f"< {edges[0]:g}", *(f"{edge:g}" for edge in edges)]
    figure, axes = _figure(layout=None)  # which takes two fifths of a picture's time, and there are many of these
    figure.subplots_adjust(left=0.14, right=0.98, top=0.94, bottom=0.2 if cut is None else 0.28)
    axes.bar(range(first, last + 1), counts[first : last + 1], width=1.0, align="edge", color=COLOURS[0], alpha=0.8)
    step = max(1, -(-(last - first) // MOST_TICKS))
    axes.set_xticks(range(first, last + 1, step), labels[first : last + 1 : step])
    if cut is not None:
        axes.axvline(place_on_bins(cut, edges), color=COLOURS[3], linewidth=1.6, label=f"cut at {cut:g}")
        figure.legend(loc="lower center")
    axes.set_xlabel(x_label)
    axes.set_ylabel("documents")
    axes.grid(axis="x", visible=False)
    return _svg(figure)


def place_on_bins(value: float, edges: Sequence[float]) -> float:
    """Where a value lies on an axis whose unit is a bin; bin i + 1 begins at edge i."""
    above = next((index for index, edge in enumerate(edges) if edge > value), len(edges))
    if above in (0, len(edges)):
        return float(above + (above == len(edges)))
    low, high = edges[above - 1], edges[above]
    return above + (value - low) / (high - low)


@drawn_once
def predicted_and_measured(points: Sequence[tuple[float, float, float]], label: str) -> str:
    """Points (measured, predicted, spread of the measurement) beside the line on which both are equal."""
    figure, axes = _figure()
    measured, predicted, spreads = ([point[index] for point in points] for index in range(3))
    axes.errorbar(measured, predicted, xerr=spreads, fmt="o", color=COLOURS[0], ecolor=EDGE, markersize=4)
    ends = [min((*measured, *predicted)), max((*measured, *predicted))]
    axes.plot(ends, ends, color=COLOURS[3], linewidth=1.0)
    axes.set_xlabel(f"measured {label}")
    axes.set_ylabel(f"predicted {label}")
    return _svg(figure)


@drawn_once
def laws(
    series: Mapping[str, tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]],
    predicted: tuple[float, float, float, float],
    measured: float | None,
    x_label: str,
    y_label: str,
) -> str:
    """Measured points with the curve that a law draws through them, and what it predicts beyond.

    Args:
        series: name -> points (x, y) that were measured, and points of the curve.
        predicted: x, y, and the ends of its interval.
        measured: y at that x; None where it is not known.
    """
    figure, axes = _figure()
    for (name, (points, curve)), colour in zip(series.items(), COLOURS * 4, strict=False):
        axes.plot([x for x, _ in curve], [y for _, y in curve], color=colour, linewidth=1.0, alpha=0.6)
        axes.plot([x for x, _ in points], [y for _, y in points], "o", color=colour, markersize=4, label=name)
    x, y, low, high = predicted
    axes.errorbar(
        [x],
        [y],
        yerr=[[max(y - low, 0.0)], [max(high - y, 0.0)]],
        fmt="D",
        color=INK,
        ecolor=EDGE,
        markersize=4,
        label="predicted",
    )
    if measured is not None:
        axes.plot([x], [measured], "x", color=COLOURS[3], markersize=6, label="measured")
    axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(figure, [*series, "predicted"])
    return _svg(figure)


@drawn_once
def domain_map(points: Sequence[tuple[float, float, int]], domains: Sequence[Mapping[str, Any]]) -> str:
    """Documents as dots on a map, of the colour of their domain, whose number stands in the middle of it."""
    figure, axes = _figure()
    axes.set_box_aspect(1)
    figure.set_figheight(HEIGHT_INCHES * 1.6)
    for place, colour in enumerate(COLOURS):
        own = [point for point in points if point[2] % len(COLOURS) == place]
        axes.scatter([x for x, _, _ in own], [y for _, y, _ in own], 8, color=colour, alpha=0.6, linewidths=0)
    for one in domains:
        if one["documents"]:
            axes.text(one["x"], one["y"], str(one["domain"]), ha="center", va="center", fontweight="bold")
    axes.set_xticks([])
    axes.set_yticks([])
    return _svg(figure)
