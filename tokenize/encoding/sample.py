"""The text that a tokenizer is learnt from: a share of every source, chosen by hash.

1. draw: per shard, its documents by source and draw, PARTITION_BYTES of them at the most in a partition.
2. This process reads as many partitions of each source as fill its share, which are those with the smallest draws.
3. texts: per shard that has any of them, their texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.dataprep.context import Context
from gristmill.dataprep.document_numbers import number_documents
from gristmill.dataprep.documents import (
    annotation_stages,
    read_annotations,
    read_documents,
    read_shard,
    shard_names,
)
from gristmill.dataprep.files import as_path
from gristmill.dataprep.jobs.engine import Done, Task, shard_tasks
from gristmill.dataprep.jobs.shuffled import Sent, Shuffled, run_shuffle
from gristmill.dataprep.shuffle import MOST_PARTITIONS
from gristmill.tokenize.document_sampling import draw, drawn_below, drawn_order, id_words
from gristmill.tokenize.order import order_key

HELD_OUT = 0.05
"""Share of the documents that only measure the tokenizer."""
SHOWN_RULES = 3
DRAWN_SCHEMA = pa.schema(
    [("high", pa.uint64()), ("low", pa.uint64()), ("size", pa.int64()), ("shard", pa.int64()), ("row", pa.int64())]
)
PARTITION_BYTES = 64_000_000
"""Of DRAWN_SCHEMA in a partition, of which this process reads one at a time, and four times as much while it sorts it;
more from two billion documents on, as there are no more than MOST_PARTITIONS."""
LITTLE_TEXT = 256_000_000
"""Bytes of stored documents that one worker has read before several have begun."""
DRAW, TEXTS = "draw", "texts"
"""The jobs, and what they send."""


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
    inputs: Mapping[str, Path],
    sources: Sequence[str],
    total_bytes: int,
    weights: Mapping[str, float] | None,
    seed: int,
    context: Context,
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
        context: where to run.

    Raises:
        SampleError: a weight's source is unknown, all weights are zero, or no text is left.
    """
    shares = share_bytes(sources, total_bytes, weights)
    tasks = shard_tasks(inputs["ingest"])
    if sum(task.size_bytes for task in tasks) < LITTLE_TEXT and context.runner == "local":
        context = replace(context, workers=1)
    found = candidates(inputs, tasks, shares, seed, context)
    chosen: dict[tuple[int, int], tuple[str, bool, int]] = {}
    for source, share in shares.items():
        learnt, measured = (found[source, held_out] for held_out in (False, True))
        measures = max(1, int(share * HELD_OUT))
        if not len(learnt.size) or not len(measured.size):
            learnt = measured = learnt if len(learnt.size) else measured
            measures = share
        for place, limit in _fill(learnt, share):
            chosen[place] = (source, True, limit)
        for place, limit in _fill(measured, measures):
            chosen.setdefault(place, (source, False, limit))
    texts = _read_texts(inputs, tasks, chosen, context)
    learn = {source: [text for place, text in texts if chosen[place][:2] == (source, True)] for source in shares}
    measure = {source: [text for place, text in texts if chosen[place][:2] == (source, False)] for source in shares}
    if not any(map(len, learn.values())):
        raise SampleError(
            f"no text is left to learn a tokenizer from (sources: {', '.join(shares) or 'none'}): "
            f"{_what_was_dropped(inputs)}; loosen these rules: gristmill whatif MANIFEST lists them"
        )
    return TokenizerSample(learn, {source: measure[source] or learn[source] for source in shares})


def share_bytes(sources: Sequence[str], total_bytes: int, weights: Mapping[str, float] | None) -> dict[str, int]:
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

    @classmethod
    def of(cls, rows: pa.Table) -> _Documents:
        """From rows of DRAWN_SCHEMA."""
        high, low, size, shard, row = (rows[name].to_numpy() for name in DRAWN_SCHEMA.names)
        return cls(np.stack([high, low], axis=1), size, shard, row)

    def table(self) -> pa.Table:
        """The inverse."""
        return pa.table([self.words[:, 0], self.words[:, 1], self.size, self.shard, self.row], schema=DRAWN_SCHEMA)

    def joined(self, others: _Documents) -> _Documents:
        """Both, one behind the other."""
        return _Documents(
            *(
                np.concatenate([getattr(self, name), getattr(others, name)])
                for name in ("words", "size", "shard", "row")
            )
        )

    def first(self, key: int, share: int) -> _Documents:
        """The first in the order of their draws, as many as fill a share: more documents can only shorten them."""
        order = drawn_order(self.words, key)
        size = self.size[order]
        kept = order[: int(np.searchsorted(np.cumsum(size) - size, share))]
        return _Documents(self.words[kept], self.size[kept], self.shard[kept], self.row[kept])


