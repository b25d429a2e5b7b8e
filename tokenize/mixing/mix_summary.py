"""What a mixture was asked for and what came of it: shares, what limits moved, what packings cost, how even it is.

A packing costs the rows that it makes, what it pads and drops, and the documents that it cuts. The bound is how far any
prefix of the training order is from the mixture (`order.py` states it): which source is at which place is the same in
every epoch and for every seed, so it is known when the rows are planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gristmill.dataprep.counts import check_conservation
from gristmill.dataprep.text.kernels import kernel
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.best_fit import count_bins
from gristmill.tokenize.mixing.candidates import Candidates, count
from gristmill.tokenize.mixing.packing import Layout, PackedSource, Packing, TokenStream, lay_out, packing_of
from gristmill.tokenize.mixing.quotas import Quotas
from gristmill.tokenize.order_kernels import rank_row

LIMITS = ("max_epochs", "min_tokens", "max_tokens", "where", "epochs")
"""Keys of a source that the summary repeats beside its share."""


def describe(
    candidates: Candidates, sources: Mapping[str, Mapping[str, Any]], quotas: Quotas, train: Mapping[str, PackedSource],
    held_out: Mapping[str, PackedSource], validation: Sequence[Mapping[str, Any]], section: Mix, used: np.ndarray,
    emptied: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """The summary: the ledger, per source what was asked for and what came of it, and what packings would cost.

    `used` and `emptied` are as in `candidates.count`.

    Returns:
        `counts`; `rows`, `tokens` (of documents), `padding_tokens`, `packing` and `packings`; per source `requested`
        and `realised`; `stages`, the shares of each phase, requested and realised; `redistributed`, the tokens that
        the limits gave a source or took from it, where they did; `prefixes`, how far any beginning of the training
        order is from the mixture (`describe_prefixes`); `validation`.
    """
    counts = count(candidates, used, list(sources), emptied)
    check_conservation(counts, "mix")
    total, packing = sum(packed.tokens for packed in train.values()), packing_of(section)
    costs = {name: compare(packed.stream, packed.end, packing, packed.layout) for name, packed in train.items()}
    realised = {name: {**costs[name][packing.name], **_realised(packed, total)} for name, packed in train.items()}
    return {
        "counts": counts, "rows": sum(packed.rows for packed in train.values()), "tokens": total,
        "padding_tokens": sum(part["padding_tokens"] for part in realised.values()), "packing": packing.name,
        "packings": _packings(costs.values()),
        "requested": _requested(sources, quotas, section.sequence_length), "realised": realised,
        "stages": _phases(list(sources), quotas, train, section),
        "redistributed": redistributed(list(sources), quotas, section.sequence_length),
        "prefixes": describe_prefixes(list(sources), list(zip(*(packed.rows_per_phase for packed in train.values()),
                                                              strict=True))),
        "validation": {name: {**written, "documents": len(packed.stream.document),
                              "tokens": written["rows"] * section.sequence_length,
                              "cut_tokens": packed.pass_tokens - packed.tokens}
                       for (name, packed), written in zip(held_out.items(), validation, strict=True)},
    }


def used_documents(
    candidates: Candidates, train: Mapping[str, PackedSource], held_out: Mapping[str, PackedSource]
) -> np.ndarray:
    """Which documents are in a row: bool of shape (n,)."""
    used = np.zeros(len(candidates.source), dtype=bool)
    for packed in (*train.values(), *held_out.values()):
        used[packed.stream.document] = True
    return used


def redistributed(sources: Sequence[str], quotas: Quotas, length: int) -> dict[str, int]:
    """Tokens that each source has more (or less: negative) than its weight asks for; none if no limit was met."""
    asked = quotas.asked_per_source()
    moved = {name: (rows - share) * length
             for name, rows, share in zip(sources, quotas.per_source(), asked, strict=True)}
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
    return {name: {"share": float(rows / total), "tokens": float(rows * length),
                   **{key: source[key] for key in LIMITS if source[key] is not None}}
            for (name, source), rows in zip(sources.items(), asked, strict=True)}


def _phases(
    sources: Sequence[str], quotas: Quotas, train: Mapping[str, PackedSource], section: Mix
) -> list[dict[str, Any]]:
    ends = [phase.end for phase in section.phases] or [None]
    tokens = list(zip(*(packed.tokens_per_phase() for packed in train.values()), strict=True))
    rows = list(zip(*(packed.rows_per_phase for packed in train.values()), strict=True))
    return [{"until": 1.0 if end is None else end, "rows": sum(rows[number]), "tokens": sum(tokens[number]),
             "rows_per_source": list(rows[number]),
             "requested": _shares(sources, quotas.asked[number]), "realised": _shares(sources, tokens[number])}
            for number, end in enumerate(ends)]  # fmt: skip


def _shares(sources: Sequence[str], parts: Sequence[Fraction] | Sequence[int]) -> dict[str, float]:
    exact = [Fraction(part) for part in parts]
    return {name: float(part / sum(exact)) for name, part in zip(sources, exact, strict=True)}


def _packings(costs: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What every packing makes of the same tokens of documents, over all sources (see `compare`)."""
    total: dict[str, dict[str, Any]] = {}
    for source in costs:
        for name, account in source.items():
            sums = total.setdefault(name, dict.fromkeys(account, 0))
            total[name] = {key: sums[key] + value for key, value in account.items()}
    return total


