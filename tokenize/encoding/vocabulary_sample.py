"""Training text of a tokenizer: a share of every source, chosen by hash.

1. draw: each shard sends its documents by source and draw, at most PARTITION_BYTES per
   partition.
2. The main process reads the partitions with the smallest draws of each source until
   they fill its share.
3. texts: each shard with chosen documents reads their texts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from itertools import product

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from gristmill.core.stage_context import Context
from gristmill.dataprep.document_numbers import number_documents
from gristmill.dataprep.documents import (
    Inputs,
    annotation_stages,
    read_annotations,
    read_documents,
    read_shard,
    shard_names,
)
from gristmill.dataprep.runners.shuffle import Sending, Sent, run_stream
from gristmill.dataprep.runners.tasks import Done, Task, shard_tasks
from gristmill.dataprep.shuffle_format import MOST_PARTITIONS, columns_of
from gristmill.tokenize.document_sampling import (
    draw,
    drawn_below,
    drawn_order,
    id_words,
    leading,
    words_of,
)
from gristmill.tokenize.shuffle import order_key

HELD_OUT = 0.05
"""Share of documents used only to measure the tokenizer."""
SHOWN_RULES = 3
DRAWN_SCHEMA = pa.schema(
    [
        ("high", pa.uint64()),
        ("low", pa.uint64()),
        ("size", pa.int64()),
        ("shard", pa.int64()),
        ("row", pa.int64()),
    ]
)
PARTITION_BYTES = 64_000_000
"""Bytes of DRAWN_SCHEMA per partition. The main process reads one at a time and sorts
it in four times the memory; partitions are larger from two billion documents on, since
there are at most MOST_PARTITIONS.
"""
LITTLE_TEXT = 256_000_000
"""Stored bytes that one worker reads faster than several start."""
DRAW, TEXTS = "draw", "texts"
"""Names of the jobs, and of their outputs."""


class SampleError(ValueError):
    """A sample without text, or with inconsistent shares."""


@dataclass(frozen=True)
class TokenizerSample:
    """Texts by source.

    Attributes:
        learn: training text of the vocabulary.
        measure: documents not used for training; taken from `learn` if a source has too
            few.
    """

    learn: Mapping[str, Sequence[str]]
    measure: Mapping[str, Sequence[str]]


def draw_sample(
    inputs: Inputs,
    sources: Sequence[str],
    total_bytes: int,
    weights: Mapping[str, float] | None,
    seed: int,
    context: Context,
) -> TokenizerSample:
    """Choose the kept documents of every source in the order of hash(seed, id) until
    its share is full.

    The document that overflows a share is cut at a character. A source with less text
    than its share contributes all of it; the other sources do not compensate.

    Args:
        inputs: the ingest and the annotating stages.
        sources: names of all sources.
        total_bytes: UTF-8 bytes of all shares together.
        weights: share by source; None for equal shares; sources not named get none.
        seed: of the choice.
        context: of the jobs.

    Raises:
        SampleError: a weight's source is unknown, all weights are zero, or no text
            remains.
    """
    shares = share_bytes(sources, total_bytes, weights)
    tasks = shard_tasks(inputs["ingest"])
    stored_bytes = sum(task.size_bytes for task in tasks)
    if stored_bytes < LITTLE_TEXT:
        context = context.with_one_worker()
    drawn = candidates(inputs, tasks, shares, seed, context)
    selection: dict[tuple[int, int], tuple[str, bool, int]] = {}
    for source, share in shares.items():
        learnt, measured = (drawn[source, held_out] for held_out in (False, True))
        measures = max(1, int(share * HELD_OUT))
        if not len(learnt) or not len(measured):
            learnt = measured = learnt if len(learnt) else measured
            measures = share
        for place, limit in _fill(learnt, share):
            selection[place] = (source, True, limit)
        for place, limit in _fill(measured, measures):
            selection.setdefault(place, (source, False, limit))
    learn: dict[str, list[str]] = {source: [] for source in shares}
    measure: dict[str, list[str]] = {source: [] for source in shares}
    for place, text in _read_texts(inputs, tasks, selection, context):
        source, is_learnt, _ = selection[place]
        (learn if is_learnt else measure)[source].append(text)
    if not any(learn.values()):
        raise SampleError(
            "no text is left to learn a tokenizer from (sources: "
            f"{', '.join(shares) or 'none'}): {_what_was_dropped(inputs)}; loosen "
            "these rules: gristmill whatif MANIFEST lists them"
        )
    return TokenizerSample(
        learn, {source: measure[source] or learn[source] for source in shares}
    )


def share_bytes(
    sources: Sequence[str], total_bytes: int, weights: Mapping[str, float] | None
) -> dict[str, int]:
    """Bytes of each source's share, by weight; sources without a weight are omitted."""
    unknown = sorted(set(weights or ()) - set(sources))
    if unknown:
        raise SampleError(
            f"tokenizer.weights: no source is called {unknown[0]!r} (sources: "
            f"{', '.join(sources)})"
        )
    exact = {
        source: Fraction(1 if weights is None else weights.get(source, 0))
        for source in sources
    }
    total_weight = sum(exact.values())
    if not total_weight:
        raise SampleError(
            "tokenizer.weights: all are zero; give at least one source a weight above 0"
        )
    return {
        source: int(total_bytes * weight / total_weight)
        for source, weight in exact.items()
        if weight
    }


