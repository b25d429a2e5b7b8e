"""Conservation ledger: every document that was read is kept, dropped or quarantined,
and the counts add up.

Counts are nested dictionaries of integers, so that shards can be added in any order:

    {"read": 10, "kept": 7, "dropped": {"min_words": 2}, "quarantined": 1,
     "bytes_read": 9000, "bytes_kept": 7000, "sources": {"prose": {... the same ...}}}
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from typing_extensions import TypedDict


class SourceCounts(TypedDict, total=False):
    """Documents by outcome, and bytes of text; a missing key is 0."""

    read: int
    kept: int
    dropped: dict[str, int]
    """Documents by reason."""
    quarantined: int
    bytes_read: int
    bytes_kept: int


class Counts(SourceCounts, total=False):
    """Counts of all documents, and by source."""

    sources: dict[str, SourceCounts]


class Counted(TypedDict):
    """Result of a task that judged documents."""

    counts: Counts


RuleCounts = dict[str, dict[str, int]]
"""Rule -> documents that fail it (`failing`), and only it (`only`)."""

Tally = TypeVar("Tally", bound=Mapping[str, object])
"""Numbers by name, or nested mappings of them."""


class ConservationError(RuntimeError):
    """Documents were lost or counted twice."""


class QuarantineError(RuntimeError):
    """More records than allowed could not be processed."""


def ranked(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    """Names with their counts, the largest first."""
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def top_reasons(
    dropped: Mapping[str, int], quarantined: int, most: int = 3
) -> list[tuple[str, int]]:
    """The rules that dropped most, quarantine among them."""
    reasons = {**dropped, "quarantined": quarantined} if quarantined else dropped
    return ranked(reasons)[:most]


def add_counts(parts: Iterable[Tally]) -> Tally:
    """Add nested counts key by key."""
    total: Any = {}
    for part in parts:
        for key, value in part.items():
            if isinstance(value, Mapping):
                total[key] = add_counts([total.get(key, {}), value])
            else:
                total[key] = total.get(key, 0) + value
    return total


def balance(
    results: Iterable[Counted],
    max_quarantined: float,
    stage: str,
    lost: int = 0,
    errors: Path | None = None,
) -> Counts:
    """Add the `counts` of a stage's results, and check that they balance.

    Args:
        max_quarantined: largest allowed share of quarantined documents.
        lost: estimated number of documents lost in files that cannot be read to their
            end; not part of the counts.
        errors: folder of the tables with the column `error`.

    Raises:
        ConservationError: documents were lost or counted twice.
        QuarantineError: more documents than allowed raised an error or are lost.
    """
    counts = add_counts(result["counts"] for result in results)
    check_conservation(counts, stage)
    check_quarantine(counts, max_quarantined, stage, lost, errors)
    return counts


def check_conservation(counts: Counts, stage: str) -> None:
    """Raise ConservationError unless kept + dropped + quarantined = read, in total and
    for every source.
    """
    for name, part in [("all sources", counts), *counts.get("sources", {}).items()]:
        read, kept = part.get("read", 0), part.get("kept", 0)
        dropped = sum(part.get("dropped", {}).values())
        quarantined = part.get("quarantined", 0)
        if kept + dropped + quarantined != read:
            raise ConservationError(
                f"{stage}: {name}: {read} documents were read but "
                f"{kept + dropped + quarantined} are accounted for (kept {kept}, "
                f"dropped {dropped}, quarantined {quarantined}); nothing was committed"
            )


def check_quarantine(
    counts: Counts,
    limit: float,
    stage: str,
    lost: int = 0,
    errors: Path | None = None,
) -> None:
    """Raise QuarantineError if more than the share `limit` of all records is
    quarantined or lost.

    Args:
        lost: estimated number of records lost in damaged files.
        errors: folder of the tables with the column `error`.
    """
    read = counts.get("read", 0)
    quarantined = counts.get("quarantined", 0)
    failed = quarantined + lost
    total = read + lost
    if total and failed > limit * total:
        share = f"({failed / total:.1%})"
        problem = f"{quarantined} of {read} records {share} could not be processed"
        if lost:
            problem = (
                f"{quarantined} of {read} records could not be processed, and about "
                f"{lost} more are lost with files that end early or are damaged {share}"
            )
        example = None if errors is None else commonest_error(errors)
        hint = ""
        if example is not None:
            hint = (
                f"most often: {example}; see all in the column `error` of "
                f"{errors}/*.parquet, and "
            )
        raise QuarantineError(
            f"{stage}: {problem}, more than the allowed {limit:.1%}; {hint}correct "
            "that, or raise max_quarantined for this stage"
        )


def commonest_error(folder: Path) -> str | None:
    """Most frequent error in a folder of annotations or of quarantined records, with
    its number and the first place if the tables have places; None without errors.
    """
    import pyarrow.parquet as pq

    numbers: Counter[str] = Counter()
    places: dict[str, str] = {}
    for path in sorted(folder.glob("*.parquet")):
        with (
            path.open("rb") as stream,
            pq.ParquetFile(stream, pre_buffer=False) as file,
        ):
            columns = {"error", "file", "record"}.intersection(file.schema_arrow.names)
            rows = file.read(sorted(columns), use_threads=False).to_pylist()
        for row in rows:
            error = row.get("error")
            if error is not None:
                numbers[error] += 1
                if "file" in row:
                    place = f", first in {row['file']}, record {row['record']}"
                    places.setdefault(error, place)
    if not numbers:
        return None
    error, number = numbers.most_common(1)[0]
    return f"{error} ({number:,} records{places.get(error, '')})"


Histogram = dict[str, list[Any]]
"""`edges`, ascending, and `counts`, one more: below the first edge, between neighbours
(lower edge included), above.
"""

Histograms = dict[str, Histogram]
"""Histograms by column or by source."""

SHARE_EDGES = [round(0.02 * step, 2) for step in range(51)]
COUNT_EDGES = [0, *(2**power for power in range(21))]
LENGTH_EDGES = [0.5 * step for step in range(41)]
ANY_EDGES = sorted(
    {*SHARE_EDGES, *COUNT_EDGES, *LENGTH_EDGES, *(-edge for edge in COUNT_EDGES)}
)
"""Edges for values of unknown range; `fit_histogram` then selects suitable ones."""


def histogram(values: np.ndarray, edges: Sequence[float]) -> Histogram:
    """Count values between edges; NaN is not counted."""
    bins = np.searchsorted(
        np.asarray(edges, np.float64), values[~np.isnan(values)], side="right"
    )
    return {
        "edges": list(edges),
        "counts": np.bincount(bins, minlength=len(edges) + 1).tolist(),
    }


def add_histograms(parts: Iterable[Histograms]) -> Histograms:
    """Add histograms of the same edges, name by name."""
    total: Histograms = {}
    for part in parts:
        for name, added in part.items():
            counts = added["counts"]
            if name in total:
                before = total[name]["counts"]
                counts = [a + b for a, b in zip(before, counts, strict=True)]
            total[name] = {"edges": added["edges"], "counts": counts}
    return total


def fit_histogram(counted: Histogram) -> Histogram:
    """Reduce a histogram with ANY_EDGES to the narrowest usual edges that cover its
    values.
    """
    # A value between two edges counts as the lower one; values below all edges count as
    # -inf.
    lower_edges = [-np.inf, *ANY_EDGES]
    filled = [lower_edges[place] for place in np.flatnonzero(counted["counts"])] or [
        0.0
    ]
    low, high = min(filled), max(filled)
    edges = COUNT_EDGES
    if low < 0:
        edges = sorted({*COUNT_EDGES, *(-edge for edge in COUNT_EDGES)})
    for usual in (COUNT_EDGES, LENGTH_EDGES, SHARE_EDGES):
        if usual[0] <= low and high <= usual[-1]:
            edges = usual
    bins = np.searchsorted(edges, lower_edges, side="right")
    counts = np.bincount(bins, counted["counts"], len(edges) + 1).astype(int)
    return {"edges": list(edges), "counts": counts.tolist()}


def fit_histograms(parts: Iterable[Histograms]) -> Histograms:
    """Add histograms with ANY_EDGES by name, and fit their edges to the values."""
    return {
        name: fit_histogram(counted) for name, counted in add_histograms(parts).items()
    }