def _realised(packed: PackedSource, total_tokens: int) -> dict[str, Any]:
    """What a source gave, besides what its packing costs; `cut_tokens` are the rest of its last document."""
    documents = packed.stream.document
    return {
        "share": packed.tokens / total_tokens, "available_tokens": packed.pass_tokens,
        "documents": int(np.count_nonzero(np.bincount(documents))), "copies": len(documents),
        "epochs": round(packed.end / packed.pass_tokens, 4) if packed.pass_tokens else 0.0,
        "cut_tokens": packed.stream.tokens - packed.end,
    }


def account(stream: TokenStream, begin: int, end: int, layout: Layout, packing: Packing) -> dict[str, Any]:
    """What a packing of the tokens [begin, end) of a stream costs.

    Returns:
        `rows`, `tokens` (of documents), `padding_tokens`, `dropped_tokens` (of [begin, end), in no row), `documents`,
        and `split_documents` and `split_tokens`: those that a row's end cuts, and their tokens in [begin, end).
    """
    cut, cut_tokens = cut_documents(stream.starts, np.sort(layout.at + layout.length), begin, end)
    return _described(stream, begin, end, packing, layout.rows, layout.tokens, cut, cut_tokens)


@kernel
def cut_documents(starts: np.ndarray, ends: np.ndarray, begin: int, end: int) -> tuple[int, int]:
    """How many documents some run ends within, and how many tokens they have in [begin, end).

    Args:
        starts: int64 of shape (k + 1,), see `TokenStream`.
        ends: int64 of shape (runs,), where runs end, ascending.
        begin, end: what of the stream is looked at.
    """
    entry, last, documents, tokens = 0, -1, 0, 0
    for place in ends:
        while entry < len(starts) - 1 and starts[entry + 1] <= place:
            entry += 1
        if starts[entry] < place and entry != last:
            documents += 1
            tokens += min(starts[entry + 1], end) - max(starts[entry], begin)
            last = entry
    return documents, tokens


def compare(stream: TokenStream, end: int, used: Packing, layout: Layout) -> dict[str, dict[str, Any]]:
    """`account` of every packing there is, by its name, for the same tokens [0, end) of a stream.

    Args:
        stream: the documents.
        end: up to where.
        used: the packing that was chosen; the others have its sequence length, and go through the stream at one go.
        layout: what came of it.
    """
    accounts = {}
    for best_fit in (False, True):
        for aligned in (False, True):
            packing = Packing(used.sequence_length, best_fit, aligned)
            if packing == used:
                accounts[packing.name] = account(stream, 0, end, layout, packing)
            elif best_fit:
                # Where each document goes is not asked for.
                counted = count_best_fit(stream.starts, end, packing.sequence_length, aligned)
                accounts[packing.name] = _described(stream, 0, end, packing, *counted)
            else:
                accounts[packing.name] = account(stream, 0, end, lay_out(stream, 0, end, packing), packing)
    return accounts


def _described(
    stream: TokenStream, begin: int, end: int, packing: Packing, rows: int, tokens: int, cut: int, cut_tokens: int
) -> dict[str, Any]:
    first = int(np.searchsorted(stream.starts, begin, side="right"))
    last = int(np.searchsorted(stream.starts, end, side="left"))
    return {
        "rows": rows, "tokens": tokens, "padding_tokens": rows * packing.sequence_length - tokens,
        "dropped_tokens": end - begin - tokens, "documents": max(0, last - first + 1) if end > begin else 0,
        "split_documents": cut, "split_tokens": cut_tokens,
    }


@kernel
def count_best_fit(starts: np.ndarray, end: int, length: int, aligned: bool) -> tuple[int, int, int, int]:
    """What the best fit makes of the tokens [0, end) of a stream, without laying it out.

    Args:
        starts: int64 of shape (k + 1,), see `TokenStream`.
        end: up to where.
        length: tokens per row.
        aligned: whether only the first `length` tokens of each document are taken.

    Returns:
        rows, tokens in them, and how many documents are cut, with their tokens in [0, end).
    """
    rests = np.zeros(length + 1, dtype=np.int64)
    rows, tokens, cut, cut_tokens = 0, 0, 0, 0
    for entry in range(len(starts) - 1):
        start, stop = starts[entry], starts[entry + 1]
        if start >= end:
            break
        size = min(stop, end) - start
        if min(start + length, end) < stop:
            cut += 1
            cut_tokens += size
        if aligned:
            size = min(size, length)
        rows += size // length
        rests[size % length] += 1
        tokens += size
    return rows + count_bins(rests, length), tokens, cut, cut_tokens


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
    return {name: {"largest_drift_rows": round(drift, 4), "bound_rows": round(bound, 4)}
            for name, drift, bound in zip(sources, drifts.tolist(), bounds.tolist(), strict=True)}


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
