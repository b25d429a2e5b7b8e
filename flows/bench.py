"""`gristmill bench`: rows of name, ours, peer, unit and ratio, both sides measured in the same run on this machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Mapping
from typing import Any

import typer

AREAS = {
    "dataprep": (
        "gristmill.dataprep.bench",
        "gristmill.dataprep.bench_judges",
    ),
    "quality": (
        "gristmill.dataprep.bench_language",
    ),
    "tokenize": ("gristmill.tokenize.bench",),
    "train": ("gristmill.train.bench",),
}  # fmt: skip
"""Area -> modules whose `rows()` yield what was measured."""


def print_rows(area: str, as_json: bool) -> None:
    """Measure an area and print its rows as they come."""
    if not as_json:
        typer.echo(f"{time.strftime('%Y-%m-%d %H:%M')}, {os.cpu_count()} cores, {platform.machine()}, "
                   f"Python {platform.python_version()}")
        typer.echo(f"{'name':<44} {'ours':>12} {'peer':>12} {'unit':<14} {'ratio':>7}")
    for row in (row for module in AREAS[area] for row in importlib.import_module(module).rows()):
        if as_json:
            typer.echo(json.dumps(row))
        else:
            typer.echo(describe(row))


def describe(row: Mapping[str, Any]) -> str:
    """One line of text; a dash where nothing was measured, and the note behind."""
    ours, peer = ("-" if row[side] is None else f"{row[side]:.4g}" for side in ("ours", "peer"))
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    return f"{row['name']:<44} {ours:>12} {peer:>12} {row['unit']:<14} {ratio:>7}  {row.get('note', '')}".rstrip()
