"""`gristmill bench`: rows of name, ours, peer, unit and ratio, both sides measured in the same run on this machine."""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from benchmarks.measuring import Row, fell
from gristmill.core.files import atomic_write

AREAS = {
    "dataprep": (
        "dataprep.rules:rows",
        "dataprep.duplicates:speed_rows",
        "dataprep.label_speed:rows",
        "dataprep.judges:speed_rows",
        "dataprep.reading:speed_rows",
        "dataprep.cleaning:speed_rows",
        "dataprep.jobs:rows",
        "dataprep.own_steps:rows",
        "dataprep.spans:rows",
        "dataprep.dedup_million:rows",
        "dataprep.asking:rows",
        "dataprep.meaning:rows",
        "dataprep.searching:rows",
        "dataprep.distilling:rows",
    ),
    "models": (
        "dataprep.asking:rows",
        "dataprep.annotators:rows",
        "dataprep.distilling:rows",
        "dataprep.meaning:rows",
        "dataprep.searching:rows",
        "train.red_team:rows",
    ),
    "search": ("dataprep.searching:rows",),
    "distil": ("dataprep.distilling:rows",),
    "meaning": ("dataprep.meaning:rows",),
    "asking": ("dataprep.asking:rows",),
    "labels": ("dataprep.label_speed:rows",),
    "jobs": ("dataprep.jobs:rows",),
    "own_steps": ("dataprep.own_steps:rows",),
    "dedup_million": ("dataprep.dedup_million:rows",),
    "quality": (
        "dataprep.duplicates:quality_rows",
        "dataprep.language:rows",
        "dataprep.judges:quality_rows",
        "dataprep.reading:quality_rows",
        "dataprep.cleaning:pii_rows",
        "dataprep.decontamination:rows",
        "dataprep.kinds_kept:rows",
        "dataprep.dialects:rows",
        "dataprep.annotators:rows",
    ),
    "kinds": ("dataprep.kinds_kept:rows",),
    "dialects": ("dataprep.dialects:rows",),
    "annotators": ("dataprep.annotators:rows",),
    "bounds": ("bounds:rows",),
    "requests": ("store_requests:rows",),
    "tokenize": (
        "tokenize.encoding:rows",
        "tokenize.vocabularies:rows",
        "tokenize.mixing:rows",
        "tokenize.exporting:rows",
        "tokenize.text_index:rows",
    ),
    "text_index": ("tokenize.text_index:rows", "tokenize.text_index:gigabyte_rows"),
    "vocabularies": ("tokenize.vocabularies:rows",),
    "stream": ("tokenize.streaming:rows",),
    "train": (
        "train.step:rows",
        "train.sizes:rows",
        "train.loop:rows",
        "train.parallel_forms:rows",
        "train.row_lengths:rows",
        "train.parallel_forms:dealt_rows",
        "train.rounded_shares:rows",
        "train.held_gradients:rows",
        "train.masked:rows",
        "train.objectives:rows",
        "train.optimizers:rows",
    ),
    "forms": (
        "train.parallel_forms:rows",
        "train.row_lengths:rows",
        "train.parallel_forms:dealt_rows",
        "train.rounded_shares:rows",
        "train.held_gradients:rows",
    ),
    "masked": ("train.masked:rows",),
    "objectives": ("train.objectives:rows",),
    "optimizers": ("train.optimizers:rows",),
    "sizes": ("train.sizes:rows",),
    "posttrain": ("train.tuning:rows", "train.rollouts:rows"),
    "red_team": ("train.red_team:rows",),
    "chain": ("chain.chain:rows",),
    "chaos": ("chaos.chaos:rows", "chaos.full_disk:rows", "chaos.asking_kills:rows"),
    "chaos_disk": ("chaos.full_disk:rows",),
    "chaos_asking": ("chaos.asking_kills:rows",),
    "outages": ("chaos.outages:rows",),
    "engines": ("engines.engines:rows",),
}
"""Area -> the functions of this folder that yield what was measured: module and name."""
OPTIONS = {
    **dict.fromkeys(("chaos", "chaos_asking", "chaos_disk"), ("points", "seed", "folder", "at_once")),
    "bounds": ("documents", "folder"),
    "outages": ("folder",),
    "chain": ("documents", "folder", "flame"),
}
"""Area -> what may be said of how it is measured."""
FLOORS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tokenize.streaming:floor_rows", {}),
    ("tokenize.encoding:floor_rows", {}),
    ("tokenize.mixing:remixing_rows", {}),
    ("dataprep.rules:set_rows", {"documents": 400}),
    ("dataprep.duplicates:speed_rows", {"documents": 400}),
    ("dataprep.meaning:rows", {"repeats": 2}),
    ("dataprep.searching:rows", {"repeats": 2}),
    ("dataprep.distilling:rows", {"repeats": 2}),
    ("dataprep.judges:speed_rows", {"documents": 600, "repeats": 3}),
    ("dataprep.asking:rows", {"requests": 400, "repeats": 2, "stage_repeats": 2}),
    ("train.step:speed_rows", {}),
    ("train.loop:rows", {"rounds": 1}),
    ("train.tuning:rows", {}),
    ("train.rollouts:rows", {}),
    ("chain.chain:rows", {"documents": (1000,)}),
)
"""Short forms of the areas, by fewer repeats, or by fewer documents where these are measured in memory alone: the fixed
cost of a stage would count for more of fewer. Without peers of the chain they should take less than 15 minutes on two
idle cores; no whole run has been timed."""
MEASURES: dict[str, tuple[str, ...]] = {
    "bounds": ("dataprep", "tokenize/mixing", "benchmarks/bounds.py"),
    "chain": ("dataprep", "tokenize/encoding", "tokenize/mixing", "flows/running", "benchmarks/chain"),
    "chaos": ("dataprep", "flows", "tokenize", "train", "benchmarks/chaos"),
    "dataprep": ("dataprep", "benchmarks/dataprep"),
    "dialects": ("dataprep/filtering", "benchmarks/dataprep/dialects.py"),
    "engines": ("dataprep/jobs", "benchmarks/engines"),
    "models": (
        "dataprep/llm",
        "dataprep/langid",
        "dataprep/quality",
        "dataprep/fasttext",
        "dataprep/semantic",
        "dataprep/encoders",
        "benchmarks/dataprep",
    ),
    "objectives": ("train/objectives", "benchmarks/train/objectives.py"),
    "optimizers": ("train/optim", "benchmarks/train/optimizers.py"),
    "posttrain": ("train/objectives", "train/generation", "train/reinforcement", "train/stages", "benchmarks/train"),
    "quality": ("dataprep", "benchmarks/dataprep"),
    "requests": ("dataprep/jobs", "tokenize/streaming", "flows/planning", "benchmarks/store_requests.py"),
    "stream": ("tokenize", "benchmarks/tokenize/streaming.py"),
    "tokenize": ("tokenize", "benchmarks/tokenize"),
    "train": ("train", "benchmarks/train"),
}
"""Page of docs/ (`bench-AREA.md`) -> the folders and files whose speed it shows."""
SAID = ("promised", "happened")
"""What a row may say in words besides: lines below it on a terminal, columns of a page."""


