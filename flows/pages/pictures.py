"""Pictures of a run as SVG text, drawn with matplotlib, readable on white, on paper and
on a dark page.

Every colour is a variable of the page's style with the colour on white as its default:
`var(--line, #e5e7eb)`. A page without these variables, such as Prefect's, shows the
picture on white.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec

P = ParamSpec("P")
MOST_LEVEL = 5
"""Names of steps that have room beside each other; more of them are written aslant."""
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
MOST_DRAWN = 64
"""Pictures that are kept, some 20 kB each."""
_drawn: dict[str, str] = {}


def drawn_once(draw: Callable[P, str]) -> Callable[P, str]:
    """Keep pictures, and return the kept one for the same arguments."""

    @wraps(draw)
    def draw_or_find(*args: P.args, **kwargs: P.kwargs) -> str:
        key = json.dumps(
            [draw.__name__, args, kwargs], default=lambda numbers: numbers.tolist()
        )
        if key not in _drawn:
            while len(_drawn) >= MOST_DRAWN:
                _drawn.pop(next(iter(_drawn)))
            _drawn[key] = draw(*args, **kwargs)
        return _drawn[key]

    return draw_or_find


def _figure() -> tuple[Any, Any]:
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

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
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
def curves(
    series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str
) -> str:
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
def steps(
    series: Mapping[str, Sequence[float]], names: Sequence[str], y_label: str
) -> str:
    """Shares that remain of each series from step to step: series -> one share (0 to 1)
    for each of `names`.
    """
    figure, axes = _figure()
    for (name, shares), colour in zip(series.items(), COLOURS * 4, strict=False):
        axes.plot(
            range(len(names)),
            shares,
            label=name,
            color=colour,
            linewidth=1.6,
            marker="o",
            markersize=3,
        )
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
        axes.barh(
            [label for label, _ in rows],
            widths,
            left=left,
            label=name,
            color=colour,
            height=0.62,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x_label)
    _legend(figure, names)
    return _svg(figure)


@drawn_once
def histogram(
    series: Mapping[str, Sequence[float]], edges: Sequence[float], x_label: str
) -> str:
    """Shares per bin as steps, one line per name; `edges` has one entry more than each
    series.
    """
    figure, axes = _figure()
    for (name, counts), colour in zip(series.items(), COLOURS * 4, strict=False):
        total = sum(counts) or 1
        axes.stairs(
            [count / total for count in counts],
            edges,
            label=name,
            color=colour,
            linewidth=1.6,
        )
    axes.set_xlabel(x_label)
    axes.set_ylabel("share of documents")
    _legend(figure, list(series))
    return _svg(figure)


@drawn_once
def reliability(bins: Sequence[tuple[float, float, int]]) -> str:
    """Accuracy over confidence, and the line of perfect calibration.

    Args:
        bins: confidence, accuracy and number of items, which is the area of a point.
    """
    figure, axes = _figure()
    # As wide as every picture: a narrower one would be drawn larger, its letters too.
    axes.set_box_aspect(1)
    figure.set_figheight(HEIGHT_INCHES * 1.2)
    total = sum(items for *_, items in bins) or 1
    axes.plot([0, 1], [0, 1], color=EDGE, linewidth=1.0, linestyle="--")
    axes.scatter(
        [confidence for confidence, *_ in bins],
        [accuracy for _, accuracy, _ in bins],
        [20 + 400 * items / total for *_, items in bins],
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
def predicted_and_measured(
    points: Sequence[tuple[float, float, float]], label: str
) -> str:
    """Points (measured, predicted, spread of the measurement) and the line on which
    both are equal.
    """
    figure, axes = _figure()
    measured, predicted, spreads = (
        [point[index] for point in points] for index in range(3)
    )
    axes.errorbar(
        measured,
        predicted,
        xerr=spreads,
        fmt="o",
        color=COLOURS[0],
        ecolor=EDGE,
        markersize=4,
    )
    ends = [min((*measured, *predicted)), max((*measured, *predicted))]
    axes.plot(ends, ends, color=COLOURS[3], linewidth=1.0)
    axes.set_xlabel(f"measured {label}")
    axes.set_ylabel(f"predicted {label}")
    return _svg(figure)


@drawn_once
def laws(
    series: Mapping[
        str, tuple[Sequence[tuple[float, float]], Sequence[tuple[float, float]]]
    ],
    predicted: tuple[float, float, float, float],
    measured: float | None,
    x_label: str,
    y_label: str,
) -> str:
    """Measured points with the curves of a law through them, and its prediction beyond
    them.

    Args:
        series: name -> measured points (x, y), and points of the curve.
        predicted: x, y, and the ends of its interval.
        measured: y at that x; None if it was not measured.
    """
    figure, axes = _figure()
    for (name, (points, curve)), colour in zip(
        series.items(), COLOURS * 4, strict=False
    ):
        axes.plot(
            [x for x, _ in curve],
            [y for _, y in curve],
            color=colour,
            linewidth=1.0,
            alpha=0.6,
        )
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            "o",
            color=colour,
            markersize=4,
            label=name,
        )
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
        axes.plot(
            [x], [measured], "x", color=COLOURS[3], markersize=6, label="measured"
        )
    axes.set_xscale("log")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    _legend(figure, [*series, "predicted"])
    return _svg(figure)
