"""The report's sections about tokens: fit of the tokenizer, the mixture, the cost of
packing.

The terminal shows the same tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import attrgetter

from gristmill.flows.pages.page_elements import (
    Figure,
    Heading,
    MaybeSection,
    Note,
    Part,
    Table,
    section_of,
    table,
)
from gristmill.flows.pages.pictures import stacked_bars
from gristmill.flows.report.facts import Facts
from gristmill.flows.report.stage_summaries import (
    LearntTokenizer,
    Packed,
    Tokenized,
)
from gristmill.flows.stages.registry import TOKENIZER
from gristmill.tokenize.encoding.token_report import GroupTokens
from gristmill.tokenize.packing.packing_cost import PackingCost

MOST_LANGUAGES = 20
FAST_ENCODER = "gigatoken"
"""Value of `encoder` in a summary if the library encoded no document."""
MIXTURE_MEANINGS = {
    "share": "of the training tokens of the mixture",
    "tokens": "in the rows of the mixture",
}
GROUP_COLUMNS = {
    "documents": ",",
    "MB": ".2f",
    "tokens": ",",
    "bytes/token": ".2f",
    "characters/token": ".2f",
    "tokens/word": ".2f",
}


@dataclass(frozen=True)
class MixtureRow:
    """A source of the mixture.

    Attributes:
        source: its name.
        tokens, share: realised.
        requested: share by its weight.
        moved: tokens that limits gave it or took.
        epochs, max_epochs: passes over its documents, and the allowed ones.
    """

    source: str
    tokens: int
    share: float
    requested: float
    moved: int
    epochs: float
    max_epochs: float


@dataclass(frozen=True)
class Waste:
    """Shares of a packing.

    Attributes:
        split: of documents that a row's end cuts.
        in_split: of tokens that belong to them.
        padding: of all rows without a token of a document.
    """

    split: float
    in_split: float
    padding: float


def tokenizer_section(facts: Facts, name: str = "tokenize") -> MaybeSection:
    """Bytes per token and tokens per word of each source and language."""
    summary = facts.summary(name, Tokenized)
    learnt = facts.summary(TOKENIZER, LearntTokenizer)
    columns, rows = {"source": "", **GROUP_COLUMNS}, group_rows(summary.sources)
    if learnt.bytes_per_token:
        columns["of unseen text"] = ".2f"
        rows = [[*row, learnt.bytes_per_token.get(str(row[0]))] for row in rows]
    languages = group_rows(summary.languages or {})
    left_out = (
        f"The {MOST_LANGUAGES} languages with most tokens of {len(languages)}; all are "
        "in the stage's report.json."
    )
    return section_of(
        "Tokenizer",
        encoder_note(summary.encoder),
        "Over all documents that are left, those too that the vocabulary was learnt "
        "from.",
        table(columns, rows),
        table({"language": "", **GROUP_COLUMNS}, languages[:MOST_LANGUAGES]),
        left_out if len(languages) > MOST_LANGUAGES else None,
    )


def encoder_note(encoder: str) -> str | None:
    """A sentence about the encoder if it was the library."""
    return None if encoder in ("", FAST_ENCODER) else f"Encoded by {encoder}."


def group_rows(groups: Mapping[str, GroupTokens]) -> list[Sequence[object]]:
    """A row per group: its name, then the columns of GROUP_COLUMNS; groups with most
    tokens first.
    """
    ordered = sorted(groups.items(), key=lambda item: (-item[1].tokens, item[0]))
    numbers = attrgetter(
        "tokens", "bytes_per_token", "characters_per_token", "tokens_per_word"
    )
    return [
        [name, group.documents, group.bytes / 1e6, *numbers(group)]
        for name, group in ordered
    ]


def mixture_section(facts: Facts, name: str = "mix") -> MaybeSection:
    """Requested and packed shares, source by source, and the cost of packing."""
    if facts.packed is None:
        return None
    size = facts.packed.tokenizer.vocab_size
    rows = mixture_rows(facts)
    bars = [
        ("requested", {row.source: row.requested for row in rows}),
        ("packed", {row.source: row.share for row in rows}),
    ]
    picture = stacked_bars(bars, "share of tokens")
    return section_of(
        "Mixture",
        f"Vocabulary of {size:,}. Rows of {facts.packed.sequence_length} tokens.",
        Figure(picture, "Shares of tokens, requested and realised."),
        mixture_tables(facts, 3),
        mixture_notes(facts),
        packing(facts),
    )


def packing(facts: Facts) -> list[Part]:
    """Documents that the packing cuts, and its padding."""
    if facts.packed is None or facts.packed.packing_cost is None:
        return []
    waste = waste_of(facts.packed.packing_cost)
    note = (
        "The share of documents that a row's end cuts, and of the rows that is "
        f"padding; {waste.in_split:.3%} of the tokens belong to cut documents."
    )
    return [Heading("Packing"), Note(note), packing_table(facts, 3)]


def mixture_rows(facts: Facts) -> list[MixtureRow]:
    """A row per source of the packed set; none before it is packed."""
    packed = facts.packed or Packed()
    return [
        MixtureRow(
            name,
            packed.realised[name].tokens,
            packed.realised[name].share,
            packed.requested[name].share,
            packed.redistributed.get(name, 0),
            packed.realised[name].epochs,
            packed.requested[name].max_epochs,
        )
        for name in packed.sources
    ]


def mixture_tables(facts: Facts, digits: int = 2) -> list[Table]:
    """Tokens and shares of every source, with moved tokens if there are any; and of
    every source in every phase, if there are several.
    """
    rows = mixture_rows(facts)
    share = f".{digits}%"
    shares = {"tokens": ",", "share": share, "requested": share}
    moved = {"moved": "+,"} if any(row.moved for row in rows) else {}
    columns = {"source": "", **shares, **moved, "epochs": ".2f", "at most": "g"}
    cells = [
        [
            *astuple(row)[:4],
            *([row.moved or None] if moved else []),
            row.epochs,
            row.max_epochs,
        ]
        for row in rows
    ]
    tables = [table(columns, cells, MIXTURE_MEANINGS)]
    phases = (facts.packed or Packed()).shares
    lines: list[Sequence[object]] = []
    begin = 0.0
    for phase in phases:
        part = f"{begin:.0%} to {phase.until:.0%}"
        for name, requested in phase.requested.items():
            realised = phase.realised[name]
            if requested or realised:
                tokens = round(realised * phase.tokens)
                lines.append([part, name, tokens, realised, requested])
                part = ""
        begin = phase.until
    if len(phases) > 1:
        tables.append(
            table({"part": "", "source": "", **shares}, lines, MIXTURE_MEANINGS)
        )
    return tables


def mixture_notes(facts: Facts) -> list[str]:
    """Repeats of documents by source; empty without any."""
    repeats = [
        f"{name}: epochs {requested.epochs}"
        for name, requested in (facts.packed or Packed()).requested.items()
        if requested.epochs
    ]
    return ["; ".join(repeats)] if repeats else []


def packing_table(facts: Facts, digits: int = 2) -> Table:
    """Rows of the packing and its waste; empty before the set is packed."""
    share = f".{digits}%"
    columns = {"packing": "", "rows": ",", "cut documents": share, "padding": share}
    rows = []
    if facts.packed is not None and facts.packed.packing_cost is not None:
        waste = waste_of(facts.packed.packing_cost)
        cost_rows = facts.packed.packing_cost.rows
        rows.append([facts.packed.packing, cost_rows, waste.split, waste.padding])
    return table(columns, rows)


def waste_of(cost: PackingCost) -> Waste:
    """Shares that a packing cuts and pads."""
    return Waste(
        cost.split_documents / max(cost.documents, 1),
        cost.split_tokens / max(cost.tokens, 1),
        cost.padding_tokens / max(cost.tokens + cost.padding_tokens, 1),
    )