def _what_was_dropped(inputs: Inputs) -> str:
    """`filter dropped 8 of 8 documents (gopher_quality/min_words 6, ...)` of each stage
    that dropped any.
    """
    dropped_by_stage = []
    for stage in annotation_stages(inputs):
        reasons = Counter[str]()
        read = 0
        for shard in shard_names(inputs["ingest"]):
            table = read_annotations(inputs, shard, stage, ["keep", "reason"])
            reasons.update(filter(None, table["reason"].to_pylist()))
            read += len(table) - table["keep"].null_count
        worst = ", ".join(
            f"{rule} {number:,}" for rule, number in reasons.most_common(SHOWN_RULES)
        )
        if reasons:
            dropped_by_stage.append(
                f"{stage} dropped {reasons.total():,} of {read:,} documents ({worst})"
            )
    return "; ".join(dropped_by_stage) or "the sources hold none"


def first_documents(rows: pa.Table, key: int, share: int) -> pa.Table:
    """First documents (rows of DRAWN_SCHEMA) in draw order that fill a share; more
    documents can only shorten this prefix.
    """
    columns = columns_of(rows)
    order = drawn_order(words_of(columns), key)
    size = columns["size"][order]
    number = int(np.searchsorted(np.cumsum(size) - size, share))
    return rows.take(order[:number])


