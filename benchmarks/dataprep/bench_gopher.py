"""The Gopher filters against those of datatrove, on the same English prose, in the same run and on one thread.

The prose is that of public-domain books where the folder of shared data is beside the repository, otherwise words of
a Zipf-like distribution; in documents of some kilobytes. datatrove gets the first of them. Both sides end with a
verdict for every document.
"""

from __future__ import annotations

import importlib.util
import io
import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from benchmarks.checkout import data_folder
from benchmarks.dataprep.timing import DOCUMENTS, rate, synthetic_texts
from gristmill.dataprep.filtering import gopher
from gristmill.dataprep.filtering.rules import failures, first_failures
from gristmill.mixtures.filter import GopherQuality, GopherRepetition

PROSE_BYTES = 20_000_000
DOCUMENT_BYTES = 5000
PEER_DOCUMENTS = 60


def rows() -> Iterator[dict[str, Any]]:
    """Measure; `name`, `ours`, `peer` (both MB of UTF-8 per second), `unit`, `ratio`."""
    texts = prose()
    peer = datatrove_rate(texts[:PEER_DOCUMENTS])
    for words, note in (("dialect", "its own word rule"), ("exact", "spaCy's words, each run of text looked up")):
        name = "filters_vs_datatrove" + ("" if words == "dialect" else f", words: {words}")
        yield _row(name, verdict_rate(texts, "datatrove", words), peer, note)
    for dialect in gopher.DIALECTS:
        if dialect != "datatrove":
            yield _row(f"filters_vs_datatrove, dialect {dialect}", verdict_rate(texts, dialect, "dialect"), peer, "")


def _row(name: str, ours: float | None, peer: float | None, note: str) -> dict[str, Any]:
    row = {"name": name, "ours": ours, "peer": peer, "unit": "MB/s", "ratio": ours / peer if ours and peer else None}
    if peer is None:
        return {**row, "note": "datatrove with spaCy is not installed"}
    return {**row, "note": note} if note else row


def verdict_rate(texts: list[str], dialect: str, words: str) -> float | None:
    """MB per second from text to verdicts; None where the words need a package that is missing."""
    if words == "exact" and importlib.util.find_spec("spacy") is None:
        return None
    quality = GopherQuality.model_validate({"dialect": dialect, "words": words})
    sets = {"quality": quality, "repetition": GopherRepetition.model_validate({"dialect": dialect, "words": words})}
    array = pa.array(texts, pa.large_string())

    def judge(part: pa.Array) -> list[str | None]:
        return first_failures(failures(gopher.statistics(part, quality), sets), len(part))

    judge(array.slice(0, 1))  # compiles, or loads what an earlier run compiled
    return rate(lambda: judge(array), texts)


def datatrove_rate(texts: list[str]) -> float | None:
    """MB per second of datatrove's two filters; None where datatrove is not installed."""
    if importlib.util.find_spec("datatrove") is None or importlib.util.find_spec("spacy") is None:
        return None
    from datatrove.data import Document
    from datatrove.pipeline.filters import GopherQualityFilter, GopherRepetitionFilter
    from datatrove.utils.text import split_into_parts

    filters = [GopherQualityFilter(), GopherRepetitionFilter()]

    def judge() -> None:
        split_into_parts.cache_clear()
        for text in texts:
            document = Document(text=text, id="0")
            for judging in filters:
                judging.filter(document)

    judge()
    return rate(judge, texts)


def prose() -> list[str]:
    """English prose, in documents of DOCUMENT_BYTES or a little more."""
    books = data_folder() / "text" / "books.jsonl.zst"
    if not books.exists():
        return synthetic_texts(DOCUMENTS)
    import zstandard

    documents: list[str] = []
    with books.open("rb") as file:
        for line in io.TextIOWrapper(zstandard.ZstdDecompressor().stream_reader(file), encoding="utf-8"):
            documents += _documents(json.loads(line)["text"])
            if len(documents) * DOCUMENT_BYTES >= PROSE_BYTES:
                break
    return documents


def _documents(book: str) -> Iterator[str]:
    document = ""
    for line in book.splitlines(keepends=True):
        document += line
        if len(document.encode()) >= DOCUMENT_BYTES:
            yield document
            document = ""
