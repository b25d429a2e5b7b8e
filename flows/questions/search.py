"""Which documents a text is about: those nearest in meaning, by stored vectors, and those with its words, as one list.

Both lists are merged by their ranks alone (reciprocal rank fusion, Cormack et al. 2009): a document scores 1 / (60 +
rank) in each, so that a cosine is never held against a BM25.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.padding import Padding
from rich.text import Text

from gristmill.dataprep.corpus import Corpus
from gristmill.dataprep.documents import read_documents
from gristmill.dataprep.encoders.embeddings import load_embedder
from gristmill.dataprep.encoders.model_folders import ModelFolderError, folder_sha256, model_folder
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
"""Added to ranks, as in the paper."""
DEPTH = 200
"""Documents of each list that are merged, at least."""
SHOWN = ("id", "source", "locator", "url", "kept", "dropped_by", "reason")


class SearchError(ValueError):
    """A search that cannot be made."""


@dataclass(frozen=True)
class Vectors:
    """The vectors that a search may use: the step that made them, and its model."""

    step: str
    model: ReadingModel
    sha256: str


def search(
    session: Session, text: str, by: By | None = None, limit: int = 10, most_bytes: int | None = None
) -> dict[str, Any]:
    """The documents that a text is about, kept or not.

    Args:
        session: the opened manifest.
        text: words, or sentences; what stands between quotes is looked for as it is.
        by: one way alone; both where absent, and by words alone where there are no vectors.
        limit: documents.
        most_bytes: of texts in which words are looked for; all if absent.

    Returns:
        `text`; `by`: the ways that were taken; `documents` of the run; `with_vectors`: how many were looked at by
        meaning, and `with_words`: how many by words (None where that was not done); `matching`: how many have some of
        the words; `note`: why there is no meaning, and how to get it (None where there is); `hits`: each with
        `id`, `source`, `locator`, `url`, `score`, `meaning` (`rank`, `cosine`) and `words` (`rank`, `bm25`), either
        None, `kept`, `dropped_by` and `reason`, `characters` and `snippet`.

    Raises:
        gristmill.flows.questions.find_documents.NothingIngestedError: there are no documents.
        SearchError: there is nothing to look for, or no vectors although `by` is meaning.
    """
    corpus = committed_corpus(session)
    terms = terms_of(text)
    if not text.strip():
        raise SearchError("there is nothing to look for; give some words or a sentence")
    found: dict[str, Any] = {
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
            near, found["with_vectors"] = _by_meaning(session, corpus, text, depth)
            found["by"].append("meaning")
        except (SearchError, ModelFolderError) as error:
            if by == "meaning":
                raise SearchError(str(error)) from error
            found["note"] = f"searched by words alone: {error}"
    hits: list[WordHit] = []
    if by != "meaning":
        if not terms and "meaning" not in found["by"]:
            raise SearchError(f"there is no word in {text!r}")
        words = search_words(corpus, terms, depth, most_bytes)
        hits, found["with_words"], found["matching"] = words.hits, words.documents, words.matching
        found["by"].append("words")
    found["documents"] = corpus.count_rows(kept=None)
    merged = merge(_rows_of(corpus, near), hits)[:limit]
    return {**found, "hits": _described(corpus, merged, terms)}


def find_vectors(session: Session, corpus: Corpus) -> Vectors:
    """The first step that has left vectors: those of later ones are of the same documents, or of fewer.

    Raises:
        SearchError: there are none.
    """
    for step in corpus.steps:
        if (corpus.inputs[step] / VECTORS).is_dir():
            model = ReadingModel.model_validate(session.plan[step].config["model"])
            return Vectors(step, model, session.folder(step).manifest()["summary"]["reader"]["sha256"])
    raise SearchError(
        "no step has left vectors; for nearest documents by meaning add a step `cluster` or "
        "`dedup_semantic` with a model of sentence embeddings to `prepare` (docs/meaning.md), and run it"
    )


def _by_meaning(session: Session, corpus: Corpus, text: str, depth: int) -> tuple[list[Near], int]:
    vectors = find_vectors(session, corpus)
    model_folder(vectors.model.path)
    if folder_sha256(vectors.model.path) != vectors.sha256:
        raise SearchError(
            f"the model at {vectors.model.path} is not the one that {vectors.step} made its vectors "
            "with; put that one back, or run the step with the new one"
        )
    # One short text: no GPU is wanted for it, and float16 in the files is coarser than what differs.
    here = vectors.model.model_copy(update={"device": "cpu"})
    vector = load_embedder(here, vectors.sha256).embed([text])[0]
    return nearest(corpus.inputs[vectors.step] / VECTORS, corpus.shards, vector, depth)


Place = tuple[str, int]
"""A shard and a row."""


def _rows_of(corpus: Corpus, near: Sequence[Near]) -> list[tuple[Place, float]]:
    """The places of documents, with their cosines."""
    places: dict[tuple[str, bytes], Place] = {}
    for shard in {one.shard for one in near}:
        ids = read_documents(corpus.inputs, shard, ["id"])["id"]
        wanted = pa.array(sorted({one.id for one in near if one.shard == shard}), ids.type)
        rows = np.flatnonzero(pc.is_in(ids, value_set=wanted).to_numpy(zero_copy_only=False))
        places |= {
            (shard, id_): (shard, row)
            for id_, row in zip(ids.take(pa.array(rows)).to_pylist(), rows.tolist(), strict=True)
        }
    return [(places[one.shard, one.id], one.cosine) for one in near]


@dataclass(frozen=True)
class Merged:
    """A document in the common list: where it is, its score, and its rank and value in each list that has it."""

    place: Place
    score: float
    meaning: tuple[int, float] | None
    words: tuple[int, float] | None


def merge(near: Sequence[tuple[Place, float]], hits: Sequence[WordHit]) -> list[Merged]:
    """Both lists as one, by the sum of 1 / (FUSION + rank); equal ones by their place."""
    by_meaning = {place: (rank, cosine) for rank, (place, cosine) in enumerate(near, 1)}
    by_words = {(one.shard, one.row): (rank, one.bm25) for rank, one in enumerate(hits, 1)}

    def of(place: Place) -> Merged:
        ranks = [one for one in (by_meaning.get(place), by_words.get(place)) if one is not None]
        return Merged(place, sum(1 / (FUSION + rank) for rank, _ in ranks), by_meaning.get(place), by_words.get(place))

    return sorted(map(of, {**by_meaning, **by_words}), key=lambda one: (-one.score, one.place))


def _described(corpus: Corpus, merged: Sequence[Merged], terms: Sequence[str]) -> list[dict[str, Any]]:
    """What is known of some documents, in their order."""
    known: dict[Place, dict[str, Any]] = {}
    for shard in {one.place[0] for one in merged}:
        rows = sorted(one.place[1] for one in merged if one.place[0] == shard)
        judged = corpus.read(shard, SHOWN, kept=None).take(pa.array(rows)).to_pylist()
        texts = read_document_rows(corpus.inputs, shard, rows, ["text"])["text"].to_pylist()
        known |= {
            (shard, row): {**one, "characters": len(text), "snippet": snippet(text, terms)}
            for row, one, text in zip(rows, judged, texts, strict=True)
        }
    return [
        {
            **{name: known[one.place][name] for name in ("id", "source", "locator", "url")},
            "score": round(one.score, 6),
            "meaning": _ranked(one.meaning, "cosine"),
            "words": _ranked(one.words, "bm25"),
            **{name: known[one.place][name] for name in ("kept", "dropped_by", "reason", "characters", "snippet")},
        }
        for one in merged
    ]


def _ranked(found: tuple[int, float] | None, name: str) -> dict[str, Any] | None:
    return None if found is None else {"rank": found[0], name: round(found[1], 3)}


def marked(shown: str, words: Sequence[str]) -> list[tuple[str, bool]]:
    """A text in pieces, and which of these are one of some words."""
    pieces, at = list[tuple[str, bool]](), 0
    for one in pattern_of(words).finditer(shown):
        pieces += [(shown[at : one.start()], False), (one[0], True)]
        at = one.end()
    return [piece for piece in [*pieces, (shown[at:], False)] if piece[0]]


def print_hits(found: Mapping[str, Any]) -> None:
    """Print the documents, the best first."""
    console = plain_console()
    console.print(Text(described(found), style="bold"))
    if found["note"]:
        console.print(Text(found["note"], style="yellow"))
    for number, hit in enumerate(found["hits"], 1):
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
        console.print(Text(f"    {verdict(hit)}; {', '.join(ranks(hit))}", style="dim"), soft_wrap=True)
        console.print(Padding(Text(visible(hit["snippet"])), (0, 0, 0, 4)))


def described(found: Mapping[str, Any]) -> str:
    """In a sentence, what was looked through."""
    parts = [f"{found['with_vectors']:,} by meaning"] if found["with_vectors"] is not None else []
    if found["with_words"] is not None:
        parts.append(f"{found['with_words']:,} by words, of which {found['matching']:,} have some")
    return f"{len(found['hits'])} of {found['documents']:,} documents; looked through {'; '.join(parts)}"


def verdict(hit: Mapping[str, Any]) -> str:
    """Whether a document was kept, and why not."""
    if hit["kept"]:
        return "kept"
    return f"dropped by {hit['dropped_by']}" + (f": {hit['reason']}" if hit["reason"] else "")


def ranks(hit: Mapping[str, Any]) -> list[str]:
    """What a document has in each list."""
    meaning, words = hit["meaning"], hit["words"]
    return ([f"cosine {meaning['cosine']:.3f} (number {meaning['rank']} by meaning)"] if meaning else []) + (
        [f"BM25 {words['bm25']:.2f} (number {words['rank']} by words)"] if words else []
    )
