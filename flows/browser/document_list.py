"""The list of documents: those that meet a search, some on each page, read from the
shards that hold them.

Measured values are read shard by shard until a page is full, and texts of the listed
documents alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, get_args

import numpy as np

from gristmill.dataprep.conservation import ranked
from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.document_numbers import count_rows
from gristmill.dataprep.documents import QUARANTINE_REASON, column_names
from gristmill.dataprep.row_groups import read_document_rows
from gristmill.dataprep.where_sql import columns_in, evaluate
from gristmill.dataprep.words.snippets import snippet
from gristmill.flows.browser.browsed_run import BrowsedRun
from gristmill.flows.pages.addresses import (
    DOCUMENTS,
    Outcome,
    Search,
    address,
)
from gristmill.flows.pages.document_elements import (
    document_entry,
    listing_of,
    verdict,
)
from gristmill.flows.pages.page_elements import (
    ByName,
    Choice,
    Entry,
    Field,
    Form,
    Inline,
    Link,
    Links,
    Note,
    Page,
    Span,
    page_of,
    value_text,
)
from gristmill.mixtures.schema.sources import INGEST
from gristmill.tokenize.importing.token_sources import decoded_text

ON_PAGE = 25
MOST_COUNTED = 1_000_000
"""Documents of the largest corpus whose matches are counted."""
OUTCOMES: dict[Outcome, str] = {
    "kept": "kept",
    "dropped": f"NOT kept AND coalesce(reason, '') <> '{QUARANTINE_REASON}'",
    "quarantined": f"reason = '{QUARANTINE_REASON}'",
}
JUDGED = ("source", "kept", "dropped_by", "reason")


@dataclass(frozen=True)
class Hit:
    """A document that matches: its place, and the columns that were read of it."""

    shard: str
    row: int
    judged: ByName[Any]


def documents_page(run: BrowsedRun, query: Search) -> Page:
    """The documents that meet a search, from a place on."""
    corpus = run.columns(query.corpus)
    condition = condition_of(query)
    hits, after = search(corpus, condition, query.after or "0-0")
    total = run.cached(
        ("documents", query.corpus),
        lambda: sum(
            count_rows([corpus.inputs[INGEST] / shard for shard in corpus.shards])
        ),
    )
    count = f"of {total:,} documents"
    if total <= MOST_COUNTED:
        matching = run.cached(
            ("count", query.corpus, condition),
            lambda: corpus.count_rows(kept=None, where=condition or None),
        )
        count = f"{matching:,} {count}"
    entries: list[Entry] = []
    for shard, hits_of_shard in groupby(hits, key=lambda hit: hit.shard):
        entries += _entries(corpus.inputs, shard, list(hits_of_shard))
    links: list[Inline] = (
        [Link("← the first ones", query.link())] if query.after else []
    )
    links += [Link("next →", query.link(after), rel="next")] if after else []
    return page_of(
        "Documents" if query.corpus == DOCUMENTS else f"Examples of {query.corpus}",
        _form(run, corpus, query, total),
        Note(count),
        listing_of(entries, "None of them fits."),
        Links(links),
    )


def condition_of(query: Search) -> str:
    """SQL condition of a search; empty if all documents meet it."""
    values = {
        "source": query.source,
        "language": query.language,
        "dropped_by": query.step,
        "reason": query.reason,
    }
    conditions = [OUTCOMES[query.outcome]] if query.outcome else []
    for name, value in values.items():
        if value is not None:
            literal = value.replace("'", "''")
            conditions.append(f"{name} = '{literal}'")
    conditions += [query.where] if query.where else []
    return " AND ".join(f"({condition})" for condition in conditions)


def search(corpus: Corpus, condition: str, after: str) -> tuple[list[Hit], str | None]:
    """Matching documents in the order of the corpus, as many as a page shows, and the
    place where the search continues, None at its end. A missing value matches nothing.
    """
    columns = list(JUDGED)
    if condition:
        named = columns_in(condition, corpus.schema.names)
        columns = list(dict.fromkeys([*columns, *named]))
    hits: list[Hit] = []
    first_shard, first_row = map(int, after.split("-"))
    for number, shard in list(enumerate(corpus.shards))[first_shard:]:
        table = corpus.read(shard, columns, kept=None)
        rows = np.arange(len(table))
        if condition and len(table):
            is_valid, is_hit = evaluate(condition, "BOOLEAN", table)
            rows = rows[is_valid & np.where(is_valid, is_hit, False).astype(bool)]
        rows = rows[rows >= (first_row if number == first_shard else 0)]
        for row in rows.tolist():
            if len(hits) == ON_PAGE:
                return hits, f"{number}-{row}"
            hits.append(Hit(shard, row, table.slice(row, 1).to_pylist()[0]))
    return hits, None


def _entries(inputs: ByName[Path], shard: str, hits: Sequence[Hit]) -> list[Entry]:
    """Entries of the list for some documents of a shard."""
    rows = [hit.row for hit in hits]
    stored = column_names(inputs[INGEST] / shard)
    columns = [name for name in ("id", "locator", "text") if name in stored]
    documents = read_document_rows(inputs, shard, rows, columns).to_pylist()
    entries = []
    for hit, document in zip(hits, documents, strict=True):
        text = document.get("text")
        if text is None:
            text = decoded_text(inputs, shard, hit.row)
        judged = {name: value for name, value in hit.judged.items() if name != "text"}
        source, kept, step, reason = (judged.pop(name) for name in JUDGED)
        details = [f"{name} {value_text(value)}" for name, value in judged.items()]
        size = f"{len(text):,} characters"
        entries.append(
            document_entry(
                document["id"].hex(),
                document["locator"],
                [verdict(kept, step, reason), source, size, *details],
                [Span(snippet(text, []))],
            )
        )
    return entries


def _form(run: BrowsedRun, corpus: Corpus, query: Search, total: int) -> Form:
    hint = "SQL over columns, such as language_score < 0.8 AND kept"
    choices = run.cached(
        ("form", query.corpus), lambda: _choices(run, corpus, query.corpus)
    )
    values = {
        name: str(value)
        for name, value in query.model_dump(exclude_defaults=True).items()
        if name != "after"
    }
    fields: list[Field | Choice] = [
        *choices,
        Field("where", "where", placeholder=hint, most=2000, is_wide=True),
    ]
    is_filtered = bool(values.keys() - {"corpus"})
    everything = Link(f"all {total:,}", address(DOCUMENTS, corpus=query.corpus))
    return Form(
        address(DOCUMENTS),
        [replace(field, value=values.pop(field.name, "")) for field in fields],
        "Search",
        values,  # a value that a link brought and the form does not offer
        "filters",
        after=everything if is_filtered else "",
    )


def _choices(run: BrowsedRun, corpus: Corpus, name: str) -> list[Choice]:
    """Lists of the form that have a value to offer."""
    reasons: dict[str, list[str]] = {}
    languages: dict[str, int] = {}
    sources: set[str] = set()
    for stage in corpus.inputs if name == DOCUMENTS else ():
        summary = run.step(stage)
        sources |= set(summary.counts.sources)
        causes = [*summary.counts.dropped]
        causes += [QUARANTINE_REASON] if summary.counts.quarantined else []
        if causes and stage != INGEST:
            reasons[stage] = sorted(causes)
        languages |= summary.languages
    choices = [
        Choice("source", "source", {"": sorted(sources)}),
        Choice("language", "language", {"": [name for name, _ in ranked(languages)]}),
        Choice("outcome", "outcome", {"": get_args(Outcome)}),
        Choice("step", "dropped by", {"": list(reasons)}),
        Choice("reason", "reason", reasons),
    ]
    return [choice for choice in choices if any(choice.groups.values())]
