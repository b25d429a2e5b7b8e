"""The comparison of two runs, for the terminal and as a page: tables with one cell where both agree, and
`first -> second` where they do not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from gristmill.core.files import atomic_write
from gristmill.core.store import Store
from gristmill.flows.questions.compare import compare_runs, loss_curves
from gristmill.flows.report.page_elements import Figure, Section, Table, page
from gristmill.flows.report.pictures import curves
from gristmill.flows.report.summary import plain_table, section
from gristmill.flows.running.terminal import plain_console

Format = Callable[[Any], str]
NOTHING = "-"
LONGEST_VALUE = 200


def tables(found: Mapping[str, Any]) -> list[tuple[str, Table]]:
    """A table, with its title, of every topic that both or one of the runs have."""
    made = []
    if found["manifest"]:
        made.append(
            (
                "Manifest",
                Table(
                    ["key", "first", "second"],
                    [[row["key"], _value(row["first"]), _value(row["second"])] for row in found["manifest"]],
                ),
            )
        )
    made.append(
        (
            "Outputs",
            Table(
                ["stage", "output", "seconds"],
                [
                    [
                        row["stage"],
                        "the same" if row["same"] else pair(row["fingerprint"], lambda text: str(text)[:8]),
                        pair(row["seconds"], lambda seconds: f"{seconds:.1f}"),
                    ]
                    for row in found["stages"]
                ],
                {2},
            ),
        )
    )
    for topic, title, keys, columns in TOPICS:
        if found[topic]:
            made.append(
                (
                    title,
                    Table(
                        [*keys, *(name for name, _, _ in columns)],
                        [
                            [*(row[key] for key in keys), *(pair(row[key], form) for _, key, form in columns)]
                            for row in found[topic]
                        ],
                        set(range(len(keys), len(keys) + len(columns))),
                    ),
                )
            )
    return made


TOPICS: list[tuple[str, str, list[str], list[tuple[str, str, Format]]]] = [
    (
        "funnel",
        "Documents",
        ["stage"],
        [
            ("kept", "kept", lambda count: f"{count:,}"),
            ("MB kept", "bytes_kept", lambda size: f"{size / 1e6:.1f}"),
            ("tokens", "tokens_kept", lambda count: f"{count:,.0f}"),
        ],
    ),
    (
        "mixture",
        "Mixture",
        ["source"],
        [
            ("tokens", "tokens", lambda count: f"{count:,}"),
            ("share", "share", lambda share: f"{share:.2%}"),
            ("epochs", "epochs", lambda epochs: f"{epochs:.2f}"),
        ],
    ),
    (
        "training",
        "Training",
        ["stage"],
        [
            ("steps", "steps", lambda steps: f"{steps:,}"),
            ("first loss", "first", lambda loss: f"{loss:.4f}"),
            ("last loss", "last", lambda loss: f"{loss:.4f}"),
        ],
    ),
    (
        "evaluation",
        "Held-out text",
        ["model", "source"],
        [
            ("bits/byte", "bits_per_byte", lambda bits: f"{bits:.4f}"),
            ("perplexity", "perplexity", lambda perplexity: f"{perplexity:.1f}"),
            ("token accuracy", "token_accuracy", lambda share: f"{share:.1%}"),
        ],
    ),
]
"""Topic of a comparison, title, keys, and its columns: name, figure, how it is written."""


def pair(both: Mapping[str, Any], form: Format) -> str:
    """`a` where both are written alike, else `a -> b`."""
    first, second = (NOTHING if both[side] is None else form(both[side]) for side in ("first", "second"))
    return first if first == second else f"{first} -> {second}"


def print_comparison(found: Mapping[str, Any]) -> None:
    """Print the comparison as tables that fit the terminal."""
    console = plain_console()
    for side, run in zip(("first", "second"), found["runs"], strict=True):
        console.print(f"{side + ':':7} {run['run']} ({run['state']})", soft_wrap=True)
    if not found["manifest"]:
        console.print(Text("Both have the same manifest.", style="dim"))
    for title, compared in tables(found):
        section(console, title)
        table = plain_table(*((name, index in compared.numeric) for index, name in enumerate(compared.header)))
        for row in compared.rows:
            table.add_row(*(Text(cell, style="yellow" if " -> " in cell else "") for cell in row))
        console.print(table)


def write_comparison(store: Store, records: Sequence[Mapping[str, Any]], out: Path) -> None:
    """Write the comparison as one self-contained HTML file, with the losses of both runs over one axis."""
    found = compare_runs(store, *records)
    sections = [Section(title, [table]) for title, table in tables(found)]
    if losses := [
        Figure(curves(series, "step", "loss"), f"{stage}: training loss")
        for stage, series in loss_curves(store, records).items()
    ]:
        sections.append(Section("Losses", losses))
    with atomic_write(out) as sink:
        sink.write(page(" and ".join(run["run"] for run in found["runs"]), sections).encode())


def _value(value: Any) -> str:
    if value is None:
        return NOTHING
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= LONGEST_VALUE else f"{text[: LONGEST_VALUE - 3]}..."
