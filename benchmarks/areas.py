"""`gristmill bench`: areas, and their rows, both sides of which are measured in the
same run on this machine.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import typer

from benchmarks.measuring import Row
from gristmill.core.files import write_text
from gristmill.mixtures.base import Options

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
    ),
    "models": (
        "dataprep.asking:rows",
        "dataprep.annotators:rows",
        "dataprep.distilling:rows",
        "dataprep.meaning:rows",
        "dataprep.searching:rows",
    ),
    "search": ("dataprep.searching:rows",),
    "distil": ("dataprep.distilling:rows",),
    "meaning": ("dataprep.meaning:rows",),
    "asking": ("dataprep.asking:rows",),
    "labels": ("dataprep.label_speed:rows",),
    "dedup_million": ("dataprep.dedup_million:rows",),
    "quality": (
        "dataprep.duplicates:quality_rows",
        "dataprep.language:rows",
        "dataprep.judges:quality_rows",
        "dataprep.extraction:rows",
        "dataprep.cleaning:pii_rows",
        "dataprep.decontamination:rows",
        "dataprep.kinds_kept:rows",
    ),
    "extraction": ("dataprep.extraction:rows",),
    "kinds": ("dataprep.kinds_kept:rows",),
    "dialects": ("dataprep.dialects:rows",),
    "annotators": ("dataprep.annotators:rows",),
    "bounds": ("bounds:rows",),
    "requests": ("store_requests:rows",),
    "requests_parts": ("store_requests:part_rows",),
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
        "train.rounded_shares:rows",
        "train.held_gradients:rows",
        "train.masked:rows",
        "train.objectives:rows",
        "train.optimizers:rows",
        "train.optimizer_steps:rows",
    ),
    "forms": (
        "train.parallel_forms:rows",
        "train.row_lengths:rows",
        "train.rounded_shares:rows",
        "train.held_gradients:rows",
    ),
    "masked": ("train.masked:rows",),
    "objectives": ("train.objectives:rows",),
    "optimizers": ("train.optimizers:rows", "train.optimizer_steps:rows"),
    "optimizer_steps": ("train.optimizer_steps:rows",),
    "sizes": ("train.sizes:rows",),
    "defaults": ("train.defaults:rows",),
    "posttrain": (
        "train.tuning:rows",
        "train.tuning:large_vocabulary_rows",
        "train.rollouts:rows",
    ),
    "results": (
        "train.regmix:rows",
        "train.rule_dialects:rows",
        "train.planted:rows",
    ),
    "planted": ("train.planted:rows",),
    "chain": ("chain.chain:rows",),
    "scale": ("chain.scale:rows",),
    "chaos": ("chaos.chaos:rows", "chaos.full_disk:rows", "chaos.asking_kills:rows"),
    "chaos_disk": ("chaos.full_disk:rows",),
    "chaos_asking": ("chaos.asking_kills:rows",),
    "outages": ("chaos.outages:rows",),
    "engines": ("engines.engines:rows",),
}
"""Area -> functions of this folder that yield its rows, as MODULE:NAME."""
OPTIONS = {
    **dict.fromkeys(
        ("chaos", "chaos_asking", "chaos_disk"), ("points", "seed", "folder", "at_once")
    ),
    "bounds": ("documents", "folder"),
    "scale": ("documents", "folder"),
    "outages": ("folder",),
    "sizes": ("model",),
    "chain": ("documents", "folder", "flame"),
    "engines": ("megabytes", "engines", "folder"),
}
"""Area -> options that its functions take."""
FLOORS: dict[str, Options] = {
    "tokenize.streaming:floor_rows": {},
    "tokenize.encoding:floor_rows": {},
    "tokenize.mixing:remixing_rows": {},
    "dataprep.rules:set_rows": {"documents": 400},
    "dataprep.duplicates:speed_rows": {"documents": 400},
    "dataprep.meaning:rows": {"repeats": 2},
    "dataprep.searching:rows": {"repeats": 2},
    "dataprep.distilling:rows": {"repeats": 2},
    "dataprep.judges:speed_rows": {"documents": 600, "repeats": 3},
    "dataprep.asking:rows": {"requests": 1000, "repeats": 2, "stage_repeats": 3},
    "train.step:speed_rows": {},
    "train.loop:rows": {"rounds": 1},
    "train.tuning:rows": {},
    "train.rollouts:rows": {},
    "chain.chain:rows": {"documents": (1000,)},
}
"""Functions of the area `floors`, with options for fewer repeats, or for fewer documents
where these are measured in memory alone: the fixed cost of a stage would weigh more with
fewer documents. All together took 7 minutes without the chain's peers (2026-11-28, 2
cores).
"""
AREAS["floors"] = tuple(FLOORS)
MEASURES: dict[str, tuple[str, ...]] = {
    "bounds": (
        "dataprep",
        "tokenize/mixing",
        "tokenize/packing",
        "benchmarks/bounds.py",
    ),
    "chain": (
        "dataprep",
        "tokenize/encoding",
        "tokenize/mixing",
        "tokenize/packing",
        "flows/running",
        "benchmarks/chain",
    ),
    "chaos": ("dataprep", "flows", "tokenize", "train", "benchmarks/chaos"),
    "dataprep": ("dataprep", "benchmarks/dataprep"),
    "defaults": (
        "flows/authoring/new_manifest.py",
        "mixtures/scaling",
        "train",
        "benchmarks/train/defaults.py",
        "benchmarks/train/tuned_script.py",
    ),
    "dialects": ("dataprep/filters", "benchmarks/dataprep/dialects.py"),
    "engines": ("dataprep/runners", "flows/running", "benchmarks/engines"),
    "floors": ("dataprep", "tokenize", "train", "benchmarks"),
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
    "optimizers": (
        "train/optim",
        "benchmarks/train/optimizers.py",
        "benchmarks/train/optimizer_steps.py",
    ),
    "posttrain": (
        "train/objectives",
        "train/generation",
        "train/rl",
        "train/stages",
        "benchmarks/train",
    ),
    "quality": ("dataprep", "benchmarks/dataprep"),
    "requests": (
        "dataprep/runners",
        "tokenize/streaming",
        "benchmarks/store_requests.py",
    ),
    "requests_parts": (
        "core/azure_blobs.py",
        "core/bucket_files.py",
        "core/gcs.py",
        "core/s3.py",
    ),
    "results": (
        "flows/sweeps",
        "benchmarks/train/regmix.py",
        "benchmarks/train/rule_dialects.py",
        "benchmarks/train/planted.py",
    ),
    "scale": ("dataprep", "tokenize", "flows/running", "benchmarks/chain"),
    "stream": ("tokenize", "benchmarks/tokenize/streaming.py"),
    "tokenize": ("tokenize", "benchmarks/tokenize"),
    "train": ("train", "benchmarks/train"),
}
"""Page of docs/ (`bench-AREA.md`) -> folders and files whose speed it shows."""
WORDS = ("promised", "happened")
"""Fields in words besides the note: lines below the row on a terminal, columns of a
page.
"""
HEADER = (
    f"{'name':<44} {'ours':>12} {'peer':>12} {'unit':<14} {'ratio':>7} {'floor':>6}"
)


def print_rows(
    area: str, as_json: bool, markdown: Path | None = None, **options: Any
) -> bool:
    """Measure an area, print its rows as they come, and name those below their floors;
    also write the rows as a Markdown page if `markdown` names one.

    A function whose peer is not installed is skipped by the peer's name.

    Args:
        options: for the functions of the area; OPTIONS says which areas have any.

    Returns:
        True if no row is below its floor.
    """
    measured_on = surroundings(area)
    if not as_json:
        typer.echo(measured_on)
        typer.echo(HEADER)
    rows: list[Row] = []
    for name in AREAS[area]:
        short_form = FLOORS[name] if area == "floors" else {}
        try:
            rows += printed(measuring(name)(**short_form, **options), as_json)
        except ModuleNotFoundError as error:
            if str(error.name).startswith(("gristmill", "benchmarks")):
                raise
            typer.echo(f"{name}: skipped, {error.name} is not installed", err=True)
    if markdown is not None:
        write_text(markdown, in_markdown(area, measured_on, rows))
    fallen = [row for row in rows if row.is_below_floor]
    for row in fallen:
        typer.echo(
            f"fell: {row.name}: {row.ratio:.2f}, floor {row.floor:.2f}", err=True
        )
    return not fallen


def printed(rows: Iterable[Row], as_json: bool) -> Iterator[Row]:
    """Print each row as it comes, and pass it on."""
    for row in rows:
        typer.echo(json.dumps(as_dictionary(row)) if as_json else describe(row))
        yield row


def as_dictionary(row: Row) -> dict[str, object]:
    """Return the fields of a row; the measured ones always, the others if they say
    something.
    """
    always = ("name", "ours", "peer", "unit", "ratio")
    return {
        name: value
        for name, value in asdict(row).items()
        if name in always or value not in ("", None)
    }


def measuring(name: str) -> Callable[..., Iterable[Row]]:
    """Return the function that an entry of AREAS names."""
    module, _, function_name = name.partition(":")
    function: Callable[..., Iterable[Row]] = getattr(
        importlib.import_module(f"benchmarks.{module}"), function_name
    )
    return function


def surroundings(area: str) -> str:
    """Return date, machine, load and versions of a measurement; for trainings the GPU,
    too.
    """
    parts = [
        time.strftime("%Y-%m-%d %H:%M"),
        f"{os.cpu_count()} cores",
        platform.machine(),
        f"Python {platform.python_version()}",
        f"load {os.getloadavg()[0]:.0f}",
    ]
    if any(name.startswith("train.") for name in AREAS[area]):
        import torch

        parts += [
            f"{name} {metadata.version(name)}"
            for name in ("torch", "transformers")
            if find_spec(name)
        ]
        parts += [torch.cuda.get_device_name()] if torch.cuda.is_available() else []
    return ", ".join(parts)


def describe(row: Row) -> str:
    """Return a row as a line of text, with the note at its end."""
    ours, peer, ratio = values(row)
    floor = "" if row.floor is None else f"{row.floor:.2f}"
    line = (
        f"{row.name:<44} {ours:>12} {peer:>12} {row.unit:<14} {ratio:>7} "
        f"{floor:>6}  {row.note}"
    )
    words = [
        f"    {name}: {getattr(row, name)}" for name in WORDS if getattr(row, name)
    ]
    return "\n".join([line.rstrip(), *words])


def values(row: Row) -> tuple[str, str, str]:
    """Return ours, peer and ratio as text; a dash stands for what was not measured."""
    ours, peer = (
        "-" if value is None else f"{value:.4g}" for value in (row.ours, row.peer)
    )
    return ours, peer, "-" if row.ratio is None else f"{row.ratio:.2f}"


def in_markdown(area: str, measured_on: str, rows: Sequence[Row]) -> str:
    """Return an area's rows as a page that says when and on what it was measured."""
    words = [name for name in WORDS if any(getattr(row, name) for row in rows)] or [
        "note"
    ]
    has_floors = any(row.floor is not None for row in rows)
    numbers = ["ours", "peer", "ratio", "floor"]
    columns = ["name", "ours", "peer", "unit", "ratio"]
    columns += ["floor", *words] if has_floors else words
    rule = ["---:" if column in numbers else "---" for column in columns]
    lines = [
        f"# gristmill bench {area}",
        "",
        f"Written by `gristmill bench {area} --markdown`: {measured_on}.",
        "",
        f"| {' | '.join(columns)} |",
        f"| {' | '.join(rule)} |",
    ]
    for row in rows:
        ours, peer, ratio = values(row)
        cells = [row.name, ours, peer, row.unit, ratio]
        if has_floors:
            cells.append("" if row.floor is None else f"{row.floor:.2f}")
        cells += [getattr(row, name) for name in words]
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
        )
    return "\n".join(lines) + "\n"
