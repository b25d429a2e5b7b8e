"""What a mixture was asked for and what came of it: shares, what limits moved, what packings cost, how even it is.

A packing costs the rows that it makes, what it pads and drops, and the documents that it cuts. The bound is how far any
prefix of the training order is from the mixture (`order.py` states it): which source is at which place is the same in
every epoch and for every seed, so it is known when the rows are planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from gristmill.dataprep.counts import Counts, check_conservation
from gristmill.dataprep.text.kernels import kernel
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.continued import before_of
from gristmill.tokenize.mixing.packing import packing_of
from gristmill.tokenize.mixing.place_pieces import Layout
from gristmill.tokenize.mixing.quotas import Quotas
from gristmill.tokenize.order_kernels import rank_row

LIMITS = ("max_epochs", "min_tokens", "max_tokens", "where", "epochs")
"""Keys of a source that the summary repeats beside its share."""


@dataclass(frozen=True)
class Mixed:
    """What a mixture came to.

    Attributes:
        counts: the ledger.
        laid_out: how many documents of each source were put in training rows.
        pass_tokens: of each source, tokens of one pass over its training documents, ends of text and repeats counted.
        held_out_tokens: of each source, those of the documents that it holds out.
        train, held_out: how the streams of each source are packed.
        validation: what was written of the held-out rows of each source.
    """

    counts: Counts
    laid_out: Mapping[str, int]
    pass_tokens: Mapping[str, int]
    held_out_tokens: Mapping[str, int]
    train: Mapping[str, Layout]
    held_out: Mapping[str, Layout]
    validation: Sequence[Mapping[str, Any]]


def describe(mixed: Mixed, sources: Mapping[str, Mapping[str, Any]], quotas: Quotas, section: Mix) -> dict[str, Any]:
    """The summary: the ledger, per source what was asked for and what came of it, and what packings would cost.

    Returns:
        `counts`; `rows`, `tokens` (of documents), `padding_tokens`, `packing` and `packings`; per source `requested`
        and `realised`; `stages`, the shares of each phase, requested and realised; `redistributed`, the tokens that
        the limits gave a source or took from it, where they did; `prefixes`, how far any beginning of the training
        order is from the mixture (`describe_prefixes`); `validation`.
    """
    check_conservation(mixed.counts, "mix")
    train, packing = mixed.train, packing_of(section)
    before = before_of(section.continues, list(sources))
    # What was read of a set that is continued is a part of that one's order.
    kept = 0 if before is None else len(before.kept()[0])
    total = sum(layout.row_tokens for layout in train.values())
    realised = {name: {**layout.costs[packing.name], **_realised(name, mixed, total)} for name, layout in train.items()}
    if before is not None:  # costs are those of the stretch of a stream, of which rows may be passed over
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
            list(sources), list(zip(*(layout.rows_per_phase for layout in train.values()), strict=True))[kept:]
        ),
        "validation": {
            name: {
                **written,
                "documents": layout.documents,
                "tokens": written["rows"] * section.sequence_length,
                "cut_tokens": mixed.held_out_tokens[name] - layout.row_tokens,
            }
            for (name, layout), written in zip(mixed.held_out.items(), mixed.validation, strict=True)
        },
    }


def redistributed(sources: Sequence[str], quotas: Quotas, length: int) -> dict[str, int]:
    """Tokens that each source has more (or less: negative) than its weight asks for; none if no limit was met."""
    asked = quotas.asked_per_source()
    moved = {
        name: (rows - share) * length for name, rows, share in zip(sources, quotas.per_source(), asked, strict=True)
    }
    # Rounding to whole rows moves less than a row.
    if all(abs(tokens) < length for tokens in moved.values()):
        return {}
    return {name: round(tokens) for name, tokens in moved.items() if tokens}


def describe_redistribution(moved: Mapping[str, int]) -> str:
    """One sentence about what `redistributed` returned."""
    taken = ", ".join(f"{-tokens:,} from {name}" for name, tokens in moved.items() if tokens < 0)
    given = ", ".join(f"{tokens:,} to {name}" for name, tokens in moved.items() if tokens > 0)
    return f"limits of sources are met, so tokens were redistributed (mix.on_shortfall): {taken}; {given}"


def _requested(sources: Mapping[str, Mapping[str, Any]], quotas: Quotas, length: int) -> dict[str, dict[str, Any]]:
    total, asked = sum(quotas.per_source()), quotas.asked_per_source()
    return {
        name: {
            "share": float(rows / total),
            "tokens": float(rows * length),
            **{key: source[key] for key in LIMITS if source[key] is not None},
        }
        for (name, source), rows in zip(sources.items(), asked, strict=True)
    }


def _phases(sources: Sequence[str], quotas: Quotas, train: Mapping[str, Layout], section: Mix) -> list[dict[str, Any]]:
    ends: list[float | None] = [phase.end for phase in section.phases] or [None]
    if section.continues is not None:
        passed = np.cumsum([sum(line) for line in quotas.rows])
        ends = (passed / passed[-1]).tolist()
    tokens = list(zip(*(layout.tokens_per_phase for layout in train.values()), strict=True))
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


def _shares(sources: Sequence[str], parts: Sequence[Fraction] | Sequence[int]) -> dict[str, float]:
    exact = [Fraction(part) for part in parts]
    return {name: float(part / sum(exact)) for name, part in zip(sources, exact, strict=True)}


def _packings(costs: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What every packing makes of the same tokens of documents, over all sources (see `packing.Costs.accounts`)."""
    total: dict[str, dict[str, Any]] = {}
    for source in costs:
        for name, account in source.items():
            sums = total.setdefault(name, dict.fromkeys(account, 0))
            total[name] = {key: sums[key] + value for key, value in account.items()}
    return total


