"""Pictures of a run as SVG text, drawn with matplotlib, readable on white and on paper."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = ("#2563eb", "#d97706", "#059669", "#dc2626", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f")
WIDTH_INCHES, HEIGHT_INCHES = 7.2, 2.8


def _figure() -> tuple[Any, Any]:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update({
        "svg.fonttype": "none", "svg.hashsalt": "gristmill", "font.family": "sans-serif", "font.size": 9,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "#e5e7eb",
        "axes.edgecolor": "#9ca3af", "axes.axisbelow": True, "legend.frameon": False,
    })
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, HEIGHT_INCHES), layout="constrained")
    return figure, figure.add_subplot()


def _svg(figure: Any) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg"):]


def curves(series: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """Lines over a common axis: name -> points."""
    figure, axes = _figure()
    for (name, points), colour in zip(series.items(), COLOURS * 4, strict=False):
        axes.plot([x for x, _ in points], [y for _, y in points], label=name, color=colour, linewidth=1.6,
                  marker="o" if len(points) < 12 else "", markersize=3)
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    if len(series) > 1:
        axes.legend()
    return _svg(figure)


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
    if len(names) > 1:
        figure.legend(ncols=min(4, len(names)), loc="outside lower center")
    return _svg(figure)


def histogram(series: Mapping[str, Sequence[float]], edges: Sequence[float], x_label: str) -> str:
    """Shares per bin as steps, one line per name; `edges` has one entry more than each series."""
    figure, axes = _figure()
    for (name, counts), colour in zip(series.items(), COLOURS * 4, strict=False):
        total = sum(counts) or 1
        axes.stairs([count / total for count in counts], edges, label=name, color=colour, linewidth=1.6)
    axes.set_xlabel(x_label)
    axes.set_ylabel("share of documents")
    axes.legend()
    return _svg(figure)
