"""The list of documents: those that meet a search, some on each page, read from the
shards that hold them.

Measured values are read of one shard after another until a page is full; texts are read
of the documents that are shown, and of as many as SCANNED_BYTES hold in a search for
words: then the page says how far it has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.documents import QUARANTINE_REASON, column_names, open_table
from gristmill.dataprep.row_groups import read_document_rows
from gristmill.dataprep.where_sql import columns_in, evaluate
from gristmill.dataprep.words.snippets import snippet
from gristmill.flows.browse.addresses import (
    DOCUMENTS,
    OUTCOMES,
    BadAddressError,
    Search,
    address,
    corpus_parameter,
)
from gristmill.flows.browse.browse_elements import (
    document_note,
    highlighted,
    listing_of,
    value_text,
    verdict,
)
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.pages.page_elements import (
    Button,
    Choice,
    Entry,
    Field,
    Form,
    Inline,
    Link,
    Links,
    Note,
    Page,
    page_of,
)
from gristmill.flows.report.report_facts import ranked
from gristmill.mixtures.sources import INGEST
from gristmill.tokenize.importing.token_sources import decoded_text

ON_PAGE = 25
SCANNED_BYTES = 64 << 20
"""Texts that a search for words reads before a page says how far it has come: about
half a second.
"""
SCANNED_ROWS = 2000
"""Texts that are read at a time."""
MOST_COUNTED = 1_000_000
"""Documents of the largest corpus whose matches are counted."""
JUDGED = ("source", "kept", "dropped_by", "reason")
LANGUAGE = "language"
WORDS = re.compile(r'"([^"]+)"|(\S+)')
"""A text between quotes is searched as it is."""


@dataclass(frozen=True)
class Hit:
    """A document that matches: its place, and the columns that were read of it."""

    shard: str
    row: int
    judged: Mapping[str, Any]


@dataclass
class Scan:
    """The progress of a search.

    Attributes:
        hits: matching documents.
        after: where the search continues; None at its end.
        scanned: documents whose texts were read; None without a search for words.
    """

    hits: list[Hit]
    after: str | None = None
    scanned: int | None = None


def documents_page(run: BrowsedRun, query: Search) -> Page:
    """The documents that meet a search, from a place on."""
    corpus = run.columns(query.corpus)
    columns = _columns(corpus, query)
    scan = search(corpus, query, columns)
    total = run.cached(
        ("documents", query.corpus), lambda: _number_of_documents(corpus)
    )
    following = query.link(scan.after) if scan.after else ""
    first_page = query.model_copy(update={"after": None})
    count: list[Inline] = [f"of {total:,} documents"]
    if query.words is None and total <= MOST_COUNTED:
        matching = run.cached(
            ("count", first_page), lambda: _count(corpus, first_page, columns)
        )
        count.insert(0, f"{matching:,} ")
    elif scan.scanned is not None:
        scanned = f"{scan.scanned:,} documents that were looked through"
        count = [f"{len(scan.hits)} found in {scanned}"]
        count += ["; ", Link("continue the search", following)] if following else []
    entries: list[Entry] = []
    for shard, hits in groupby(scan.hits, key=lambda hit: hit.shard):
        entries += _entries(corpus.inputs, shard, list(hits), query)
    links: list[Inline] = (
        [Link("← the first ones", query.link())] if query.after else []
    )
    links += [Link("next →", following, rel="next")] if following else []
    return page_of(
        "Documents" if query.corpus == DOCUMENTS else f"Examples of {query.corpus}",
        _form(run, corpus, query, total),
        Note(count),
        listing_of(entries, f"None of them fits{' so far' if following else ''}."),
        Links(links),
    )


def _columns(corpus: Corpus, query: Search) -> list[str]:
    """Columns that are read of every document."""
    columns = list(JUDGED)
    columns += [LANGUAGE] if query.language else []
    columns += [query.column] if query.column else []
    columns += (
        columns_in(query.where, corpus.schema.names) if query.where is not None else []
    )
    for name in columns:
        if name not in corpus.schema.names:
            raise BadAddressError(
                f"no step has measured {name!r}; columns are "
                f"{', '.join(corpus.measured) or 'none'}"
            )
    return list(dict.fromkeys(columns))


def search(corpus: Corpus, query: Search, columns: Sequence[str]) -> Scan:
    """Matching documents in the order of the corpus: as many as a page shows, or fewer
    if words are rare.
    """
    scan = Scan([], scanned=None if query.words is None else 0)
    first_shard, first_row = map(int, (query.after or "0-0").split("-"))
    budget = SCANNED_BYTES
    for number, shard in list(enumerate(corpus.shards))[first_shard:]:
        table = corpus.read(shard, columns, kept=None)
        rows = np.flatnonzero(matches(table, query))
        rows = rows[rows >= (first_row if number == first_shard else 0)]
        for begin in range(0, len(rows), SCANNED_ROWS):
            part = rows[begin : begin + SCANNED_ROWS]
            if budget <= 0:
                scan.after = f"{number}-{part[0]}"
                return scan
            if query.words is not None and scan.scanned is not None:
                scan.scanned += len(part)
                part, size = _with_words(corpus, shard, part, query.words)
                budget -= size
            for row in part.tolist():
                if len(scan.hits) == ON_PAGE:
                    scan.after = f"{number}-{row}"
                    return scan
                scan.hits.append(Hit(shard, row, table.slice(row, 1).to_pylist()[0]))
    return scan


def matches(table: pa.Table, query: Search) -> np.ndarray:
    """Documents that match a search apart from its words: (n,) bool; a missing value
    matches no bound.
    """
    mask = np.ones(len(table), bool)
    for condition in _conditions(table, query):
        mask &= (
            pc.fill_null(condition, False).to_numpy(zero_copy_only=False).astype(bool)
        )
    if query.where is not None and len(table):
        known, values = evaluate(query.where, "BOOLEAN", table)
        mask &= known & np.where(known, values, False).astype(bool)
    return mask


def _conditions(table: pa.Table, query: Search) -> Iterator[Any]:
    values = {
        "source": query.source,
        LANGUAGE: query.language,
        "dropped_by": query.step,
        "reason": query.reason,
    }
    for name, value in values.items():
        if value is not None:
            yield pc.equal(table[name].cast(pa.string()), value)
    quarantined = pc.fill_null(
        pc.equal(table["reason"].cast(pa.string()), QUARANTINE_REASON), False
    )
    if query.outcome == "kept":
        yield table["kept"]
    elif query.outcome == "dropped":
        yield pc.and_(pc.invert(table["kept"]), pc.invert(quarantined))
    elif query.outcome == "quarantined":
        yield quarantined
    if query.column is None:
        return
    if not _is_number(table[query.column].type):
        raise BadAddressError(f"{query.column} is not a number; ranges are of numbers")
    yield table[query.column].is_valid()
    if query.least is not None:
        yield pc.greater_equal(table[query.column], query.least)
    if query.most is not None:
        yield pc.less_equal(table[query.column], query.most)


def _is_number(kind: pa.DataType) -> bool:
    return (
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_boolean(kind)
    )


def words_of(text: str) -> list[str]:
    """The words of a search, and the texts between quotes in it."""
    return [quoted or word for quoted, word in WORDS.findall(text)]


def _with_words(
    corpus: Corpus, shard: str, rows: np.ndarray, words: str
) -> tuple[np.ndarray, int]:
    """Rows whose text has all words, in any case; and the bytes that were read."""
    if "text" not in column_names(corpus.inputs[INGEST] / shard):
        raise BadAddressError(
            "these documents have tokens and no text; words cannot "
            "be looked for in them"
        )
    texts = read_document_rows(corpus.inputs, shard, rows.tolist(), ["text"])["text"]
    size = int(pc.sum(pc.binary_length(texts)).as_py() or 0)
    for word in words_of(words):
        hits = np.flatnonzero(
            pc.match_substring(texts, word, ignore_case=True).to_numpy()
        )
        rows, texts = rows[hits], texts.take(pa.array(hits))
    return rows, size


def _count(corpus: Corpus, query: Search, columns: Sequence[str]) -> int:
    return sum(
        int(matches(corpus.read(shard, columns, kept=None), query).sum())
        for shard in corpus.shards
    )


def _number_of_documents(corpus: Corpus) -> int:
    total = 0
    for shard in corpus.shards:
        with open_table(corpus.inputs[INGEST] / shard) as file:
            total += file.metadata.num_rows
    return total


def _entries(
    inputs: Mapping[str, Path], shard: str, hits: Sequence[Hit], query: Search
) -> list[Entry]:
    """Entries of the list for some documents of a shard."""
    words = [] if query.words is None else words_of(query.words)
    rows = [hit.row for hit in hits]
    has_text = "text" in column_names(inputs[INGEST] / shard)
    columns = ["id", "locator", "text"] if has_text else ["id", "locator"]
    documents = read_document_rows(inputs, shard, rows, columns).to_pylist()
    entries = []
    for hit, document in zip(hits, documents, strict=True):
        text = document["text"] if has_text else decoded_text(inputs, shard, hit.row)
        judged, id_ = hit.judged, document["id"].hex()
        details = [
            f"{name} {value_text(value)}"
            for name, value in judged.items()
            if name not in JUDGED and name != "text"
        ]
        outcome = verdict(judged["kept"], judged["dropped_by"], judged["reason"])
        note = document_note(outcome, judged["source"], len(text), id_, details)
        title = Link(document["locator"], address(DOCUMENTS, id_))
        entries.append(Entry(title, highlighted(snippet(text, words), words), note))
    return entries


def _form(run: BrowsedRun, corpus: Corpus, query: Search, total: int) -> Form:
    hint = "SQL over columns, such as language_score < 0.8 AND kept"
    words_hint = 'in the text; "several between quotes"'
    words, where = query.words or "", query.where or ""
    choices = run.cached(
        ("form", query.corpus), lambda: _choices(run, corpus, query.corpus)
    )
    fields: list[Field | Choice] = [
        Field("words", "words", words, words_hint, 1000, is_wide=True)
    ]
    fields += [
        replace(choice, value=getattr(query, choice.name) or "") for choice in choices
    ]
    for name, label in (("least", "at least"), ("most", "at most")):
        bound = getattr(query, name)
        value = "" if bound is None else f"{bound:g}"
        fields.append(Field(name, label, value, is_number=True))
    fields.append(Field("where", "where", where, hint, 2000, is_wide=True))
    own = corpus_parameter(query.corpus)
    # A value that a link brought and the form does not offer stays with the search.
    hidden = {
        name: str(value)
        for name, value in {
            **query.model_dump(exclude={"after"}),
            "corpus": own,
        }.items()
        if value is not None and name not in {field.name for field in fields}
    }
    is_filtered = query != Search(corpus=query.corpus, after=query.after)
    everything = Link(f"all {total:,}", address(DOCUMENTS, corpus=own))
    return Form(
        address(DOCUMENTS),
        fields,
        [Button("Search")],
        hidden,
        "filters",
        after=everything if is_filtered else "",
    )


def _choices(run: BrowsedRun, corpus: Corpus, name: str) -> list[Choice]:
    """Lists of the form that have a value to offer."""
    reasons: dict[str, list[str]] = {}
    languages: dict[str, int] = {}
    sources: set[str] = set()
    steps = {INGEST, *corpus.steps} & corpus.inputs.keys()
    for stage in run.committed() if name == DOCUMENTS else ():
        if stage in steps:
            summary = run.step(stage)
            sources |= set(summary.counts.sources)
            causes = [*summary.counts.dropped]
            causes += [QUARANTINE_REASON] if summary.counts.quarantined else []
            if causes and stage != INGEST:
                reasons[stage] = sorted(causes)
            languages |= summary.languages
    if LANGUAGE not in corpus.schema.names:
        languages = {}
    numbers = [
        column
        for column in corpus.measured
        if _is_number(corpus.schema.field(column).type)
    ]
    lists: dict[str, tuple[str, Mapping[str, Sequence[str]]]] = {
        "source": ("source", {"": sorted(sources)}),
        "language": (
            "language",
            {"": [language for language, _ in ranked(languages)]},
        ),
        "outcome": ("outcome", {"": OUTCOMES}),
        "step": ("dropped by", {"": list(reasons)}),
        "reason": ("reason", reasons),
        "column": ("measured", {"": numbers}),
    }
    return [
        Choice(parameter, label, groups)
        for parameter, (label, groups) in lists.items()
        if any(groups.values())
    ]
