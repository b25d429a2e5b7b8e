"""Search for documents about a text: nearest in meaning by stored vectors, and by
words, merged into one list.

The lists are merged by rank alone (reciprocal rank fusion, Cormack et al. 2009): a
document scores 1 / (60 + rank) in each list, so a cosine is never compared with a BM25
score.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.documents import read_documents
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.encoders.model_folders import (
    ModelFolderError,
    folder_sha256,
    model_folder,
)
from gristmill.dataprep.row_groups import read_document_rows
from gristmill.dataprep.semantic.vector_jobs import VECTORS
from gristmill.dataprep.semantic.vector_search import Near, nearest
from gristmill.dataprep.words.bm25_scan import search_words, terms_of
from gristmill.dataprep.words.snippets import snippet
from gristmill.flows.pages.document_elements import (
    document_entry,
    listing_of,
    marked,
    verdict,
)
from gristmill.flows.pages.page_elements import Entry, Inline, Parts
from gristmill.flows.pages.terminal_pages import Answer
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.questions.threshold_samples import by_shard
from gristmill.flows.running.session import Session
from gristmill.mixtures.schema.encoder_settings import ReadingModel

By = Literal["meaning", "words"]
FUSION = 60
"""Rank constant of the paper."""
DEPTH = 200
"""Minimum number of documents of each list that are merged."""
SHOWN = ("id", "source", "locator", "url", "kept", "dropped_by", "reason")


class SearchError(ValueError):
    """The search cannot be made."""


@dataclass(frozen=True)
class MeaningRank:
    """Rank of a document among the nearest in meaning, and its cosine."""

    rank: int
    cosine: float


@dataclass(frozen=True)
class WordsRank:
    """Rank of a document among those with some of the words, and its BM25 score."""

    rank: int
    bm25: float


@dataclass(frozen=True)
class SearchHit:
    """A document about the text.

    Attributes:
        id: 32 hexadecimal digits.
        source: name of its source.
        locator: file and record in the source.
        url: its address, if it has one.
        score: sum of its reciprocal ranks in both lists.
        meaning: its rank by meaning; None beyond the list.
        words: its rank by words; None beyond the list.
        kept: True if all steps kept it.
        dropped_by: the step that dropped it.
        reason: the rule that dropped it.
        characters: length of its text.
        snippet: passage of its text with most of the words.
    """

    id: str
    source: str
    locator: str
    url: str | None
    score: float
    meaning: MeaningRank | None
    words: WordsRank | None
    kept: bool
    dropped_by: str | None
    reason: str | None
    characters: int
    snippet: str

    def entry(self, words: Sequence[str]) -> Entry:
        """Return the document as an entry of a list, with marks on some words."""
        facts: list[Inline] = [
            verdict(self.kept, self.dropped_by, self.reason),
            self.source,
            f"{self.characters:,} characters",
        ]
        if self.meaning:
            rank, cosine = self.meaning.rank, self.meaning.cosine
            facts.append(f"cosine {cosine:.3f} (number {rank} by meaning)")
        if self.words:
            rank, bm25 = self.words.rank, self.words.bm25
            facts.append(f"BM25 {bm25:.2f} (number {rank} by words)")
        text = marked(self.snippet, words)
        return document_entry(self.id, self.url or self.locator, facts, text)


@dataclass(frozen=True)
class SearchHits(Answer):
    """Documents about a text.

    Attributes:
        text: the text.
        by: methods used: `meaning`, `words`, or both.
        documents: number of documents in the run, kept or not.
        with_vectors: number of documents searched by meaning; None if not used.
        with_words: number of documents searched by words; None if not used.
        matching: number of documents with some of the words.
        note: reason for not searching by meaning, and the remedy; None if it was used
            or not requested.
        hits: documents, best first.
    """

    text: str
    by: list[By]
    documents: int
    with_vectors: int | None
    with_words: int | None
    matching: int | None
    note: str | None
    hits: list[SearchHit]

    def parts(self) -> list[Parts]:
        """Return the extent of the search and its hits as parts of a page."""
        methods = []
        if self.with_vectors is not None:
            methods.append(f"{self.with_vectors:,} by meaning")
        if self.with_words is not None:
            methods.append(
                f"{self.with_words:,} by words, of which {self.matching:,} match"
            )
        words = [word for term in terms_of(self.text) for word in term.split()]
        return [
            f"{len(self.hits)} of {self.documents:,} documents; searched "
            f"{'; '.join(methods)}.",
            self.note,
            listing_of([hit.entry(words) for hit in self.hits], "None of them fits."),
        ]


def search(
    session: Session,
    text: str,
    by: By | None = None,
    limit: int = 10,
    most_bytes: int | None = None,
) -> SearchHits:
    """Search for documents about a text, kept or not.

    Args:
        session: the opened manifest.
        text: words or sentences; quoted phrases are matched exactly.
        by: a single method; None means both, or words alone if there are no vectors.
        limit: maximum number of documents.
        most_bytes: maximum bytes of text scanned for words; None means all.

    Raises:
        gristmill.flows.questions.find_documents.NothingIngestedError: no documents are
            committed yet.
        SearchError: the text is empty, or `by` is meaning and there are no vectors.
    """
    corpus = committed_corpus(session)
    terms = terms_of(text)
    if not text.strip():
        raise SearchError("the search text is empty; give some words or a sentence")
    depth = max(limit, DEPTH)
    methods: list[By] = []
    near: list[Near] = []
    words = with_vectors = note = None
    if by != "words":
        try:
            near, with_vectors = _nearest(session, corpus, text, depth)
            methods.append("meaning")
        except (SearchError, ModelFolderError) as error:
            if by == "meaning":
                raise SearchError(str(error)) from error
            note = f"searched by words alone: {error}"
    if by != "meaning":
        if not terms and not methods:
            raise SearchError(f"there is no word in {text!r}")
        words = search_words(corpus, terms, depth, most_bytes)
        methods.append("words")
    places = _places(corpus, near)
    by_meaning = {
        places[hit.id]: MeaningRank(rank, round(hit.cosine, 3))
        for rank, hit in enumerate(near, 1)
    }
    by_words = {
        (hit.shard, hit.row): WordsRank(rank, round(hit.bm25, 3))
        for rank, hit in enumerate(words.hits if words else [], 1)
    }
    scores = dict(islice(merge(by_meaning, by_words).items(), limit))
    hits: dict[Place, SearchHit] = {}
    for shard, rows in by_shard(scores).items():
        documents = corpus.read(shard, SHOWN, kept=None).take(rows).to_pylist()
        texts = read_document_rows(corpus.inputs, shard, rows, ["text"])["text"]
        for row, document, hit_text in zip(
            rows, documents, texts.to_pylist(), strict=True
        ):
            hits[shard, row] = SearchHit(
                **document,
                score=round(scores[shard, row], 6),
                meaning=by_meaning.get((shard, row)),
                words=by_words.get((shard, row)),
                characters=len(hit_text),
                snippet=snippet(hit_text, terms),
            )
    return SearchHits(
        text,
        methods,
        corpus.count_rows(kept=None),
        with_vectors,
        words.documents if words else None,
        words.matching if words else None,
        note,
        [hits[place] for place in scores],
    )


def _nearest(
    session: Session, corpus: Corpus, text: str, depth: int
) -> tuple[list[Near], int]:
    """Return the documents nearest to a text in meaning, and the number of vectors."""
    step, model, sha256 = find_vectors(session, corpus)
    model_folder(model.path)
    if folder_sha256(model.path) != sha256:
        raise SearchError(
            f"the model at {model.path} is not the one that {step} computed its "
            "vectors with; put that one back, or run the step with the new one"
        )
    # One short text needs no GPU; float16 in the files is coarser than the difference
    # between devices.
    cpu_model = model.model_copy(update={"device": "cpu"})
    vector = load_embedder(cpu_model, sha256).embed([text])[0]
    return nearest(corpus.inputs[step] / VECTORS, corpus.shards, vector, depth)


def _places(corpus: Corpus, near: Sequence[Near]) -> dict[bytes, Place]:
    """Return the shard and row of each document by id."""
    places: dict[bytes, Place] = {}
    for shard in {hit.shard for hit in near}:
        ids = [hit.id for hit in near if hit.shard == shard]
        column = read_documents(corpus.inputs, shard, ["id"])["id"]
        rows = pc.index_in(pa.array(ids, column.type), value_set=column).to_pylist()
        places |= {id_: (shard, row) for id_, row in zip(ids, rows, strict=True)}
    return places


def find_vectors(session: Session, corpus: Corpus) -> tuple[str, ReadingModel, str]:
    """Return the first step that stored vectors, its model, and the model's SHA-256;
    vectors of later steps cover the same documents or fewer.

    Raises:
        SearchError: no step stored vectors.
    """
    for step in corpus.steps:
        if (corpus.inputs[step] / VECTORS).is_dir():
            model = ReadingModel.model_validate(session.plan[step].config["model"])
            summary = session.folder(step).manifest()["summary"]
            return step, model, summary["reader"]["sha256"]
    raise SearchError(
        "no step stored vectors; to search by meaning add a step `cluster` or "
        "`dedup_semantic` with a model of sentence embeddings to `prepare` "
        "(docs/meaning.md), and run it"
    )


Place = tuple[str, int]
"""A shard and a row."""


def merge(*rankings: Iterable[Place]) -> dict[Place, float]:
    """Merge rankings by the sum of 1 / (FUSION + rank), best first; ties are broken by
    place.
    """
    scores: dict[Place, float] = defaultdict(float)
    for ranking in rankings:
        for rank, place in enumerate(ranking, 1):
            scores[place] += 1 / (FUSION + rank)
    return dict(sorted(scores.items(), key=lambda item: (-item[1], item[0])))
