"""The comparison of two runs, for the terminal and as a page: tables with one cell
where both agree, and `first -> second` where they differ.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from gristmill.core.files import write_text
from gristmill.core.store import Store
from gristmill.flows.pages.page_elements import Figure, Page, Section, Table, section_of
from gristmill.flows.pages.page_html import html_file
from gristmill.flows.pages.pictures import curves
from gristmill.flows.pages.terminal_tables import print_table
from gristmill.flows.questions.compare import (
    Pair,
    RunComparison,
    compare_runs,
    loss_curves,
)
from gristmill.flows.running.terminal import plain_console

Format = Callable[[Any], str]
NOTHING = "-"
ARROW = " -> "
LONGEST_VALUE = 200


def tables(comparison: RunComparison) -> list[tuple[str, Table]]:
    """A table, with its title, of every topic that at least one of the runs has."""
    changes = [
        [change.key, _value(change.first), _value(change.second)]
        for change in comparison.manifest
    ]
    outputs = [
        [
            row.stage,
            "the same"
            if row.same
            else pair(row.fingerprint, lambda text: str(text)[:8]),
            pair(row.seconds, "{:.1f}".format),
        ]
        for row in comparison.stages
    ]
    titled = [("Manifest", Table(["key", "first", "second"], changes))]
    titled.append(("Outputs", Table(["stage", "output", "seconds"], outputs, {2})))
    for topic, title, keys, columns in TOPICS:
        header = [*keys, *(name for name, _, _ in columns)]
        rows = [
            [
                *(getattr(row, key) for key in keys),
                *(pair(getattr(row, key), form) for _, key, form in columns),
            ]
            for row in getattr(comparison, topic)
        ]
        titled.append((title, Table(header, rows, set(range(len(keys), len(header))))))
    return titled


TOPICS: list[tuple[str, str, list[str], list[tuple[str, str, Format]]]] = [
    (
        "funnel",
        "Documents",
        ["stage"],
        [
            ("kept", "kept", "{:,}".format),
            ("MB kept", "bytes_kept", lambda size: f"{size / 1e6:.1f}"),
            ("tokens", "tokens_kept", "{:,.0f}".format),
        ],
    ),
    (
        "mixture",
        "Mixture",
        ["source"],
        [
            ("tokens", "tokens", "{:,}".format),
            ("share", "share", "{:.2%}".format),
            ("epochs", "epochs", "{:.2f}".format),
        ],
    ),
    (
        "training",
        "Training",
        ["stage"],
        [
            ("steps", "steps", "{:,}".format),
            ("first loss", "first", "{:.4f}".format),
            ("last loss", "last", "{:.4f}".format),
        ],
    ),
    (
        "evaluation",
        "Held-out text",
        ["model", "source"],
        [
            ("bits/byte", "bits_per_byte", "{:.4f}".format),
            ("perplexity", "perplexity", "{:.1f}".format),
            ("token accuracy", "token_accuracy", "{:.1%}".format),
        ],
    ),
]
"""Topic of a comparison, its title, its keys, and its columns: name, key of the value,
format.
"""


def pair(values: Pair, form: Format) -> str:
    """`a` if both are written alike, else `a -> b`."""
    first, second = (
        NOTHING if value is None else form(value)
        for value in (values.first, values.second)
    )
    return first if first == second else f"{first}{ARROW}{second}"


def print_comparison(comparison: RunComparison) -> None:
    """Print the comparison as tables that fit the terminal."""
    console = plain_console()
    for side, run in zip(("first", "second"), comparison.runs, strict=True):
        console.print(f"{side + ':':7} {run.run} ({run.state})", soft_wrap=True)
    if not comparison.manifest:
        console.print(Text("Both have the same manifest.", style="dim"))
    for title, table in tables(comparison):
        print_table(console, table, title, highlight=ARROW)


def write_comparison(
    store: Store, records: Sequence[Mapping[str, Any]], out: Path
) -> None:
    """Write the comparison as one self-contained HTML file, with the losses of both
    runs over one axis.
    """
    comparison = compare_runs(store, *records)
    losses = [
        Figure(curves(series, "step", "loss"), f"{stage}: training loss")
        for stage, series in loss_curves(store, records).items()
    ]
    candidates = [section_of(title, table) for title, table in tables(comparison)]
    sections: list[Section] = [
        section for section in (*candidates, section_of("Losses", losses)) if section
    ]
    page = Page(" and ".join(run.run for run in comparison.runs), sections)
    write_text(out, html_file(page))


def _value(value: Any) -> str:
    if value is None:
        return NOTHING
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
