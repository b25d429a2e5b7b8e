"""Search for documents about a text: nearest in meaning by stored vectors, and by
words, merged into one list.

The lists are merged by rank alone (reciprocal rank fusion, Cormack et al. 2009): a
document scores 1 / (60 + rank) in each list, so a cosine is never compared with a BM25
score.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
from rich.padding import Padding
from rich.text import Text

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
from gristmill.dataprep.words.bm25_scan import WordHit, search_words, terms_of
from gristmill.dataprep.words.snippets import pattern_of, snippet
from gristmill.flows.questions.find_documents import committed_corpus
from gristmill.flows.running.session import Session
from gristmill.flows.running.terminal import plain_console, visible
from gristmill.mixtures.encoder_settings import ReadingModel

By = Literal["meaning", "words"]
FUSION = 60
"""Rank constant of the paper."""
DEPTH = 200
"""Minimum number of documents of each list that are merged."""
SHOWN = ("id", "source", "locator", "url", "kept", "dropped_by", "reason")


class SearchError(ValueError):
    """The search cannot be made."""


@dataclass(frozen=True)
class Vectors:
    """Vectors that a search may use: the step that computed them, and its model."""

    step: str
    model: ReadingModel
    sha256: str


def search(
    session: Session,
    text: str,
    by: By | None = None,
    limit: int = 10,
    most_bytes: int | None = None,
) -> dict[str, Any]:
    """Search for documents about a text, kept or not.

    Args:
        session: the opened manifest.
        text: words or sentences; quoted phrases are matched exactly.
        by: a single method; None means both, or words alone if there are no vectors.
        limit: maximum number of documents.
        most_bytes: maximum bytes of text scanned for words; None means all.

    Returns:
        `text`; `by`: the methods used; `documents` of the run; `with_vectors` and
        `with_words`: numbers of documents searched by each method (None if it was not
        used); `matching`: number of documents with some of the words; `note`: reason
        for not searching by meaning, and the remedy (None if it was); `hits`: each with
        `id`, `source`, `locator`, `url`, `score`, `meaning` (`rank`, `cosine`) and
        `words` (`rank`, `bm25`), either of them None, `kept`, `dropped_by` and
        `reason`, `characters` and `snippet`.

    Raises:
        gristmill.flows.questions.find_documents.NothingIngestedError: no documents are
            committed yet.
        SearchError: the text is empty, or `by` is meaning and there are no vectors.
    """
    corpus = committed_corpus(session)
    terms = terms_of(text)
    if not text.strip():
        raise SearchError("the search text is empty; give some words or a sentence")
    summary: dict[str, Any] = {
        "text": text,
        "by": [],
        "documents": 0,
        "with_vectors": None,
        "with_words": None,
        "matching": None,
        "note": None,
    }
    depth = max(limit, DEPTH)
    near: list[Near] = []
    if by != "words":
        try:
            near, summary["with_vectors"] = _by_meaning(session, corpus, text, depth)
            summary["by"].append("meaning")
        except (SearchError, ModelFolderError) as error:
            if by == "meaning":
                raise SearchError(str(error)) from error
            summary["note"] = f"searched by words alone: {error}"
    hits: list[WordHit] = []
    if by != "meaning":
        if not terms and "meaning" not in summary["by"]:
            raise SearchError(f"there is no word in {text!r}")
        words = search_words(corpus, terms, depth, most_bytes)
        hits = words.hits
        summary["with_words"] = words.documents
        summary["matching"] = words.matching
        summary["by"].append("words")
    summary["documents"] = corpus.count_rows(kept=None)
    merged = merge(_rows_of(corpus, near), hits)[:limit]
    summary["hits"] = _describe_hits(corpus, merged, terms)
    return summary


def find_vectors(session: Session, corpus: Corpus) -> Vectors:
    """Return the vectors of the first step that stored any; those of later steps cover
    the same documents or fewer.

    Raises:
        SearchError: no step stored vectors.
    """
    for step in corpus.steps:
        if (corpus.inputs[step] / VECTORS).is_dir():
            model = ReadingModel.model_validate(session.plan[step].config["model"])
            return Vectors(
                step,
                model,
                session.folder(step).manifest()["summary"]["reader"]["sha256"],
            )
    raise SearchError(
        "no step stored vectors; to search by meaning add a step `cluster` or "
        "`dedup_semantic` with a model of sentence embeddings to `prepare` "
        "(docs/meaning.md), and run it"
    )


def _by_meaning(
    session: Session, corpus: Corpus, text: str, depth: int
) -> tuple[list[Near], int]:
    vectors = find_vectors(session, corpus)
    model_folder(vectors.model.path)
    if folder_sha256(vectors.model.path) != vectors.sha256:
        raise SearchError(
            f"the model at {vectors.model.path} is not the one that {vectors.step} "
            "computed its vectors "
            "with; put that one back, or run the step with the new one"
        )
    # One short text needs no GPU; float16 in the files is coarser than the difference
    # between devices.
    cpu_model = vectors.model.model_copy(update={"device": "cpu"})
    vector = load_embedder(cpu_model, vectors.sha256).embed([text])[0]
    return nearest(corpus.inputs[vectors.step] / VECTORS, corpus.shards, vector, depth)


Place = tuple[str, int]
"""A shard and a row."""


def _rows_of(corpus: Corpus, near: Sequence[Near]) -> list[tuple[Place, float]]:
    """Return the places of documents, with their cosines."""
    ids_by_shard: dict[str, set[bytes]] = {}
    for hit in near:
        ids_by_shard.setdefault(hit.shard, set()).add(hit.id)
    rows: dict[tuple[str, bytes], int] = {}
    for shard, ids in ids_by_shard.items():
        column = read_documents(corpus.inputs, shard, ["id"])["id"]
        for row in pc.indices_nonzero(
            pc.is_in(column, value_set=pa.array(sorted(ids), column.type))
        ).to_pylist():
            rows[shard, column[row].as_py()] = row
    return [((hit.shard, rows[hit.shard, hit.id]), hit.cosine) for hit in near]


@dataclass(frozen=True)
class Merged:
    """A document in the merged list: its place, its score, and its rank and value in
    each list, or None.
    """

    place: Place
    score: float
    meaning: tuple[int, float] | None
    words: tuple[int, float] | None


def merge(near: Sequence[tuple[Place, float]], hits: Sequence[WordHit]) -> list[Merged]:
    """Merge both lists by the sum of 1 / (FUSION + rank); ties are broken by place."""
    by_meaning = {place: (rank, cosine) for rank, (place, cosine) in enumerate(near, 1)}
    by_words = {
        (hit.shard, hit.row): (rank, hit.bm25) for rank, hit in enumerate(hits, 1)
    }
    merged = []
    for place in {**by_meaning, **by_words}:
        meaning = by_meaning.get(place)
        words = by_words.get(place)
        score = sum(
            1 / (FUSION + ranked[0])
            for ranked in (meaning, words)
            if ranked is not None
        )
        merged.append(Merged(place, score, meaning, words))
    return sorted(merged, key=lambda entry: (-entry.score, entry.place))


def _describe_hits(
    corpus: Corpus, merged: Sequence[Merged], terms: Sequence[str]
) -> list[dict[str, Any]]:
    """Describe hits, in order."""
    rows_by_shard: dict[str, list[int]] = {}
    for shard, row in sorted(entry.place for entry in merged):
        rows_by_shard.setdefault(shard, []).append(row)
    documents: dict[Place, dict[str, Any]] = {}
    for shard, rows in rows_by_shard.items():
        columns = corpus.read(shard, SHOWN, kept=None).take(pa.array(rows)).to_pylist()
        texts = read_document_rows(corpus.inputs, shard, rows, ["text"])[
            "text"
        ].to_pylist()
        for row, document, text in zip(rows, columns, texts, strict=True):
            document["characters"] = len(text)
            document["snippet"] = snippet(text, terms)
            documents[shard, row] = document
    hits = []
    for entry in merged:
        document = documents[entry.place]
        hits.append(
            {
                **{name: document[name] for name in ("id", "source", "locator", "url")},
                "score": round(entry.score, 6),
                "meaning": _ranked(entry.meaning, "cosine"),
                "words": _ranked(entry.words, "bm25"),
                **{
                    name: document[name]
                    for name in (
                        "kept",
                        "dropped_by",
                        "reason",
                        "characters",
                        "snippet",
                    )
                },
            }
        )
    return hits


def _ranked(ranked: tuple[int, float] | None, name: str) -> dict[str, Any] | None:
    return None if ranked is None else {"rank": ranked[0], name: round(ranked[1], 3)}


def marked(text: str, words: Sequence[str]) -> list[tuple[str, bool]]:
    """Split a text into pieces, flagging those that are one of the words."""
    pieces, position = list[tuple[str, bool]](), 0
    for match in pattern_of(words).finditer(text):
        pieces += [(text[position : match.start()], False), (match[0], True)]
        position = match.end()
    return [piece for piece in [*pieces, (text[position:], False)] if piece[0]]


def print_hits(results: Mapping[str, Any]) -> None:
    """Print the documents, the best first."""
    console = plain_console()
    console.print(Text(described(results), style="bold"))
    if results["note"]:
        console.print(Text(results["note"], style="yellow"))
    for number, hit in enumerate(results["hits"], 1):
        console.print()
        console.print(
            Text.assemble(
                (f"{number:>2}. ", "bold"),
                hit["id"][:16],
                "  ",
                visible(hit["source"]),
                "  ",
                visible(hit["url"] or hit["locator"]),
            ),
            soft_wrap=True,
        )
        console.print(
            Text(f"    {verdict(hit)}; {', '.join(ranks(hit))}", style="dim"),
            soft_wrap=True,
        )
        console.print(Padding(Text(visible(hit["snippet"])), (0, 0, 0, 4)))


def described(results: Mapping[str, Any]) -> str:
    """Describe the extent of the search in a sentence."""
    parts = []
    if results["with_vectors"] is not None:
        parts.append(f"{results['with_vectors']:,} by meaning")
    if results["with_words"] is not None:
        parts.append(
            f"{results['with_words']:,} by words, of which "
            f"{results['matching']:,} match"
        )
    return (
        f"{len(results['hits'])} of {results['documents']:,} documents; searched "
        f"{'; '.join(parts)}"
    )


def verdict(hit: Mapping[str, Any]) -> str:
    """Return `kept`, or the step and rule that dropped the document."""
    if hit["kept"]:
        return "kept"
    return f"dropped by {hit['dropped_by']}" + (
        f": {hit['reason']}" if hit["reason"] else ""
    )


def ranks(hit: Mapping[str, Any]) -> list[str]:
    """Return a document's score and rank in each list."""
    meaning, words = hit["meaning"], hit["words"]
    texts = []
    if meaning:
        texts.append(
            f"cosine {meaning['cosine']:.3f} (number {meaning['rank']} by meaning)"
        )
    if words:
        texts.append(f"BM25 {words['bm25']:.2f} (number {words['rank']} by words)")
    return texts
