"""Runs of a sweep as the two tables of Olmix (arXiv 2602.12237, `olmix fit
--from-csv`): a row per proxy, of its mixture and of what it measured.

    ratios.csv    run_id, name, share of each source; the shares sum to 1
    metrics.csv   run_id, name, bits per byte of each source, error of each task
"""

from __future__ import annotations

import csv
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv
from pydantic import BaseModel, ValidationError

from gristmill.core.files import atomic_write
from gristmill.flows.sweeps.grid import SweepError, normalised
from gristmill.flows.sweeps.proxies import (
    Proxy,
    Sweep,
    TrainedGroup,
    TriedMixture,
)
from gristmill.flows.sweeps.results import SweepResults
from gristmill.mixtures.yaml_text import problems_of

RATIOS, METRICS = "ratios.csv", "metrics.csv"
TOLERANCE = 0.01
"""Of the sum of a run's shares, as in Olmix's `load_from_csv`."""


class Run(BaseModel, extra="allow"):
    """A row of a table: a run, and a number for each source or task."""

    run_id: str
    name: str = ""
    __pydantic_extra__: dict[str, float]


def write_runs(folder: Path, results: SweepResults) -> list[Path]:
    """Write all measured proxies of a sweep, and return the paths of both tables."""
    folder.mkdir(parents=True, exist_ok=True)
    ratios, metrics = [], []
    for mixture in results.mixtures:
        for proxy in mixture.proxies:
            run = {
                "run_id": f"{mixture.mixture}-{proxy.seed}",
                "name": f"mixture {mixture.mixture}, seed {proxy.seed}",
            }
            ratios.append({**run, **mixture.weights})
            metrics.append({**run, **proxy.values})
    tables = {folder / RATIOS: ratios, folder / METRICS: metrics}
    for path, rows in tables.items():
        with atomic_write(path) as file:
            pa_csv.write_csv(pa.Table.from_pylist(rows), file)
    return list(tables)


def read_runs(folder: Path, sweep: Sweep) -> list[TriedMixture]:
    """Read runs as further mixtures of a sweep; those of one mixture are its seeds.

    A source of the manifest that the table lacks has share 0, so that runs of fewer
    sources stay useful. Runs that read a source which the manifest lacks are left out.

    Raises:
        SweepError: a table is missing or malformed, a measurement of the target is
            missing, or no run has sources of the manifest alone.
    """
    metrics = _read_table(folder / METRICS)
    proxies: dict[tuple[float, ...], list[Proxy]] = {}
    for run, ratios in _read_table(folder / RATIOS).items():
        total = sum(ratios.values())
        if abs(total - 1) > TOLERANCE:
            raise SweepError(
                f"{folder / RATIOS}: the shares of run {run} sum to {total:.3f}, "
                "not to 1"
            )
        own = {name: ratios.pop(name, 0.0) for name in sweep.manifest_weights}
        if run not in metrics or any(ratios.values()):
            continue
        try:
            values = {
                name: metrics[run][name]
                for name, share in sweep.target.items()
                if share
            }
        except KeyError as error:
            raise SweepError(
                f"{folder / METRICS}: run {run} has no measurement of {error}, which "
                "the target needs; add the column, or choose another --target"
            ) from error
        seeds = proxies.setdefault(tuple(normalised(own).values()), [])
        seeds.append(Proxy(len(seeds), run, values))
    if not proxies:
        raise SweepError(
            f"{folder / RATIOS}: no run with measurements has only sources of the "
            f"manifest ({', '.join(sweep.manifest_weights)})"
        )
    return [
        TriedMixture(
            number,
            dict(zip(sweep.manifest_weights, shares, strict=True)),
            TrainedGroup(f"mixture {number}", tuple(seeds)),
        )
        for number, (shares, seeds) in enumerate(proxies.items(), len(sweep.mixtures))
    ]


def _read_table(path: Path) -> dict[str, dict[str, float]]:
    """Return the numbers of each run by column; empty cells are left out."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [
                Run.model_validate({name: cell for name, cell in row.items() if cell})
                for row in csv.DictReader(file)
            ]
    except ValidationError as error:
        raise SweepError(f"{path}: {problems_of(error)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SweepError(f"{path}: {error}") from error
    return {row.run_id: row.__pydantic_extra__ for row in rows}
