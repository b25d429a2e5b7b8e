"""Report of a ladder: tables for the terminal, JSON, and one HTML file with a picture
of the law.
"""

from __future__ import annotations

from dataclasses import asdict
from itertools import groupby
from pathlib import Path

import numpy as np

from gristmill.core.files import write_json, write_text
from gristmill.flows.pages.page_elements import Figure, Page, Section, Table, table
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.pages.pictures import laws
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.running.terminal import plain_console
from gristmill.flows.sweeps.ladder import LadderResults
from gristmill.flows.sweeps.scaling_law import ScalingLaw

CURVE_POINTS = 40
COLUMNS = {"training": "", "weights": ",", "tokens": ",", "tokens/weight": ".3g"}
COLUMNS |= {"loss": ".4f", "fitted": ".4f", "left out": ".4f"}
LAW = "L(N, D) = E + A / N^alpha + B / D^beta"
NUMBERS = {"floor": "E", "a": "A", "alpha": "alpha", "b": "B", "beta": "beta"}


def write_ladder(manifest_file: str, ladder: LadderResults) -> list[Path]:
    """Write `NAME-ladder.json` and `NAME-ladder.html` beside the manifest, and return
    their paths.
    """
    file = Path(manifest_file)
    json_file = file.with_name(f"{file.stem}-ladder.json")
    html_file = file.with_name(f"{file.stem}-ladder.html")
    write_json(json_file, asdict(ladder))
    write_text(html_file, ladder_page(file.name, ladder))
    return [json_file, html_file]


def print_ladder(ladder: LadderResults) -> None:
    """Print a ladder as text."""
    console = plain_console()
    print_table(console, _trainings(ladder))
    law = "; ".join(
        f"{name} {value} [{interval}]" for name, value, interval in _numbers(ladder)
    )
    console.print(law, style="dim")
    console.print(describe_target(ladder), style="bold green")


def describe_target(ladder: LadderResults) -> str:
    """Describe the prediction in sentences: its interval, its error, and its
    caveats.
    """
    target = ladder.target
    predicted = target.predicted
    measured = target.measured
    sentences = [
        f"predicted for {target.parameters:,} weights and {target.tokens:,} "
        f"tokens: a held-out loss of {predicted.value:.4f} nats per token "
        f"[{predicted.low:.4f}, {predicted.high:.4f}]; the leave-one-out error "
        f"of the trainings is {ladder.error:.2%}"
    ]
    if measured is not None:
        inside = "inside" if predicted.low <= measured <= predicted.high else "outside"
        sentences.append(
            f"the target was trained to {measured:.4f}: the prediction is off by "
            f"{target.off:+.2%}, and the measured loss lies {inside} its interval"
        )
    if target.tokens > target.set_tokens:
        sentences.append(
            f"the target reads its set of {target.set_tokens:,} tokens more than "
            "once, but the law holds for text that is read once: expect a higher loss"
        )
    if ladder.best_parameters is None:
        sentences.append(
            "by this law the size or the data make no difference: give sizes and "
            "budgets that are further apart"
        )
    else:
        sentences.append(
            f"by this law {ladder.best_parameters:,.3g} weights would be best "
            "for the target's FLOPs"
        )
    return "; ".join(sentences)


def ladder_page(name: str, ladder: LadderResults) -> str:
    """Render the ladder as one self-contained HTML page."""
    law = ScalingLaw(**{name: number.value for name, number in ladder.law.items()})
    series = {}
    target = ladder.target
    for size, group in groupby(ladder.rungs, key=lambda rung: rung.parameters):
        points = [(rung.tokens, rung.loss) for rung in group]
        least = points[0][0]
        most = max(points[-1][0], least)
        curve = [
            (float(tokens), law(size, float(tokens)))
            for tokens in np.geomspace(least, most, CURVE_POINTS)
        ]
        series[f"{size:,} weights"] = (points, curve)
    predicted = target.predicted
    picture = laws(
        series,
        (target.tokens, predicted.value, predicted.low, predicted.high),
        target.measured,
        "tokens",
        "held-out loss, nats per token",
    )
    numbers = Table(["parameter", "value", "95 % interval"], _numbers(ladder), {1, 2})
    sections = [
        Section("Trainings", [_trainings(ladder)]),
        Section("Law", [numbers]),
    ]
    figure = Figure(picture, f"Measured losses, and the fitted law {LAW}.")
    return html_file(
        Page(f"Ladder of {name}", sections, [figure], describe_target(ladder))
    )


def _trainings(ladder: LadderResults) -> Table:
    rows = [
        (
            rung.name,
            rung.parameters,
            rung.tokens,
            rung.tokens / rung.parameters,
            rung.loss,
            rung.fitted,
            rung.left_out,
        )
        for rung in ladder.rungs
    ]
    return table(COLUMNS, rows)


def _numbers(ladder: LadderResults) -> list[list[str]]:
    return [
        [
            NUMBERS[name],
            f"{interval.value:.4g}",
            f"{interval.low:.3g} to {interval.high:.3g}",
        ]
        for name, interval in ladder.law.items()
    ]
