"""The text that a tokenizer is learnt from: a share of every source, chosen by hash."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.documents import (
    annotation_stages,
    read_annotations,
    read_documents,
    read_shard,
    shard_names,
)
from gristmill.tokenize.document_sampling import drawn_below, drawn_order, id_words
from gristmill.tokenize.order import order_key

HELD_OUT = 0.05
SHOWN_RULES = 3
"""Share of the documents that only measure the tokenizer."""


class SampleError(ValueError):
    """There is no text to learn a tokenizer from, or its shares make no sense."""


@dataclass(frozen=True)
class TokenizerSample:
    """Texts per source.

    Attributes:
        learn: what the merges are learnt from.
        measure: documents that the merges have not seen; where a source has too few for that, some of `learn`.
    """

    learn: Mapping[str, Sequence[str]]
    measure: Mapping[str, Sequence[str]]


def draw_sample(
    inputs: Mapping[str, Path], sources: Sequence[str], total_bytes: int, weights: Mapping[str, float] | None, seed: int
) -> TokenizerSample:
    """Choose the kept documents of every source in the order of hash(seed, id) until its share is full.

    The document that overflows a share is cut at a character. A source with less text than its share gives what it
    has; the others do not make up for it.

    Args:
        inputs: the ingest and the annotating stages.
        sources: names of all sources.
        total_bytes: UTF-8 bytes of all shares together.
        weights: share per source; equal shares if None; sources that are not named get none.
        seed: of the choice.

    Raises:
        SampleError: a weight's source is unknown, all weights are zero, or no text is left.
    """
    shares = share_bytes(sources, total_bytes, weights)
    documents = _list_documents(inputs)
    chosen: dict[int, tuple[str, bool, int]] = {}
    for source, share in shares.items():
        rows = np.flatnonzero(documents.source == source)
        words = documents.words[rows]
        held_out = drawn_below(words, order_key(seed, "tokenizer", "held out"), HELD_OUT)
        ordered = drawn_order(words, order_key(seed, "tokenizer"))
        measured = ordered[held_out[ordered]]
        learnt = ordered[~held_out[ordered]]
        if not len(learnt) or not len(measured):
            measured = learnt = ordered
        for number, limit in _fill(documents.size[rows], learnt, share):
            chosen[int(rows[number])] = (source, True, limit)
        for number, limit in _fill(documents.size[rows], measured, max(1, int(share * HELD_OUT))):
            chosen.setdefault(int(rows[number]), (source, False, limit))
    texts = _read_texts(inputs, documents, chosen)
    learn = {source: [text for row, text in texts if chosen[row][:2] == (source, True)] for source in shares}
    measure = {source: [text for row, text in texts if chosen[row][:2] == (source, False)] for source in shares}
    if not any(map(len, learn.values())):
        raise SampleError(f"no text is left to learn a tokenizer from (sources: {', '.join(shares) or 'none'}): "
                          f"{_what_was_dropped(inputs)}; loosen these rules: gristmill whatif MANIFEST lists them")
    return TokenizerSample(learn, {source: measure[source] or learn[source] for source in shares})


def share_bytes(
    sources: Sequence[str], total_bytes: int, weights: Mapping[str, float] | None
) -> dict[str, int]:
    """How many bytes each source gives, by weight; sources without a weight are left out."""
    unknown = sorted(set(weights or ()) - set(sources))
    if unknown:
        raise SampleError(f"tokenizer.weights: no source is called {unknown[0]!r} (sources: {', '.join(sources)})")
    exact = {source: Fraction(1 if weights is None else weights.get(source, 0)) for source in sources}
    whole = sum(exact.values())
    if not whole:
        raise SampleError("tokenizer.weights: all are zero; give at least one source a weight above 0")
    return {source: int(total_bytes * weight / whole) for source, weight in exact.items() if weight}


def _what_was_dropped(inputs: Mapping[str, Path]) -> str:
    """`filter dropped 8 of 8 documents (gopher_quality/min_words 6, ...)` of each stage that dropped any."""
    found = []
    for stage in annotation_stages(inputs):
        tables = [read_annotations(inputs, shard, stage, ["keep", "reason"]) for shard in shard_names(inputs["ingest"])]
        reasons = Counter(reason for table in tables for reason in table["reason"].to_pylist() if reason is not None)
        read = sum(len(table) - table["keep"].null_count for table in tables)
        worst = ", ".join(f"{rule} {number:,}" for rule, number in reasons.most_common(SHOWN_RULES))
        if reasons:
            found.append(f"{stage} dropped {reasons.total():,} of {read:,} documents ({worst})")
    return "; ".join(found) or "the sources hold none"


@dataclass(frozen=True)
class _Documents:
    """All kept documents: (n, 2) id words, source names, text bytes, shard and row."""

    words: np.ndarray
    source: np.ndarray
    size: np.ndarray
    shard: np.ndarray
    row: np.ndarray


def _list_documents(inputs: Mapping[str, Path]) -> _Documents:
    columns: list[list[np.ndarray]] = [[np.empty((0, 2), np.uint64)], [np.empty(0, object)], *([np.empty(0, np.int64)]
                                                                                              for _ in range(3))]
    for number, shard in enumerate(shard_names(inputs["ingest"])):
        read = read_shard(inputs, shard, ["id", "source", "text"])
        rows, table = read.rows, read.documents.take(pa.array(read.rows))
        parts = (id_words(table["id"]), table["source"].cast(pa.string()).to_numpy(),
                 pc.binary_length(table["text"]).to_numpy(), np.full(len(rows), number), rows)
        for column, part in zip(columns, parts, strict=True):
            column.append(part)
    return _Documents(*(np.concatenate(column) for column in columns))


def _fill(sizes: np.ndarray, ordered: np.ndarray, share: int) -> list[tuple[int, int]]:
    """The first documents that fill a share, each with the bytes that are taken of it."""
    before = np.cumsum(sizes[ordered]) - sizes[ordered]
    taken = before < share
    limits = np.minimum(sizes[ordered], share - before)
    return list(zip(ordered[taken].tolist(), limits[taken].tolist(), strict=True))


def _read_texts(
    inputs: Mapping[str, Path], documents: _Documents, chosen: Mapping[int, tuple[str, bool, int]]
) -> list[tuple[int, str]]:
    """The chosen texts in the order of their ids, each cut to its limit."""
    wanted = np.array(sorted(chosen), dtype=np.int64)
    found: dict[int, str] = {}
    for number, shard in enumerate(shard_names(inputs["ingest"])):
        here = wanted[documents.shard[wanted] == number]
        if not len(here):
            continue
        texts = read_documents(inputs, shard, ["text"])["text"].take(pa.array(documents.row[here]))
        for row, text in zip(here.tolist(), texts.to_pylist(), strict=True):
            limit = chosen[row][2]
            found[row] = text if len(text) * 4 <= limit else text.encode()[:limit].decode(errors="ignore")
    words = documents.words[wanted]
    return [(int(row), found[int(row)]) for row in wanted[np.lexsort((words[:, 1], words[:, 0]))]]