def candidates(
    inputs: Mapping[str, Path], tasks: Sequence[Task], shares: Mapping[str, int], seed: int, context: Context
) -> dict[tuple[str, bool], _Documents]:
    """Per source, and of those that are learnt from or held out, the documents that fill a share, of all shards.

    No more is held than these and one partition, whatever the size of the corpus.

    Args:
        tasks: one per shard.
    """
    rows = int(number_documents(inputs["ingest"]).starts[-1])
    kinds = [(source, held_out) for source in shares for held_out in (False, True)]
    wanted, most = -(-rows * _row_bytes() // PARTITION_BYTES), MOST_PARTITIONS // max(len(kinds), 1)
    bits = max(0, min(max(0, wanted - 1).bit_length(), most.bit_length() - 1))
    send = partial(
        send_draws,
        inputs={name: str(folder) for name, folder in inputs.items()},
        shares=dict(shares),
        seed=seed,
        bits=bits,
    )
    _, sent = run_shuffle(DRAW, tasks, send, context, {DRAW: len(kinds) << bits}, direct=True)
    return {
        kind: _first_of(sent[DRAW], place << bits, 1 << bits, order_key(seed, "tokenizer"), shares[kind[0]])
        for place, kind in enumerate(kinds)
    }


def _row_bytes() -> int:
    return sum(field.type.bit_width // 8 for field in DRAWN_SCHEMA)


def send_draws(
    task: Task, inputs: Mapping[str, str], shares: Mapping[str, int], seed: int, bits: int
) -> Generator[Sent, None, Done]:
    """Send the documents of a shard: to the partitions of their source and kind, there by the first bits of their draw.

    Of each kind those are enough that fill its share.
    """
    read = read_shard({name: as_path(folder) for name, folder in inputs.items()}, task.name, ["id", "source", "text"])
    table = read.documents.take(pa.array(read.rows))
    words, names = id_words(table["id"]), table["source"].cast(pa.string()).to_numpy()
    sizes = pc.binary_length(table["text"]).to_numpy().astype(np.int64)
    key, held = order_key(seed, "tokenizer"), drawn_below(words, order_key(seed, "tokenizer", "held out"), HELD_OUT)
    tables, targets = [DRAWN_SCHEMA.empty_table()], [np.empty(0, np.int64)]
    for place, (source, held_out) in enumerate((source, held_out) for source in shares for held_out in (False, True)):
        here = np.flatnonzero((names == source) & (held == held_out))
        shard = np.full(len(here), task.payload["shard"])
        kept = _Documents(words[here], sizes[here], shard, read.rows[here]).first(key, shares[source])
        tables.append(kept.table())
        drawn = draw(kept.words, key)
        targets.append((place << bits) + ((drawn >> np.uint64(64 - bits)).astype(np.int64) if bits else 0 * kept.row))
    yield Sent(DRAW, pa.concat_tables(tables).combine_chunks(), np.concatenate(targets))
    return Done()


def _first_of(sent: Shuffled, begin: int, number: int, key: int, share: int) -> _Documents:
    """The first documents of some partitions, in the order of their draws, until they fill a share."""
    found = _Documents.of(DRAWN_SCHEMA.empty_table())
    for partition in range(begin, begin + number):
        if sent.is_nothing or found.size.sum() >= share:
            break
        more = _Documents.of(sent.read(partition))
        found = found.joined(more).first(key, share)
    return found


def _fill(documents: _Documents, share: int) -> list[tuple[tuple[int, int], int]]:
    """The first documents that fill a share, shard and row, each with the bytes that are taken of it."""
    before = np.cumsum(documents.size) - documents.size
    taken = before < share
    limits = np.minimum(documents.size, share - before)[taken].tolist()
    places = zip(documents.shard[taken].tolist(), documents.row[taken].tolist(), strict=True)
    return list(zip(places, limits, strict=True))


def _read_texts(
    inputs: Mapping[str, Path],
    tasks: Sequence[Task],
    chosen: Mapping[tuple[int, int], tuple[str, bool, int]],
    context: Context,
) -> list[tuple[tuple[int, int], str]]:
    """The chosen texts in the order of their ids, each cut to its limit."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for place, (_, _, limit) in sorted(chosen.items()):
        rows.setdefault(place[0], []).append((place[1], limit))
    reading = [replace(tasks[shard], payload={"shard": shard, "rows": of_shard}) for shard, of_shard in rows.items()]
    send = partial(send_texts, inputs={name: str(folder) for name, folder in inputs.items()})
    _, sent = run_shuffle(TEXTS, reading, send, context, {TEXTS: 1}, direct=True)
    if sent[TEXTS].is_nothing:
        return []
    found = sent[TEXTS].read(0).sort_by([(name, "ascending") for name in ("id", "shard", "row")])
    places = zip(found["shard"].to_pylist(), found["row"].to_pylist(), strict=True)
    return list(zip(places, found["text"].to_pylist(), strict=True))


def send_texts(task: Task, inputs: Mapping[str, str]) -> Generator[Sent, None, Done]:
    """Send the chosen texts of a shard: payload `shard`, and `rows`, each with the bytes that are taken of it."""
    rows, limits = zip(*task.payload["rows"], strict=True)
    folders = {name: as_path(folder) for name, folder in inputs.items()}
    table = read_documents(folders, task.name, ["id", "text"]).take(pa.array(rows))
    texts = [
        text if len(text) * 4 <= limit else text.encode()[:limit].decode(errors="ignore")
        for text, limit in zip(table["text"].to_pylist(), limits, strict=True)
    ]
    yield Sent(
        TEXTS,
        pa.table(
            {
                "id": table["id"].combine_chunks(),
                "shard": np.full(len(rows), task.payload["shard"]),
                "row": np.array(rows),
                "text": pa.array(texts, pa.large_string()),
            }
        ),
        np.zeros(len(rows), np.int64),
    )
    return Done()
