"""Runs of a sweep as the two tables of Olmix (arXiv 2602.12237, `olmix fit
--from-csv`): a row per proxy, of its mixture and of what it measured.

    ratios.csv    run_id, name, share of each source; the shares sum to 1
    metrics.csv   run_id, name, bits per byte of each source, error of each task
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from gristmill.core.files import atomic_write
from gristmill.flows.sweeps.grid import SweepError, Weights, normalised
from gristmill.flows.sweeps.proxies import MixtureOutcome, Proxy, Sweep
from gristmill.flows.sweeps.results import SweepResults

RATIOS, METRICS = "ratios.csv", "metrics.csv"
RUN, NAME = "run_id", "name"
TOLERANCE = 0.01
"""Of the sum of a run's shares, as in Olmix's `load_from_csv`."""


def write_runs(folder: Path, results: SweepResults) -> list[Path]:
    """Write all measured proxies of a sweep, and return the paths of both tables."""
    folder.mkdir(parents=True, exist_ok=True)
    ratios, metrics = [], []
    for mixture in results.mixtures:
        for proxy in mixture.proxies:
            run = f"{mixture.mixture}-{proxy.seed}"
            key = {RUN: run, NAME: f"mixture {mixture.mixture}, seed {proxy.seed}"}
            ratios.append({**key, **mixture.weights})
            metrics.append({**key, **proxy.bits_per_byte, **proxy.tasks})
    return [
        _write_table(folder / RATIOS, ratios),
        _write_table(folder / METRICS, metrics),
    ]


def _write_table(path: Path, rows: list[dict[str, Any]]) -> Path:
    with atomic_write(path) as file:
        pa_csv.write_csv(pa.Table.from_pylist(rows), file)
    return path


def read_runs(folder: Path, sweep: Sweep) -> list[MixtureOutcome]:
    """Read runs as further mixtures of a sweep; those of one mixture are its seeds.

    A source of the manifest that the table lacks has share 0, so that runs of fewer
    sources stay useful. Runs that read a source which the manifest lacks are left out.

    Raises:
        SweepError: a table is missing or malformed, a measurement of the target is
            missing, or no run has sources of the manifest alone.
    """
    metrics = _read_table(folder / METRICS)
    proxies: dict[tuple[float, ...], list[Proxy]] = {}
    mixtures: dict[tuple[float, ...], Weights] = {}
    for run, ratios in _read_table(folder / RATIOS).items():
        if abs(sum(ratios.values()) - 1) > TOLERANCE:
            raise SweepError(
                f"{folder / RATIOS}: the shares of run {run} sum to "
                f"{sum(ratios.values()):.3f}, not to 1"
            )
        is_foreign = any(
            share
            for name, share in ratios.items()
            if name not in sweep.manifest_weights
        )
        if run not in metrics or is_foreign:
            continue
        weights = normalised(
            {name: ratios.get(name, 0.0) for name in sweep.manifest_weights}
        )
        key = tuple(weights.values())
        mixtures[key] = weights
        values = {
            name: _measured(folder, run, name, metrics[run])
            for name, share in sweep.target.items()
            if share
        }
        seeds = proxies.setdefault(key, [])
        seeds.append(Proxy(len(seeds), run, values))
    if not mixtures:
        raise SweepError(
            f"{folder / RATIOS}: no run with measurements has only sources of the "
            f"manifest ({', '.join(sweep.manifest_weights)})"
        )
    first = len(sweep.mixtures)
    return [
        MixtureOutcome(first + number, weights, tuple(proxies[key]))
        for number, (key, weights) in enumerate(mixtures.items())
    ]


def _measured(folder: Path, run: str, name: str, values: Mapping[str, float]) -> float:
    if name not in values:
        raise SweepError(
            f"{folder / METRICS}: run {run} has no measurement of {name}, which the "
            "target needs; add the column, or choose another --target"
        )
    return values[name]


def _read_table(path: Path) -> dict[str, dict[str, float]]:
    """Return the numbers of each run by column; empty cells are left out."""
    try:
        table = pa_csv.read_csv(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise SweepError(f"{path}: {error}") from error
    if RUN not in table.column_names:
        raise SweepError(f"{path} has no column {RUN}")
    runs = table[RUN].to_pylist()
    columns = {}
    for name in table.column_names:
        if name in (RUN, NAME):
            continue
        try:
            columns[name] = table[name].cast(pa.float64()).to_pylist()
        except pa.ArrowInvalid as error:
            raise SweepError(f"{path}: column {name} is not of numbers") from error
    return {
        str(run): {
            name: values[row]
            for name, values in columns.items()
            if values[row] is not None
        }
        for row, run in enumerate(runs)
    }
