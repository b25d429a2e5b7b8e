"""The list of documents: those that meet a search, some on each page, read from the shards that hold them.

What was measured is read of one shard after another until a page is full; texts are read of the documents that are
shown, and where words are looked for of as many as SCANNED_BYTES hold: then the page says how far it has come.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
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
from gristmill.flows.browse.addresses import DOCUMENTS, BadAddressError, Search, address
from gristmill.flows.browse.browsed_run import BrowsedRun
from gristmill.flows.questions.search import marked
from gristmill.mixtures.sources import INGEST
from gristmill.tokenize.importing.token_sources import decoded_text

ON_PAGE = 25
SCANNED_BYTES = 64 << 20
"""Of texts in which words are looked for, before a page says how far it has come: about half a second."""
SCANNED_ROWS = 2000
"""Texts that are read at a time."""
MOST_COUNTED = 1_000_000
"""Documents: of a larger corpus it is not counted how many fit."""
JUDGED = ("source", "kept", "dropped_by", "reason")
LANGUAGE = "language"
WORDS = re.compile(r'"([^"]+)"|(\S+)')
"""A text between quotes is looked for as it is."""


@dataclass(frozen=True)
class Hit:
    """A document that fits: where it is, and what was read of it."""

    shard: str
    row: int
    judged: Mapping[str, Any]


@dataclass
class Scan:
    """How far a search has come.

    Attributes:
        hits: what it has found.
        after: where it would go on; None where it has seen all.
        scanned: documents whose texts were looked at; None where no words were looked for.
    """

    hits: list[Hit]
    after: str | None = None
    scanned: int | None = None


def documents_page(run: BrowsedRun, asked: Search) -> dict[str, Any]:
    """The documents that meet a search, from a place on."""
    inputs = run.corpus(asked.corpus)
    corpus = run.columns(asked.corpus)
    wanted = _columns(corpus, asked)
    scan = search(corpus, asked, wanted)
    total = run.once(("documents", asked.corpus), lambda: _number_of_documents(corpus))
    counted = asked.words is None and total <= MOST_COUNTED
    unpaged = asked.model_copy(update={"after": None})
    return {
        "asked": asked,
        "total": total,
        "columns": [one for one in wanted if one not in JUDGED],
        "count": run.once(("count", unpaged), lambda: _count(corpus, unpaged, wanted)) if counted else None,
        "hits": [
            line
            for shard, hits in groupby(scan.hits, key=lambda hit: hit.shard)
            for line in _lines(inputs, shard, list(hits), asked)
        ],
        "next": asked.link(scan.after) if scan.after else None,
        "first": asked.link() if asked.after else None,
        "scanned": scan.scanned,
        "is_filtered": asked != Search(corpus=asked.corpus, after=asked.after),
        "form": run.once(("form", asked.corpus), lambda: _form(run, corpus, asked.corpus)),
    }


def _columns(corpus: Corpus, asked: Search) -> list[str]:
    """What is read of every document."""
    wanted = [
        *JUDGED,
        *([LANGUAGE] if asked.language else []),
        *([asked.column] if asked.column else []),
        *([] if asked.where is None else columns_in(asked.where, corpus.schema.names)),
    ]
    for name in wanted:
        if name not in corpus.schema.names:
            raise BadAddressError(f"no step has measured {name!r}; columns are {', '.join(corpus.measured) or 'none'}")
    return list(dict.fromkeys(wanted))


def search(corpus: Corpus, asked: Search, wanted: Sequence[str]) -> Scan:
    """Documents that fit, in the order of the corpus: as many as a page shows, or fewer where words are rare."""
    found = Scan([], scanned=None if asked.words is None else 0)
    first, row = map(int, (asked.after or "0-0").split("-"))
    budget = SCANNED_BYTES
    for number, shard in list(enumerate(corpus.shards))[first:]:
        table = corpus.read(shard, wanted, kept=None)
        rows = np.flatnonzero(fitting(table, asked))
        rows = rows[rows >= (row if number == first else 0)]
        for begin in range(0, len(rows), SCANNED_ROWS):
            part = rows[begin : begin + SCANNED_ROWS]
            if budget <= 0:
                found.after = f"{number}-{part[0]}"
                return found
            if asked.words is not None and found.scanned is not None:
                found.scanned += len(part)
                part, size = _with_words(corpus, shard, part, asked.words)
                budget -= size
            for place in part.tolist():
                if len(found.hits) == ON_PAGE:
                    found.after = f"{number}-{place}"
                    return found
                found.hits.append(Hit(shard, place, table.slice(place, 1).to_pylist()[0]))
    return found


def fitting(table: pa.Table, asked: Search) -> np.ndarray:
    """Which documents fit but for words: bool of shape (n,); a value that was not measured fits no bound."""
    fits = np.ones(len(table), bool)
    for mask in _masks(table, asked):
        fits &= pc.fill_null(mask, False).to_numpy(zero_copy_only=False).astype(bool)
    if asked.where is not None and len(table):
        known, values = evaluate(asked.where, "BOOLEAN", table)
        fits &= known & np.where(known, values, False).astype(bool)
    return fits


def _masks(table: pa.Table, asked: Search) -> Iterator[Any]:
    equal = {"source": asked.source, LANGUAGE: asked.language, "dropped_by": asked.step, "reason": asked.reason}
    yield from (pc.equal(table[name].cast(pa.string()), value) for name, value in equal.items() if value is not None)
    quarantined = pc.fill_null(pc.equal(table["reason"].cast(pa.string()), QUARANTINE_REASON), False)
    if asked.outcome == "kept":
        yield table["kept"]
    elif asked.outcome == "dropped":
        yield pc.and_(pc.invert(table["kept"]), pc.invert(quarantined))
    elif asked.outcome == "quarantined":
        yield quarantined
    if asked.column is not None and not _is_number(table[asked.column].type):
        raise BadAddressError(f"{asked.column} is not a number; ranges are of numbers")
    if asked.least is not None:
        yield pc.greater_equal(table[asked.column], asked.least)
    if asked.most is not None:
        yield pc.less_equal(table[asked.column], asked.most)
    if asked.column is not None:
        yield table[asked.column].is_valid()


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)


def words_of(text: str) -> list[str]:
    """What is looked for: the words of a search, or what stands between quotes in it."""
    return [quoted or word for quoted, word in WORDS.findall(text)]


def _with_words(corpus: Corpus, shard: str, rows: np.ndarray, words: str) -> tuple[np.ndarray, int]:
    """Those of some rows whose text has all words, in capitals or not; and how many bytes were looked at."""
    if "text" not in column_names(corpus.inputs[INGEST] / shard):
        raise BadAddressError("these documents have tokens and no text; words cannot be looked for in them")
    texts = read_document_rows(corpus.inputs, shard, rows.tolist(), ["text"])["text"]
    size = int(pc.sum(pc.binary_length(texts)).as_py() or 0)
    for word in words_of(words):
        hits = np.flatnonzero(pc.match_substring(texts, word, ignore_case=True).to_numpy())
        rows, texts = rows[hits], texts.take(pa.array(hits))
    return rows, size


def _count(corpus: Corpus, asked: Search, wanted: Sequence[str]) -> int:
    return sum(int(fitting(corpus.read(shard, wanted, kept=None), asked).sum()) for shard in corpus.shards)


def _number_of_documents(corpus: Corpus) -> int:
    total = 0
    for shard in corpus.shards:
        with open_table(corpus.inputs[INGEST] / shard) as file:
            total += file.metadata.num_rows
    return total


def _lines(inputs: Mapping[str, Path], shard: str, hits: Sequence[Hit], asked: Search) -> list[dict[str, Any]]:
    """The lines of the list about some documents of a shard."""
    rows, words = [hit.row for hit in hits], [] if asked.words is None else words_of(asked.words)
    has_text = "text" in column_names(inputs[INGEST] / shard)
    documents = read_document_rows(inputs, shard, rows, ["id", "locator", *(["text"] if has_text else [])]).to_pylist()
    texts = [one["text"] for one in documents] if has_text else [decoded_text(inputs, shard, row) for row in rows]
    return [
        {
            **{name: hit.judged[name] for name in JUDGED},
            "id": document["id"].hex(),
            "locator": document["locator"],
            "link": address(DOCUMENTS, document["id"].hex()),
            "values": {name: value for name, value in hit.judged.items() if name not in (*JUDGED, "text")},
            "characters": len(text),
            "excerpt": marked(snippet(text, words), words),
        }
        for hit, document, text in zip(hits, documents, texts, strict=True)
    ]


def _form(run: BrowsedRun, corpus: Corpus, name: str) -> dict[str, Any]:
    """What may be chosen in the form: sources, languages, steps with their reasons, and columns of numbers."""
    reasons: dict[str, list[str]] = {}
    languages: dict[str, int] = {}
    sources: set[str] = set()
    for stage in run.committed() if name == DOCUMENTS else ():
        if stage not in corpus.inputs or (stage != INGEST and stage not in corpus.steps):
            continue
        summary = run.summary(stage)
        counts = summary.get("counts", {})
        sources |= set(counts.get("sources", {}))
        found = [*counts.get("dropped", {}), *([QUARANTINE_REASON] if counts.get("quarantined") else [])]
        if found and stage != INGEST:
            reasons[stage] = sorted(found)
        languages |= summary.get("languages", {})
    numbers = [one for one in corpus.measured if _is_number(corpus.schema.field(one).type)]
    return {
        "corpora": list(run.corpora()),
        "sources": sorted(sources),
        "reasons": reasons,
        "languages": sorted(languages, key=lambda one: (-languages[one], one))
        if LANGUAGE in corpus.schema.names
        else [],
        "columns": numbers,
    }
