"""`gristmill bench`: rows of name, ours, peer, unit and ratio, both sides measured in the same run on this machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from gristmill.dataprep.files import atomic_write

AREAS = {
    "dataprep": (
        "benchmarks.dataprep.bench_gopher",
        "benchmarks.dataprep.bench_rules",
        "benchmarks.dataprep.bench_minhash",
        "benchmarks.dataprep.bench_judges",
        "benchmarks.dataprep.bench_reading",
        "benchmarks.dataprep.bench_clean",
        "benchmarks.dataprep.bench_jobs",
        "benchmarks.dataprep.bench_spans",
        "benchmarks.dataprep.bench_dedup",
    ),
    "jobs": ("benchmarks.dataprep.bench_jobs",),
    "dedup_million": ("benchmarks.dataprep.bench_dedup",),
    "quality": (
        "benchmarks.dataprep.bench_duplicates",
        "benchmarks.dataprep.bench_language",
        "benchmarks.dataprep.bench_quality",
        "benchmarks.dataprep.bench_extraction",
        "benchmarks.dataprep.bench_pii",
        "benchmarks.dataprep.bench_decontamination",
    ),
    "memory": ("benchmarks.dataprep.bench_memory",),
    "tokenize": (
        "benchmarks.tokenize.bench_encode",
        "benchmarks.tokenize.bench",
        "benchmarks.tokenize.bench_remix",
        "benchmarks.tokenize.bench_packing",
        "benchmarks.tokenize.bench_export",
    ),
    "ids": ("benchmarks.tokenize.bench_ids",),
    "stream": ("benchmarks.tokenize.bench_stream",),
    "trace": ("benchmarks.trace",),
    "train": (
        "benchmarks.train.bench",
        "benchmarks.train.bench_sizes",
        "benchmarks.train.bench_loop",
        "benchmarks.train.bench_forms",
        "benchmarks.train.bench_budget",
    ),
    "sizes": ("benchmarks.train.bench_sizes",),
    "posttrain": ("benchmarks.train.bench_posttrain", "benchmarks.train.bench_rollouts"),
    "chaos": ("benchmarks.chaos.bench_chaos",),
}  # fmt: skip
"""Area -> modules whose `rows()` yield what was measured."""
SAID = ("promised", "happened")
"""What a row may say in words besides: lines below it on a terminal, columns of a page."""


def print_rows(area: str, as_json: bool, markdown: Path | None = None, **options: Any) -> None:
    """Measure an area and print its rows as they come; keep them as a table of markdown where asked for.

    `options` go to the area's `rows`; only `chaos` has any.
    """
    here = surroundings(area)
    if not as_json:
        typer.echo(here)
        typer.echo(f"{'name':<44} {'ours':>12} {'peer':>12} {'unit':<14} {'ratio':>7}")
    rows = []
    for row in (row for module in AREAS[area] for row in importlib.import_module(module).rows(**options)):
        rows.append(row)
        typer.echo(json.dumps(row) if as_json else describe(row))
    if markdown is not None:
        with atomic_write(markdown) as sink:
            sink.write(in_markdown(area, here, rows).encode())


def surroundings(area: str) -> str:
    """When, on what and with which versions an area is measured; for trainings with the GPU, where there is one."""
    parts = [time.strftime("%Y-%m-%d %H:%M"), f"{os.cpu_count()} cores", platform.machine(),
             f"Python {platform.python_version()}"]
    if any(module.startswith("benchmarks.train.") for module in AREAS[area]):
        import torch

        parts += [f"{name} {metadata.version(name)}" for name in ("torch", "transformers") if find_spec(name)]
        parts += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join(parts)


def describe(row: Mapping[str, Any]) -> str:
    """One line of text; a dash where nothing was measured, and the note behind."""
    ours, peer, ratio = shown(row)
    line = f"{row['name']:<44} {ours:>12} {peer:>12} {row['unit']:<14} {ratio:>7}  {row.get('note', '')}".rstrip()
    return "\n".join([line, *(f"    {key}: {row[key]}" for key in SAID if key in row)])


def shown(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Ours, peer and ratio as text; a dash where nothing was measured."""
    ours, peer = ("-" if row[side] is None else f"{row[side]:.4g}" for side in ("ours", "peer"))
    return ours, peer, "-" if row["ratio"] is None else f"{row['ratio']:.2f}"


def in_markdown(area: str, here: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """An area's rows as a page that says when and where it was measured."""
    said = [key for key in SAID if any(key in row for row in rows)] or ["note"]
    lines = [f"# gristmill bench {area}", "", f"Written by `gristmill bench {area} --markdown`: {here}.", "",
             f"| name | ours | peer | unit | ratio | {' | '.join(said)} |",
             f"| --- | ---: | ---: | --- | ---: |{' --- |' * len(said)}"]
    for row in rows:
        cells = [row["name"], *shown(row)[:2], row["unit"], shown(row)[2], *(row.get(key, "") for key in said)]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