def candidates(
    inputs: Inputs,
    tasks: Sequence[Task],
    shares: Mapping[str, int],
    seed: int,
    context: Context,
) -> dict[tuple[str, bool], pa.Table]:
    """Documents of all shards (DRAWN_SCHEMA, in draw order) that fill each source's
    share, by source and whether held out.

    Memory holds these and one partition, for any size of the corpus.

    Args:
        tasks: one per shard.
    """
    rows = int(number_documents(inputs["ingest"]).starts[-1])
    kinds = list(product(shares, (False, True)))
    row_bytes = sum(field.type.bit_width // 8 for field in DRAWN_SCHEMA)
    needed_bits = max(0, -(-rows * row_bytes // PARTITION_BYTES) - 1).bit_length()
    most_bits = (MOST_PARTITIONS // max(len(kinds), 1)).bit_length() - 1
    bits = max(0, min(needed_bits, most_bits))
    send = partial(send_draws, inputs=inputs, shares=dict(shares), seed=seed, bits=bits)
    _, sent = run_stream(DRAW, tasks, send, context, len(kinds) << bits)
    key = order_key(seed, "tokenizer")
    firsts = {}
    for place, kind in enumerate(kinds):
        share = shares[kind[0]]
        documents = DRAWN_SCHEMA.empty_table()
        for partition in range(place << bits, place + 1 << bits):
            if sent.is_nothing or documents["size"].to_numpy().sum() >= share:
                break
            more = pa.concat_tables([documents, sent.read(partition)])
            documents = first_documents(more, key, share)
        firsts[kind] = documents
    return firsts


def send_draws(
    task: Task,
    inputs: Inputs,
    shares: Mapping[str, int],
    seed: int,
    bits: int,
) -> Sending:
    """Send the documents of a shard to partitions by source, kind and leading bits of
    their draws.

    Only the documents of each kind that fill its share are sent.
    """
    read = read_shard(inputs, task.name, ["id", "source", "text"])
    table = read.documents.take(read.rows)
    words = id_words(table["id"])
    names = table["source"].cast(pa.string()).to_numpy()
    documents = pa.table(
        [
            words[:, 0],
            words[:, 1],
            pc.binary_length(table["text"]).cast(pa.int64()),
            np.full(len(words), task.payload["shard"]),
            read.rows,
        ],
        schema=DRAWN_SCHEMA,
    )
    key = order_key(seed, "tokenizer")
    is_held_out = drawn_below(words, order_key(seed, "tokenizer", "held out"), HELD_OUT)
    tables = [DRAWN_SCHEMA.empty_table()]
    targets = [np.empty(0, np.int64)]
    for place, (source, held_out) in enumerate(product(shares, (False, True))):
        mask = (names == source) & (is_held_out == held_out)
        first = first_documents(documents.filter(mask), key, shares[source])
        tables.append(first)
        drawn = draw(words_of(columns_of(first)), key)
        targets.append((place << bits) + leading(drawn, bits))
    yield Sent(DRAW, pa.concat_tables(tables).combine_chunks(), np.concatenate(targets))
    return Done()


def _fill(documents: pa.Table, share: int) -> list[tuple[tuple[int, int], int]]:
    """First documents that fill a share: shard and row, and the bytes used of each."""
    size = documents["size"].to_numpy()
    room = share - (np.cumsum(size) - size)
    is_used = room > 0
    limits = np.minimum(size, room)[is_used].tolist()
    shards, rows = (
        documents[name].to_numpy()[is_used].tolist() for name in ("shard", "row")
    )
    return list(zip(zip(shards, rows, strict=True), limits, strict=True))


def _read_texts(
    inputs: Inputs,
    tasks: Sequence[Task],
    chosen: Mapping[tuple[int, int], tuple[str, bool, int]],
    context: Context,
) -> list[tuple[tuple[int, int], str]]:
    """Chosen texts in the order of their ids, each cut to its limit."""
    rows: dict[int, list[tuple[int, int]]] = {}
    for (shard, row), (_, _, limit) in sorted(chosen.items()):
        rows.setdefault(shard, []).append((row, limit))
    reading = [
        replace(tasks[shard], payload={"shard": shard, "rows": shard_rows})
        for shard, shard_rows in rows.items()
    ]
    send = partial(send_texts, inputs=inputs)
    _, sent = run_stream(TEXTS, reading, send, context, 1)
    if sent.is_nothing:
        return []
    order = [(name, "ascending") for name in ("id", "shard", "row")]
    texts = sent.read(0).sort_by(order)
    shards, numbers, contents = (
        texts[name].to_pylist() for name in ("shard", "row", "text")
    )
    return list(zip(zip(shards, numbers, strict=True), contents, strict=True))


def send_texts(task: Task, inputs: Inputs) -> Sending:
    """Send the chosen texts of a shard: payload `shard`, and `rows` with the bytes used
    of each.
    """
    rows, limits = zip(*task.payload["rows"], strict=True)
    table = read_documents(inputs, task.name, ["id", "text"]).take(rows)
    texts = [
        text
        if len(text) * 4 <= limit
        else text.encode()[:limit].decode(errors="ignore")
        for text, limit in zip(table["text"].to_pylist(), limits, strict=True)
    ]
    sent = {
        "id": table["id"].combine_chunks(),
        "shard": np.full(len(rows), task.payload["shard"]),
        "row": np.array(rows),
        "text": pa.array(texts, pa.large_string()),
    }
    yield Sent(TEXTS, pa.table(sent), np.zeros(len(rows), np.int64))
    return Done()
