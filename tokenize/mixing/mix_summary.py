"""Summary of a mixture: requested and realised shares, redistribution, packing costs,
and drift of the order.

The cost of a packing is its rows, its padding, its dropped tokens and its cut
documents. The drift is the distance of any prefix of the training order from the
mixture, with the bound of `order.py`: the source at each place is the same in every
epoch and for every seed, so the drift is known when the rows are planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gristmill.dataprep.conservation import Counts, check_conservation
from gristmill.dataprep.text.kernels import kernel
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.continue_mixture import before_of
from gristmill.tokenize.mixing.packing import packing_of
from gristmill.tokenize.mixing.quotas import Quotas
from gristmill.tokenize.mixing.row_layout import Layout
from gristmill.tokenize.order_kernels import rank_row

LIMITS = ("max_epochs", "min_tokens", "max_tokens", "where", "epochs")
"""Keys of a source that the summary repeats beside its share."""


@dataclass(frozen=True)
class Mixed:
    """Results of a mixture.

    Attributes:
        counts: the ledger's.
        laid_out: documents of each source in training rows.
        pass_tokens: of each source, tokens of one pass over its training documents,
            with ends of text and repeats.
        held_out_tokens: of each source, tokens of its held-out documents.
        train, held_out: packed streams of each source.
        validation: entries of the held-out shards of each source.
    """

    counts: Counts
    laid_out: Mapping[str, int]
    pass_tokens: Mapping[str, int]
    held_out_tokens: Mapping[str, int]
    train: Mapping[str, Layout]
    held_out: Mapping[str, Layout]
    validation: Sequence[Mapping[str, Any]]


def describe(
    mixed: Mixed, sources: Mapping[str, Mapping[str, Any]], quotas: Quotas, section: Mix
) -> dict[str, Any]:
    """Summary: the ledger, requested and realised shares by source, and the costs of
    all packings.

    Returns:
        `counts`; `rows`, `tokens` (of documents), `padding_tokens`, `packing` and
        `packings`; by source `requested` and `realised`; `stages`, requested and
        realised shares by phase; `redistributed`, tokens that limits gave to or took
        from a source; `prefixes`, the drift of the training order
        (`describe_prefixes`); `validation`.
    """
    check_conservation(mixed.counts, "mix")
    train, packing = mixed.train, packing_of(section)
    before = before_of(section.continues, list(sources))
    # Phases that were already read belong to the order of the continued set.
    kept = 0 if before is None else len(before.kept()[0])
    total = sum(layout.row_tokens for layout in train.values())
    realised = {
        name: {**layout.costs[packing.name], **_realised(name, mixed, total)}
        for name, layout in train.items()
    }
    if before is not None:  # the costs include rows that are passed over
        realised = {
            name: {**part, "rows": train[name].rows, "tokens": train[name].row_tokens}
            for name, part in realised.items()
        }
    return {
        "counts": mixed.counts,
        "rows": sum(layout.rows for layout in train.values()),
        "tokens": total,
        "padding_tokens": sum(part["padding_tokens"] for part in realised.values()),
        "packing": packing.name,
        "packings": _packings(layout.costs for layout in train.values()),
        "requested": _requested(sources, quotas, section.sequence_length),
        "realised": realised,
        "stages": _phases(list(sources), quotas, train, section),
        "redistributed": redistributed(list(sources), quotas, section.sequence_length),
        "prefixes": describe_prefixes(
            list(sources),
            list(
                zip(*(layout.rows_per_phase for layout in train.values()), strict=True)
            )[kept:],
        ),
        "validation": {
            name: {
                **written,
                "documents": layout.documents,
                "tokens": written["rows"] * section.sequence_length,
                "cut_tokens": mixed.held_out_tokens[name] - layout.row_tokens,
            }
            for (name, layout), written in zip(
                mixed.held_out.items(), mixed.validation, strict=True
            )
        },
    }


def redistributed(
    sources: Sequence[str], quotas: Quotas, length: int
) -> dict[str, int]:
    """Tokens of each source above (below: negative) its weight's request; empty if no
    limit was met.
    """
    requested_rows = quotas.asked_per_source()
    moved = {
        name: (rows - share) * length
        for name, rows, share in zip(
            sources, quotas.per_source(), requested_rows, strict=True
        )
    }
    # Rounding to whole rows moves less than a row.
    if all(abs(tokens) < length for tokens in moved.values()):
        return {}
    return {name: round(tokens) for name, tokens in moved.items() if tokens}


def describe_redistribution(moved: Mapping[str, int]) -> str:
    """Sentence that describes the result of `redistributed`."""
    decreases = ", ".join(
        f"{-tokens:,} from {name}" for name, tokens in moved.items() if tokens < 0
    )
    increases = ", ".join(
        f"{tokens:,} to {name}" for name, tokens in moved.items() if tokens > 0
    )
    return (
        "limits of sources are met, so tokens were redistributed "
        f"(mix.on_shortfall): {decreases}; {increases}"
    )


def _requested(
    sources: Mapping[str, Mapping[str, Any]], quotas: Quotas, length: int
) -> dict[str, dict[str, Any]]:
    total, requested_rows = sum(quotas.per_source()), quotas.asked_per_source()
    return {
        name: {
            "share": float(rows / total),
            "tokens": float(rows * length),
            **{key: source[key] for key in LIMITS if source[key] is not None},
        }
        for (name, source), rows in zip(sources.items(), requested_rows, strict=True)
    }


def _phases(
    sources: Sequence[str], quotas: Quotas, train: Mapping[str, Layout], section: Mix
) -> list[dict[str, Any]]:
    ends: list[float | None] = [phase.end for phase in section.phases] or [None]
    if section.continues is not None:
        passed = np.cumsum([sum(line) for line in quotas.rows])
        ends = (passed / passed[-1]).tolist()
    tokens = list(
        zip(*(layout.tokens_per_phase for layout in train.values()), strict=True)
    )
    rows = list(zip(*(layout.rows_per_phase for layout in train.values()), strict=True))
    return [
        {
            "until": 1.0 if end is None else end,
            "rows": sum(rows[number]),
            "tokens": sum(tokens[number]),
            "rows_per_source": list(rows[number]),
            "requested": _shares(sources, quotas.asked[number]),
            "realised": _shares(sources, tokens[number]),
        }
        for number, end in enumerate(ends)
    ]


def _shares(
    sources: Sequence[str], parts: Sequence[Fraction] | Sequence[int]
) -> dict[str, float]:
    exact = [Fraction(part) for part in parts]
    return {
        name: float(part / sum(exact))
        for name, part in zip(sources, exact, strict=True)
    }


def _packings(
    costs: Iterable[Mapping[str, Mapping[str, Any]]],
) -> dict[str, dict[str, Any]]:
    """Cost of every packing, summed over all sources (see `packing.Costs.accounts`)."""
    total: dict[str, dict[str, Any]] = {}
    for source in costs:
        for name, account in source.items():
            sums = total.setdefault(name, dict.fromkeys(account, 0))
            total[name] = {key: sums[key] + value for key, value in account.items()}
    return total


def _realised(name: str, mixed: Mixed, total_tokens: int) -> dict[str, Any]:
    """Realised tokens and documents of a source; `cut_tokens` are the unused tokens of
    its last document.
    """
    layout, pass_tokens = mixed.train[name], mixed.pass_tokens[name]
    return {
        "share": layout.row_tokens / total_tokens,
        "available_tokens": pass_tokens,
        "documents": mixed.laid_out[name],
        "copies": layout.documents,
        "epochs": round(layout.end / pass_tokens, 4) if pass_tokens else 0.0,
        "cut_tokens": layout.tokens - layout.end,
    }


def describe_prefixes(
    sources: Sequence[str], phases: Sequence[Sequence[int]]
) -> dict[str, dict[str, Any]]:
    """Each source's `largest_drift_rows`, over the prefixes of all phases, and its
    `bound_rows`.

    The drift of a source is its rows in the first k places of a phase, minus k times
    its share of the phase's rows. Emptied rows count as laid out.

    Args:
        sources: names, in order.
        phases: rows of each source, for every phase.
    """
    drifts, bounds = np.zeros(len(sources)), np.zeros(len(sources))
    for rows in phases:
        counts = np.array(rows, dtype=np.int64)
        shares, number = counts / max(1, counts.sum()), np.count_nonzero(counts)
        bound = np.where(counts > 0, (1 - shares) / 2 + shares * (number - 1) / 2, 0.0)
        drifts, bounds = (
            np.maximum(drifts, largest_drifts(counts)),
            np.maximum(bounds, bound),
        )
    return {
        name: {"largest_drift_rows": round(drift, 4), "bound_rows": round(bound, 4)}
        for name, drift, bound in zip(
            sources, drifts.tolist(), bounds.tolist(), strict=True
        )
    }


@kernel
def largest_drifts(counts: np.ndarray) -> np.ndarray:
    """Largest drift of each source over all prefixes of the merged order (float64 of
    shape (S,), rows).

    The drift of a source is largest just after one of its rows, and smallest just
    before one or at the end.

    Args:
        counts: int64 of shape (S,), rows of each source.
    """
    total, drifts = counts.sum(), np.zeros(len(counts))
    for source in range(len(counts)):
        largest = np.int64(0)
        for row in range(counts[source]):
            # Both products may wrap; their small difference is exact.
            before = row * total - rank_row(counts, source, row) * counts[source]
            largest = max(largest, -before, before + total - counts[source])
        drifts[source] = largest / max(1, total)
    return drifts