def print_rows(area: str, as_json: bool, markdown: Path | None = None, **options: Any) -> None:
    """Measure an area and print its rows as they come; keep them as a table of markdown where asked for.

    `options` go to the area's `rows`; OPTIONS says which areas have any.
    """
    here = surroundings(area)
    if not as_json:
        typer.echo(here)
        typer.echo(f"{'name':<44} {'ours':>12} {'peer':>12} {'unit':<14} {'ratio':>7} {'floor':>6}")
    rows = []
    for row in (row for name in AREAS[area] for row in measuring(name)(**options)):
        rows.append(row)
        typer.echo(json.dumps(row) if as_json else describe(row))
    if markdown is not None:
        with atomic_write(markdown) as sink:
            sink.write(in_markdown(area, here, rows).encode())


def print_floors(as_json: bool) -> bool:
    """Measure the rows of FLOORS, and name those below their floors; returns whether there are none.

    A measurement whose peer is not installed is skipped by the peer's name.
    """
    if not as_json:
        typer.echo(f"{'name':<44} {'ours':>12} {'peer':>12} {'unit':<14} {'ratio':>7} {'floor':>6}")
    fallen: list[Row] = []
    for name, options in FLOORS:
        try:
            for row in measuring(name)(**options):
                typer.echo(json.dumps(row) if as_json else describe(row))
                fallen += [row] if fell(row) else []
        except ModuleNotFoundError as error:
            typer.echo(f"{name}: skipped, {error.name} is not installed", err=True)
    for row in fallen:
        typer.echo(f"fell: {row['name']}: {row['ratio']:.2f}, floor {row['floor']:.2f}", err=True)
    return not fallen


def measuring(name: str) -> Callable[..., Iterable[Row]]:
    """The function that an entry of AREAS names."""
    module, _, function = name.partition(":")
    found: Callable[..., Iterable[Row]] = getattr(importlib.import_module(f"benchmarks.{module}"), function)
    return found


def surroundings(area: str) -> str:
    """When, on what, under which load and with which versions an area is measured; for trainings with the GPU, too."""
    parts = [
        time.strftime("%Y-%m-%d %H:%M"),
        f"{os.cpu_count()} cores",
        platform.machine(),
        f"Python {platform.python_version()}",
        f"load {os.getloadavg()[0]:.0f}",
    ]
    if any(name.startswith("train.") for name in AREAS[area]):
        import torch

        parts += [f"{name} {metadata.version(name)}" for name in ("torch", "transformers") if find_spec(name)]
        parts += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join(parts)


def describe(row: Row) -> str:
    """One line of text; a dash where nothing was measured, and the note behind."""
    ours, peer, ratio = shown(row)
    floor = f"{row['floor']:.2f}" if "floor" in row else ""
    line = f"{row['name']:<44} {ours:>12} {peer:>12} {row['unit']:<14} {ratio:>7} {floor:>6}  {row.get('note', '')}"
    line = line.rstrip()
    return "\n".join([line, *(f"    {key}: {row[key]}" for key in SAID if key in row)])


def shown(row: Row) -> tuple[str, str, str]:
    """Ours, peer and ratio as text; a dash where nothing was measured."""
    ours, peer = ("-" if row[side] is None else f"{row[side]:.4g}" for side in ("ours", "peer"))
    return ours, peer, "-" if row["ratio"] is None else f"{row['ratio']:.2f}"


def in_markdown(area: str, here: str, rows: Sequence[Row]) -> str:
    """An area's rows as a page that says when and where it was measured."""
    said = [key for key in SAID if any(key in row for row in rows)] or ["note"]
    lines = [
        f"# gristmill bench {area}",
        "",
        f"Written by `gristmill bench {area} --markdown`: {here}.",
        "",
        f"| name | ours | peer | unit | ratio | {' | '.join(said)} |",
        f"| --- | ---: | ---: | --- | ---: |{' --- |' * len(said)}",
    ]
    for row in rows:
        cells = [row["name"], *shown(row)[:2], row["unit"], shown(row)[2], *(row.get(key, "") for key in said)]
        lines.append("| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
