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
    found = candidates(inputs, shares, seed)
    chosen: dict[tuple[int, int], tuple[str, bool, int]] = {}
    for source, share in shares.items():
        learnt, measured = (found[source, held_out] for held_out in (False, True))
        if not len(learnt.size) or not len(measured.size):
            learnt = measured = learnt if len(learnt.size) else measured
        for place, limit in _fill(learnt, share):
            chosen[place] = (source, True, limit)
        for place, limit in _fill(measured, max(1, int(share * HELD_OUT))):
            chosen.setdefault(place, (source, False, limit))
    texts = _read_texts(inputs, chosen)
    learn = {source: [text for place, text in texts if chosen[place][:2] == (source, True)] for source in shares}
    measure = {source: [text for place, text in texts if chosen[place][:2] == (source, False)] for source in shares}
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
    """Documents of one source in the order of their draws: (n, 2) id words, text bytes, shard and row."""

    words: np.ndarray
    size: np.ndarray
    shard: np.ndarray
    row: np.ndarray

    def with_more(self, others: _Documents, key: int, share: int) -> _Documents:
        """The first of both that fill a share: which ones they are, more documents can only shorten."""
        words = np.concatenate([self.words, others.words])
        order = drawn_order(words, key)
        columns = [np.concatenate([getattr(self, name), getattr(others, name)])[order]
                   for name in ("size", "shard", "row")]
        kept = int(np.searchsorted(np.cumsum(columns[0]) - columns[0], share))
        return _Documents(words[order[:kept]], *(column[:kept] for column in columns))


def candidates(
    inputs: Mapping[str, Path], shares: Mapping[str, int], seed: int
) -> dict[tuple[str, bool], _Documents]:
    """Per source, and of those that are learnt from or held out, the documents that fill a share, of all shards.

    No more is held than these and one shard, whatever the size of the corpus.
    """
    nothing = _Documents(np.empty((0, 2), np.uint64), *(np.empty(0, np.int64) for _ in range(3)))
    found = {(source, held_out): nothing for source in shares for held_out in (False, True)}
    order, apart = order_key(seed, "tokenizer"), order_key(seed, "tokenizer", "held out")
    for number, shard in enumerate(shard_names(inputs["ingest"])):
        read = read_shard(inputs, shard, ["id", "source", "text"])
        table = read.documents.take(pa.array(read.rows))
        words, names = id_words(table["id"]), table["source"].cast(pa.string()).to_numpy()
        sizes, held = pc.binary_length(table["text"]).to_numpy().astype(np.int64), drawn_below(words, apart, HELD_OUT)
        for (source, held_out), known in found.items():
            here = np.flatnonzero((names == source) & (held == held_out))
            more = _Documents(words[here], sizes[here], np.full(len(here), number), read.rows[here])
            found[source, held_out] = known.with_more(more, order, shares[source])
    return found


def _fill(documents: _Documents, share: int) -> list[tuple[tuple[int, int], int]]:
    """The first documents that fill a share, shard and row, each with the bytes that are taken of it."""
    before = np.cumsum(documents.size) - documents.size
    taken = before < share
    limits = np.minimum(documents.size, share - before)[taken].tolist()
    places = zip(documents.shard[taken].tolist(), documents.row[taken].tolist(), strict=True)
    return list(zip(places, limits, strict=True))


def _read_texts(
    inputs: Mapping[str, Path], chosen: Mapping[tuple[int, int], tuple[str, bool, int]]
) -> list[tuple[tuple[int, int], str]]:
    """The chosen texts in the order of their ids, each cut to its limit."""
    found: list[tuple[bytes, tuple[int, int], str]] = []
    rows: dict[int, list[int]] = {}
    for place in sorted(chosen):
        rows.setdefault(place[0], []).append(place[1])
    for number, shard in enumerate(shard_names(inputs["ingest"])):
        if number not in rows:
            continue
        table = read_documents(inputs, shard, ["id", "text"]).take(pa.array(rows[number]))
        for row, name, text in zip(rows[number], *(table[key].to_pylist() for key in ("id", "text")), strict=True):
            limit = chosen[number, row][2]
            cut = text if len(text) * 4 <= limit else text.encode()[:limit].decode(errors="ignore")
            found.append((name, (number, row), cut))
    return [(place, text) for _, place, text in sorted(found)]
