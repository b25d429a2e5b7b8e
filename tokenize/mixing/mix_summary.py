"""Summary of a mixture: requested and realised shares, redistribution, and the cost of
its packing: rows, padding and cut documents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np

from gristmill.dataprep.conservation import Counts, check_conservation
from gristmill.mixtures.schema.mix import Mix
from gristmill.mixtures.schema.sources import MixedSource
from gristmill.tokenize.mixing.quotas import Quotas
from gristmill.tokenize.packed_files import ShardEntry
from gristmill.tokenize.packing.packing_cost import PackingCost

if TYPE_CHECKING:
    from gristmill.tokenize.packing.row_layout import Layout
    from gristmill.tokenize.packing.write_shards import WrittenShard

LIMITS = {"max_epochs", "where", "epochs"}
"""Settings of a source that the summary repeats beside its share."""


@dataclass(frozen=True)
class RealisedSource(PackingCost):
    """Rows of a source.

    Attributes:
        share: of the tokens of the set.
        available_tokens: of one pass over its training documents, with ends of text and
            repeats.
        copies: entries of its stream that were taken: a document counts once for each
            copy.
        epochs: passes over its documents.
        cut_tokens: unused tokens of its last document.
    """

    share: float
    available_tokens: int
    copies: int
    epochs: float
    cut_tokens: int


@dataclass(frozen=True)
class MixedPhase:
    """Phase of a mixture.

    Attributes:
        until: its end, as a share of the rows.
        rows: of the phase.
        tokens: of documents.
        rows_per_source: in the order of the sources.
        requested, realised: share of each source.
    """

    until: float
    rows: int
    tokens: int
    rows_per_source: Sequence[int]
    requested: Mapping[str, float]
    realised: Mapping[str, float]


class HeldOutEntry(ShardEntry):
    """Held-out rows of a source in packed.json."""

    bytes: int
    """Size of their text."""
    documents: int
    tokens: int
    cut_tokens: int
    """Tokens of held-out documents that are in no row."""


@dataclass(frozen=True)
class MixSummary:
    """Summary of a mixture; everything but the counts is in packed.json, too.

    Attributes:
        counts: of the ledger.
        rows: of the training set.
        tokens: of documents in them.
        padding_tokens: in them.
        packing: name of the packing in use.
        packing_cost: of all sources.
        requested: by source, `share` and `tokens`, and those of LIMITS that are set.
        realised: by source.
        stages: by phase.
        redistributed: tokens that limits gave to or took from a source.
        validation: by source.
        withheld_rows: rows that were emptied.
    """

    counts: Counts
    rows: int
    tokens: int
    padding_tokens: int
    packing: str
    packing_cost: PackingCost
    requested: Mapping[str, Mapping[str, float | str]]
    realised: Mapping[str, RealisedSource]
    stages: Sequence[MixedPhase]
    redistributed: Mapping[str, int]
    validation: Mapping[str, HeldOutEntry]
    withheld_rows: int


def describe(
    sources: Mapping[str, MixedSource],
    quotas: Quotas,
    section: Mix,
    counts: Counts,
    laid_out: Mapping[str, int],
    stream_tokens: Sequence[int],
    layouts: Sequence[Layout],
    validation: Sequence[WrittenShard],
    withheld_rows: int,
) -> MixSummary:
    """Summarize the ledger, the requested and realised shares, and the cost of the
    packing.

    Args:
        sources, quotas, section: of the mixture.
        counts: the ledger's.
        laid_out: documents of each source in training rows.
        stream_tokens: of one pass over each stream, with ends of text and repeats: the
            training streams of all sources, then their held-out streams.
        layouts: of the same streams.
        validation: held-out shard of each source.
        withheld_rows: number of emptied training rows.
    """
    check_conservation(counts, "mix")
    names = list(sources)
    length = section.sequence_length
    train = layouts[: len(names)]
    tokens = sum(layout.end for layout in train)
    realised = {
        name: RealisedSource(
            **(asdict(layout.cost) | {"documents": laid_out[name]}),
            share=layout.end / tokens,
            available_tokens=pass_tokens,
            copies=layout.documents,
            epochs=round(layout.end / pass_tokens, 4) if pass_tokens else 0.0,
            cut_tokens=layout.tokens - layout.end,
        )
        for name, layout, pass_tokens in zip(names, train, stream_tokens, strict=False)
    }
    total = sum(quotas.per_source())
    requested_rows = dict(zip(names, quotas.requested_per_source(), strict=True))
    held_out = zip(
        names,
        layouts[len(names) :],
        validation,
        stream_tokens[len(names) :],
        strict=True,
    )
    return MixSummary(
        counts=counts,
        rows=sum(layout.rows for layout in train),
        tokens=tokens,
        padding_tokens=sum(part.padding_tokens for part in realised.values()),
        packing=section.packing,
        packing_cost=PackingCost(
            *np.sum([astuple(layout.cost) for layout in train], 0).tolist()
        ),
        requested={
            name: {
                "share": float(rows / total),
                "tokens": float(rows * length),
                **sources[name].model_dump(include=LIMITS, exclude_none=True),
            }
            for name, rows in requested_rows.items()
        },
        realised=realised,
        stages=_phases(names, quotas, train, section),
        redistributed=redistributed(names, quotas, length),
        validation={
            name: {
                **shard.entry,
                "bytes": shard.text_bytes,
                "documents": layout.documents,
                "tokens": shard.entry["rows"] * length,
                "cut_tokens": held_out_tokens - layout.end,
            }
            for name, layout, shard, held_out_tokens in held_out
        },
        withheld_rows=withheld_rows,
    )


def redistributed(
    sources: Sequence[str], quotas: Quotas, length: int
) -> dict[str, int]:
    """Tokens of each source above (below: negative) its weight's request; empty if no
    limit was met.
    """
    moved = [
        (rows - share) * length
        for rows, share in zip(
            quotas.per_source(), quotas.requested_per_source(), strict=True
        )
    ]
    # Rounding to whole rows moves less than a row.
    if all(abs(tokens) < length for tokens in moved):
        return {}
    return {
        name: round(tokens)
        for name, tokens in zip(sources, moved, strict=True)
        if tokens
    }


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


def _phases(
    sources: Sequence[str],
    quotas: Quotas,
    layouts: Sequence[Layout],
    section: Mix,
) -> list[MixedPhase]:
    ends: list[float | None] = [phase.end for phase in section.phases] or [None]
    rows_of_phases = zip(*(layout.rows_per_phase for layout in layouts), strict=True)
    tokens_of_phases = zip(
        *(layout.tokens_per_phase for layout in layouts), strict=True
    )
    return [
        MixedPhase(
            until=1.0 if end is None else end,
            rows=sum(rows),
            tokens=sum(tokens),
            rows_per_source=list(rows),
            requested=_shares(sources, requested),
            realised=_shares(sources, list(map(Fraction, tokens))),
        )
        for end, rows, tokens, requested in zip(
            ends, rows_of_phases, tokens_of_phases, quotas.requested, strict=True
        )
    ]


def _shares(sources: Sequence[str], parts: Sequence[Fraction]) -> dict[str, float]:
    total = sum(parts)
    return {
        name: float(part / total) for name, part in zip(sources, parts, strict=True)
    }
