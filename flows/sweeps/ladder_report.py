"""A ladder's report: tables for the terminal, JSON, and one HTML file with a picture of the law."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from gristmill.core.files import atomic_write, write_json
from gristmill.flows.questions.trace_tables import new_table
from gristmill.flows.report.page_elements import Figure, Section, Table, page
from gristmill.flows.report.pictures import laws
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.sweeps.scaling_law import ScalingLaw

CURVE_POINTS = 40
HEADER = ("training", "weights", "tokens", "tokens/weight", "loss", "by the law", "by the others")
LAW = "L(N, D) = E + A / N^alpha + B / D^beta"
NUMBERS = {"floor": "E", "a": "A", "alpha": "alpha", "b": "B", "beta": "beta"}


def write_ladder(manifest_file: str, found: Mapping[str, Any]) -> list[Path]:
    """Write `NAME-ladder.json` and `NAME-ladder.html` beside the manifest; returns them."""
    file = Path(manifest_file)
    written = [file.with_name(f"{file.stem}-ladder.json"), file.with_name(f"{file.stem}-ladder.html")]
    write_json(written[0], dict(found))
    with atomic_write(written[1]) as sink:
        sink.write(ladder_page(file.name, found).encode())
    return written


def print_ladder(found: Mapping[str, Any], console: Console | None = None) -> None:
    """Print a ladder for people."""
    console = console or plain_console()
    table = new_table(*((name, place > 0) for place, name in enumerate(HEADER)))
    for row in _rows(found):
        table.add_row(*row)
    console.print(table)
    console.print(
        Text("; ".join(f"{name} {value} [{interval}]" for name, value, interval in _numbers(found)), style="dim")
    )
    console.print(Text(describe_target(found), style="bold green"))


def describe_target(found: Mapping[str, Any]) -> str:
    """The prediction in sentences, what to think of it, and how far off it was."""
    target = found["target"]
    predicted, measured = target["predicted"], target["measured"]
    said = [
        f"predicted for {target['parameters']:,} weights and {target['tokens']:,} tokens: a held-out loss of "
        f"{predicted['value']:.4f} nats per token [{predicted['low']:.4f}, {predicted['high']:.4f}]; left out one "
        f"by one, the trainings are predicted within {found['error']:.2%}"
    ]
    if measured is not None:
        inside = "inside" if predicted["low"] <= measured <= predicted["high"] else "outside"
        said.append(
            f"the target was trained: {measured:.4f}, so that the prediction is off by {target['off']:+.2%}, "
            f"{inside} its interval"
        )
    if target["tokens"] > target["set_tokens"]:
        said.append(
            f"the target reads its set of {target['set_tokens']:,} tokens more than once, and the law is of "
            "text that is read once: expect more"
        )
    said.append(
        "size or data make no difference by this law: give sizes and budgets that are further apart"
        if found["best_parameters"] is None
        else f"by this law {found['best_parameters']:,.3g} weights would be best for the target's arithmetic"
    )
    return "; ".join(said)


def ladder_page(name: str, found: Mapping[str, Any]) -> str:
    """The ladder as one self-contained page."""
    law = ScalingLaw(**{key: value["value"] for key, value in found["law"].items()})
    series = {}
    target = found["target"]
    for size, group in groupby(found["rungs"], key=lambda one: one["parameters"]):
        points = [(one["tokens"], one["loss"]) for one in group]
        series[f"{size:,} weights"] = (points, _curve(law, size, points[0][0], points[-1][0]))
    predicted = target["predicted"]
    picture = laws(
        series,
        (target["tokens"], predicted["value"], predicted["low"], predicted["high"]),
        target["measured"],
        "tokens",
        "held-out loss, nats per token",
    )
    return page(
        f"Ladder of {name}",
        [
            Section("Trainings", [Table(HEADER, _rows(found), set(range(1, len(HEADER))))]),
            Section("Law", [Table(["number", "value", "95 % interval"], _numbers(found), {1, 2})]),
        ],
        note=describe_target(found),
        parts=[Figure(picture, f"What was measured, and {LAW}.")],
    )


def _curve(law: ScalingLaw, size: float, first: float, last: float) -> list[tuple[float, float]]:
    return [(float(tokens), law(size, float(tokens))) for tokens in np.geomspace(first, max(last, first), CURVE_POINTS)]


def _rows(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [
            one["name"],
            f"{one['parameters']:,}",
            f"{one['tokens']:,}",
            f"{one['tokens'] / one['parameters']:.3g}",
            f"{one['loss']:.4f}",
            f"{one['fitted']:.4f}",
            f"{one['left_out']:.4f}",
        ]
        for one in found["rungs"]
    ]


def _numbers(found: Mapping[str, Any]) -> list[list[str]]:
    return [
        [NUMBERS[name], f"{one['value']:.4g}", f"{one['low']:.3g} to {one['high']:.3g}"]
        for name, one in found["law"].items()
    ]
