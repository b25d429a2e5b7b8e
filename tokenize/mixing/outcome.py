"""What a mixture was asked for and what came of it: per source, per stage, with what its limits moved."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from gristmill.dataprep.counts import check_conservation
from gristmill.mixtures.mix import Mix
from gristmill.tokenize.mixing.accounts import compare
from gristmill.tokenize.mixing.candidates import Candidates, count
from gristmill.tokenize.mixing.laying import Laid, packing_of
from gristmill.tokenize.mixing.prefixes import describe_prefixes
from gristmill.tokenize.mixing.quotas import Quotas

LIMITS = ("max_epochs", "min_tokens", "max_tokens", "where", "epochs")
"""Keys of a source that the summary repeats beside its share."""


def describe(
    candidates: Candidates, sources: Mapping[str, Mapping[str, Any]], quotas: Quotas, train: Mapping[str, Laid],
    held_out: Mapping[str, Laid], validation: Sequence[Mapping[str, Any]], section: Mix, used: np.ndarray,
    emptied: Mapping[str, np.ndarray],
) -> dict[str, Any]:
    """The summary: the ledger, per source what was asked for and what came of it, and what packings would cost.

    `used` and `emptied` are as in `candidates.count`.

    Returns:
        `counts`; `rows`, `tokens` (of documents), `padding_tokens`, `packing` and `packings`; per source `requested`
        and `realised`; `stages`, the shares of each stage, requested and realised; `redistributed`, the tokens that
        the limits gave a source or took from it, where they did; `prefixes`, how far any beginning of the training
        order is from the mixture (`prefixes.describe_prefixes`); `validation`.
    """
    counts = count(candidates, used, list(sources), emptied)
    check_conservation(counts, "mix")
    total, packing = sum(laid.tokens for laid in train.values()), packing_of(section)
    costs = {name: compare(laid.stream, laid.end, packing, laid.layout) for name, laid in train.items()}
    realised = {name: {**costs[name][packing.name], **_realised(laid, total)} for name, laid in train.items()}
    return {
        "counts": counts, "rows": sum(laid.rows for laid in train.values()), "tokens": total,
        "padding_tokens": sum(part["padding_tokens"] for part in realised.values()), "packing": packing.name,
        "packings": _packings(costs.values()),
        "requested": _requested(sources, quotas, section.sequence_length), "realised": realised,
        "stages": _stages(list(sources), quotas, train, section),
        "redistributed": redistributed(list(sources), quotas, section.sequence_length),
        "prefixes": describe_prefixes(list(sources), list(zip(*(laid.rows_per_stage for laid in train.values()),
                                                              strict=True))),
        "validation": {name: {**written, "documents": len(laid.stream.document),
                              "tokens": written["rows"] * section.sequence_length,
                              "cut_tokens": laid.pass_tokens - laid.tokens}
                       for (name, laid), written in zip(held_out.items(), validation, strict=True)},
    }


def used_documents(candidates: Candidates, train: Mapping[str, Laid], held_out: Mapping[str, Laid]) -> np.ndarray:
    """Which documents are in a row: bool of shape (n,)."""
    used = np.zeros(len(candidates.source), dtype=bool)
    for laid in (*train.values(), *held_out.values()):
        used[laid.stream.document] = True
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
    return f"limits of sources are met, so tokens were redistributed (mix.short): {taken}; {given}"


def _requested(sources: Mapping[str, Mapping[str, Any]], quotas: Quotas, length: int) -> dict[str, dict[str, Any]]:
    total, asked = sum(quotas.per_source()), quotas.asked_per_source()
    return {name: {"share": float(rows / total), "tokens": float(rows * length),
                   **{key: source[key] for key in LIMITS if source[key] is not None}}
            for (name, source), rows in zip(sources.items(), asked, strict=True)}


def _stages(
    sources: Sequence[str], quotas: Quotas, train: Mapping[str, Laid], section: Mix
) -> list[dict[str, Any]]:
    ends = [stage.until for stage in section.stages] or [None]
    tokens = list(zip(*(laid.tokens_per_stage() for laid in train.values()), strict=True))
    rows = list(zip(*(laid.rows_per_stage for laid in train.values()), strict=True))
    return [{"until": 1.0 if end is None else end, "rows": sum(rows[number]), "tokens": sum(tokens[number]),
             "rows_per_source": list(rows[number]),
             "requested": _shares(sources, quotas.asked[number]), "realised": _shares(sources, tokens[number])}
            for number, end in enumerate(ends)]  # fmt: skip


def _shares(sources: Sequence[str], parts: Sequence[Fraction] | Sequence[int]) -> dict[str, float]:
    exact = [Fraction(part) for part in parts]
    return {name: float(part / sum(exact)) for name, part in zip(sources, exact, strict=True)}


def _packings(costs: Iterable[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """What every packing makes of the same tokens of documents, over all sources (see `accounts.compare`)."""
    total: dict[str, dict[str, Any]] = {}
    for source in costs:
        for name, account in source.items():
            sums = total.setdefault(name, dict.fromkeys(account, 0))
            total[name] = {key: sums[key] + value for key, value in account.items()}
    return total


def _realised(laid: Laid, total_tokens: int) -> dict[str, Any]:
    """What a source gave, besides what its packing costs; `cut_tokens` are the rest of its last document."""
    documents = laid.stream.document
    return {
        "share": laid.tokens / total_tokens, "available_tokens": laid.pass_tokens,
        "documents": int(np.count_nonzero(np.bincount(documents))), "copies": len(documents),
        "epochs": round(laid.end / laid.pass_tokens, 4) if laid.pass_tokens else 0.0,
        "cut_tokens": laid.stream.tokens - laid.end,
    }