def _realised(name: str, mixed: Mixed, total_tokens: int) -> dict[str, Any]:
    """What a source gave, besides what its packing costs; `cut_tokens` are the rest of its last document."""
    layout, pass_tokens = mixed.train[name], mixed.pass_tokens[name]
    return {
        "share": layout.row_tokens / total_tokens,
        "available_tokens": pass_tokens,
        "documents": mixed.laid_out[name],
        "copies": layout.documents,
        "epochs": round(layout.end / pass_tokens, 4) if pass_tokens else 0.0,
        "cut_tokens": layout.tokens - layout.end,
    }


def describe_prefixes(sources: Sequence[str], phases: Sequence[Sequence[int]]) -> dict[str, dict[str, Any]]:
    """Each source's `largest_drift_rows`, over the beginnings of all phases, and its `bound_rows`.

    A drift is the difference of the rows that the first k places of a phase have of a source, and k times its share of
    the phase's rows. Rows that were emptied count as they were laid out.

    Args:
        sources: names, in order.
        phases: rows of each source, for every phase.
    """
    drifts, bounds = np.zeros(len(sources)), np.zeros(len(sources))
    for rows in phases:
        counts = np.array(rows, dtype=np.int64)
        shares, number = counts / max(1, counts.sum()), np.count_nonzero(counts)
        bound = np.where(counts > 0, (1 - shares) / 2 + shares * (number - 1) / 2, 0.0)
        drifts, bounds = np.maximum(drifts, largest_drifts(counts)), np.maximum(bounds, bound)
    return {
        name: {"largest_drift_rows": round(drift, 4), "bound_rows": round(bound, 4)}
        for name, drift, bound in zip(sources, drifts.tolist(), bounds.tolist(), strict=True)
    }


@kernel
def largest_drifts(counts: np.ndarray) -> np.ndarray:
    """The largest drift of each source over all beginnings of the merged order (float64 of shape (S,), rows).

    A source is ahead most just behind one of its rows, and behind most just before one, or at the end.

    Args:
        counts: int64 of shape (S,), rows of each source.
    """
    total, drifts = counts.sum(), np.zeros(len(counts))
    for source in range(len(counts)):
        largest = np.int64(0)
        for row in range(counts[source]):
            # Both products may wrap; their difference, which is small, is exact all the same.
            before = row * total - rank_row(counts, source, row) * counts[source]
            largest = max(largest, -before, before + total - counts[source])
        drifts[source] = largest / max(1, total)
    return drifts
